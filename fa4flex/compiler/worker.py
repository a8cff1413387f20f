"""A process that compiles one kernel into the cache on disk: `python -m fa4flex.compiler.worker < job`.

A job comes from the process that started this one (compile.py: compile_ahead), which waits for its end.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fa4flex.compiler import cache
from fa4flex.compiler.compile import build_object, kernel_key

if TYPE_CHECKING:
    from fa4flex.compiler.compile import Job

ARCH = "CUTE_DSL_ARCH"
"""Environment variable by which the compiler knows its GPU without asking the driver."""


def work(job: Job, folder: Path, plan: Any = None) -> None:
    """Put the kernel of a job into a folder, unless it is there. Raises PlanError for a plan that does not
    hold."""
    if plan is not None:
        plan.check()
    source, problem, signature, arch = job
    key = kernel_key(source.key, problem, signature, arch)
    # Otherwise the compiler asks the driver which GPU there is, and has no use for the answer. After the key,
    # which has variables of this name in it.
    os.environ.setdefault(ARCH, arch)
    cache.obtain(folder, key, lambda: build_object(source, problem, signature, arch))


@contextlib.contextmanager
def without_torch() -> Iterator[None]:
    """Within, `import torch` says that there is none, unless it is imported already."""
    hidden = "torch" not in sys.modules
    if hidden:
        sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if hidden:
            del sys.modules["torch"]


def import_calling_convention() -> None:
    """Import tvm_ffi, which imports torch wherever there is one: that takes a quarter of the time of this
    process, and a compiler needs nothing of it."""
    with without_torch(), contextlib.suppress(ImportError):
        import tvm_ffi  # noqa: F401


def import_compiler(arch: str) -> None:
    """Import all that a compilation for a chip needs, before its job is known."""
    told = os.environ.get(ARCH)
    os.environ[ARCH] = told or arch

    import fa4flex.compiler.entry  # noqa: F401

    if told is None:
        del os.environ[ARCH]  # keys have variables of this name in them


if __name__ == "__main__":
    gc.disable()
    import_calling_convention()
    for chip in sys.argv[1:]:
        import_compiler(chip)
    work(*pickle.load(sys.stdin.buffer))
    # What the interpreter takes down at its end would be waited for as well.
    os._exit(0)
