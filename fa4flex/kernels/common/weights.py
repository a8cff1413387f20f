"""Weights of elementwise normalisers: what the score hook gives is the weight, and no sum is made of a row.

The object stands where an OnlineSoftmax does: there are no maxima to take, no exponentials, no totals,
nothing to rescale by and nothing to divide by. Masked scores are 0 (Hooks.hidden).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cutlass import Float32, cute

from fa4flex.kernels.common.hooks import At, Hooks
from fa4flex.kernels.common.softmax import Finished, LaneSoftmax, OnlineSoftmax, Running
from fa4flex.kernels.common.softpick import LaneSoftpick, Softpick


@dataclass(frozen=True)
class _Nothing:
    """State of `rows` rows from tile to tile: none."""

    rows: int

    def clear(self) -> None:
        """Nothing was kept."""


@dataclass(frozen=True)
class ElementwiseWeights:
    """Weights of a thread's rows."""

    state: _Nothing

    online = False
    """False: outputs of earlier tiles are not rescaled."""

    def maxima(self, scores: cute.Tensor) -> list[Float32]:
        return []

    def start(self, highest: list[Float32]) -> None:
        """Nothing is relative to a first tile."""

    def exponentiate(self, scores: cute.Tensor, is_finite: bool = False) -> None:
        """The scores are weights already."""

    def finish(self, sink: Float32 | None) -> list[Finished]:
        """No factor, and the logarithm of a denominator of 1."""
        assert sink is None
        return [Finished(None, Float32(0.0))] * self.state.rows


def weights_of(hooks: Hooks, at: At, threshold: float, state: Running, lanes: bool = False) -> Any:
    """The softmax of a thread's rows, or what stands in its place. lanes: a lane has a row to itself."""
    if hooks.elementwise:
        return ElementwiseWeights(_Nothing(state.rows))
    softmax = (LaneSoftmax, LaneSoftpick) if lanes else (OnlineSoftmax, Softpick)
    kind = softmax[hooks.rectified]
    return kind.of(hooks, at, threshold, state)
