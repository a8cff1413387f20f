"""The whole flow from a variant to a program, one line per stage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from fa4flex.codegen.analyze.facts import SCORE, Facts, analyze
from fa4flex.codegen.evaluate import Captured
from fa4flex.codegen.expr import TRUE
from fa4flex.codegen.trace import Captures, Operand, Traced, trace
from fa4flex.variant import Variant

Mod = Callable[..., Any]


@dataclass(frozen=True)
class Program:
    """A variant, traced and analysed. Operands are read anew at each run; scalars are this compile's."""

    variant: Variant
    score: Traced | None
    mask: Traced | None
    facts: Facts
    operands: tuple[Operand, ...]
    scalars: tuple[int | float, ...]
    scalar_names: tuple[str, ...]

    def captured(self) -> Captured:
        """The captured tensors as they are now, and the captured numbers."""
        return Captured(self.tensors(), self.scalars)

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(operand.value() for operand in self.operands)


def build(variant: Variant) -> Program:
    """Variant -> Program. Raises TraceError where a mod cannot be turned into an expression."""
    captures = Captures()
    mods: dict[Literal["score", "mask"], Mod | None] = {"score": variant.score_mod, "mask": variant.allowed}
    traced = [trace(mod, kind, captures) for kind, mod in mods.items() if mod is not None]
    traces = {t.kind: t for t in captures.finish(*traced)}
    score, mask = traces.get("score"), traces.get("mask")
    facts = analyze(SCORE if score is None else score.root, TRUE if mask is None else mask.root)
    return Program(variant, score, mask, facts, captures.operands, captures.scalars, captures.scalar_names)
