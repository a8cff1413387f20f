"""Expressions under the names of the user's code: `t0` is the captured `bias`, `s0` the captured `window`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fa4flex.codegen.build import Program
from fa4flex.codegen.expr import SYMBOLS, Expr

_SLOT = re.compile(r"\b([ts])(\d+)\b|\b(score|kv)\b")
_OF_OUTPUT = {"score": "out", "kv": "d"}
"""Symbols of a score mod as an output function calls them."""


@dataclass(frozen=True)
class Names:
    """Names of captured tensors and numbers by slot, and of symbols that are called otherwise."""

    tensors: tuple[str, ...]
    numbers: tuple[str, ...]
    symbols: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def of(program: Program) -> Names:
        names = [operand.name for operand in program.operands]
        numbers = list(program.scalar_names)
        trace = program.bound.trace
        alone = trace.output is not None and trace.facts.output is None
        symbols = _OF_OUTPUT if alone else {}
        taken = Counter([*names, *numbers, *SYMBOLS, *symbols.values()])

        def settle(arguments: list[str], letter: str) -> tuple[str, ...]:
            # A name that is no identifier, or stands for two things, would make the listing ambiguous.
            return tuple(
                name if name.isidentifier() and taken[name] == 1 else f"{letter}{slot}"
                for slot, name in enumerate(arguments)
            )

        return Names(settle(names, "t"), settle(numbers, "s"), symbols)

    def rename(self, text: str) -> str:
        """`text`, as `str(expr)` prints it, with slots and symbols replaced by names."""
        tables = {"t": self.tensors, "s": self.numbers}

        def name(m: re.Match[str]) -> str:
            return self.symbols.get(m[3], m[3]) if m[3] else tables[m[1]][int(m[2])]

        return _SLOT.sub(name, text)

    def show(self, node: Expr) -> str:
        return self.rename(str(node))


def describe_operands(program: Program, names: Names) -> list[str]:
    """One line per captured tensor: name, dtype and shape, and whether it receives a gradient."""
    lines = []
    for name, operand in zip(names.tensors, program.operands):
        kind = f"{str(operand.dtype).removeprefix('torch.')}{list(operand.shape)}"
        origin = "" if operand.base is not None else ", computed anew at each call"
        alias = "" if name == operand.name else f" ({operand.name})"
        gradient = ", receives a gradient" if operand.differentiable else ""
        lines.append(f"{name}{alias}: {kind}{origin}{gradient}")
    return lines


def describe_numbers(program: Program, names: Names) -> list[str]:
    """One line per captured number that stays a run-time value."""
    return [f"{name} = {value}" for name, value in zip(names.numbers, program.scalars)]


def name_of(mod: Callable[..., Any] | None) -> str:
    """A mod as a heading: what its repr says, or its function's name."""
    return "none" if mod is None else getattr(mod, "__name__", repr(mod))
