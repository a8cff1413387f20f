"""FA4FLEX_DEBUG: what is printed to standard error about each kernel, when it is compiled or found on disk.

1  the kernel and its problem, with the form that the mask is proved to have; its package, source and seconds
2  the plan as well
3  the generated source as well
4  its PTX as well, for which the kernel is compiled a second time
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from fa4flex.errors import InputError

if TYPE_CHECKING:
    from fa4flex.codegen.emit import Source
    from fa4flex.compiler.compile import Kernel
    from fa4flex.compiler.signature import Signature
    from fa4flex.kernels.plan.pipeline import Plan

VARIABLE = "FA4FLEX_DEBUG"
CHOICE, PLAN, SOURCE, PTX = LEVELS = 1, 2, 3, 4


def level() -> int:
    """The number in FA4FLEX_DEBUG, 0 without one. Raises InputError for what is no level."""
    value = os.environ.get(VARIABLE, "").strip() or "0"
    if value not in map(str, (0, *LEVELS)):
        raise InputError(
            f"{VARIABLE}={value!r}",
            "0 (nothing), 1 (choice and proof), 2 (plan), 3 (source) or 4 (PTX)",
            f"set {VARIABLE}=1, or unset it",
        )
    return int(value)


def report(level: int, plan: Plan, source: Source, signature: Signature, kernel: Kernel) -> None:
    """Print what `level` asks for about the kernel that was made of this plan and source."""
    explained, arch = plan.explain(), plan.target.name
    done = "compiled" if kernel.compiled else "found on disk"
    lines = [
        f"fa4flex: {explained.partition(chr(10))[0]}",
        f"fa4flex: {plan.module}, source {source.key[:16]}, {done} in {kernel.seconds:.2f} s",
    ]
    if level >= PLAN:
        lines.append(explained)
    if level >= SOURCE:
        lines.append(source.text)
    if level >= PTX:
        from fa4flex.compiler.inspect import inspect

        lines.append(inspect(source, plan.problem, signature, arch).ptx)
    print("\n".join(lines), file=sys.stderr, flush=True)
