"""Captured tensors that are computed from others, kept until those change.

A derived tensor that is computed anew at each launch is a new tensor, of which block tables would have to be
made again, and computing it costs more host time than the launch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fa4flex.codegen.build import Trace
from fa4flex.codegen.trace.captures import Place
from fa4flex.contents import VersionedCache, capturing

MOST_DERIVED = 64
"""Derived tensors kept per program, for as many captured ones."""


class Remembered:
    """Operands of one program as they are now.

    A derived tensor is kept for the tensors that it was computed from: their objects, memory and versions.
    """

    def __init__(self) -> None:
        self._derived: VersionedCache[Tensor] = VersionedCache(MOST_DERIVED)

    def tensors(
        self, trace: Trace, bases: tuple[Tensor, ...], looked_at: frozenset[int] = frozenset()
    ) -> tuple[Tensor, ...]:
        """`looked_at` are the slots whose contents the host makes block tables of, before a graph is
        captured."""
        slots = range(len(trace.operands))
        return tuple([self._value(trace, slot, bases, slot in looked_at) for slot in slots])

    def _value(self, trace: Trace, slot: int, bases: tuple[Tensor, ...], looked_at: bool) -> Tensor:
        operand = trace.operands[slot]
        if operand.recipe is None:
            return operand.of(bases).value()
        read = [bases[place.position] for place in operand.recipe.bases(Place)]

        def value() -> Tensor:
            return operand.of(bases).value()

        if any(x.requires_grad for x in read) and torch.is_grad_enabled():
            return value()
        if not looked_at and capturing():
            return value()  # a replay of the graph computes it again
        # What inference mode makes, no later call could save for its backward pass.
        return self._derived.made((slot, torch.is_inference_mode_enabled()), read, value)
