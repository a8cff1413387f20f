"""Captured tensors that are computed from others, kept until those change.

A derived tensor that is computed anew at each launch is a new tensor, with which a mask would have to be
proved again, and computing it costs more host time than the launch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fa4flex.codegen.trace import Operand

State = tuple[bool, tuple[tuple[int, int, int], ...]]


class Remembered:
    """Operands of one program as they are now. `watched` are the slots that masks are proved with."""

    def __init__(self, watched: frozenset[int]) -> None:
        self._watched = watched
        self._derived: dict[int, tuple[State, Tensor]] = {}

    def tensors(self, operands: Sequence[Operand]) -> tuple[Tensor, ...]:
        return tuple(
            operand.base if operand.base is not None else self._value(slot, operand)
            for slot, operand in enumerate(operands)
        )

    def _value(self, slot: int, operand: Operand) -> Tensor:
        assert operand.recipe is not None, "an operand has a base or a recipe"
        bases = list(operand.recipe.bases())
        if any(x.is_inference() or (x.requires_grad and torch.is_grad_enabled()) for x in bases):
            return operand.value()
        if slot not in self._watched and _capturing():
            return operand.value()  # a replay of the graph computes it again
        # What inference mode makes, no later call could save for its backward pass.
        state = torch.is_inference_mode_enabled(), tuple((id(x), x.data_ptr(), x._version) for x in bases)
        known = self._derived.get(slot)
        if known is None or known[0] != state:
            known = self._derived[slot] = state, operand.value()
        return known[1]


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
