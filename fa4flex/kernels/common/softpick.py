"""Softpick's weights (Zuhri et al., arXiv:2504.20966), relative to m, a row's largest score, at least 0:

    u = exp(s - m) - exp(-m)
    p = max(u, 0) / total     total = sum |u| + eps exp(-m)
    ds = exp(s - m) ([s > 0] dP - sign(s) delta) / total

Near 0 the difference would have no digits, and u is exp(-m) expm1(s). A score of 0 weighs 0 and adds nothing
to the total: so do masked ones. eps joins the total as a sink of logit log(eps).
"""

from __future__ import annotations

from cutlass import Float32, cute, select_

from fa4flex.kernels.common.fragment import numbers
from fa4flex.kernels.common.softmax import LN_2, Finished, LaneSoftmax, OnlineSoftmax, total_of

NEAR = 2.0**-4
"""Exponents of 2 below which 2^x - 1 is a polynomial: both ways are 2^-17 off there, relatively."""


def signed(x: Float32, shift: Float32, base: Float32) -> Float32:
    """u of the score x in exponents of 2; base: 2^-shift."""
    far = cute.math.exp2(x - shift, fastmath=True) - base
    near = (LN_2 + x * (LN_2**2 / 2 + x * (LN_2**3 / 6))) * (x * base)
    return select_(cute.math.abs(x) < NEAR, near, far)


def base_of(shift: Float32) -> Float32:
    """exp(-m)."""
    return cute.math.exp2(-shift, fastmath=True)


def rectified(u: Float32) -> Float32:
    """The weight, up to the total."""
    return cute.arch.fmax(u, Float32(0.0))


def power(u: Float32, base: Float32) -> Float32:
    """exp(s - m), with the sign of u, and 0 where u is 0."""
    size = u + base
    return select_(u > 0, size, select_(u < 0, -size, Float32(0.0)))


def gradient(power: Float32, dp: Float32, delta: Float32) -> Float32:
    """dscore of a signed power over the total; delta: less delta."""
    return power * (delta + select_(power > 0, dp, Float32(0.0)))


class Softpick(OnlineSoftmax):
    """Softpick of a thread's rows, in place of their softmax."""

    def _use(self, largest: Float32, r: int) -> None:
        super()._use(cute.arch.fmax(largest, Float32(0.0)), r)

    def signed(self, row: list[Float32], r: int = 0) -> list[Float32]:
        """u of numbers of row r."""
        factor, shift = self.exponents(r)
        base = base_of(shift)
        return [signed(y * factor, shift, base) for y in row]

    def add(self, u: list[Float32], r: int = 0) -> None:
        """Take a multiple of four of them into the row's total."""
        self.state.total[r] = total_of([cute.math.abs(x) for x in u], self.state.total[r])

    def exponentiate(self, scores: cute.Tensor, is_finite: bool = False) -> None:
        """y of a tile, seen as (row, column), becomes its weight, up to the total, and part of that."""
        for r in range(self.state.rows):
            row = scores[r, None]
            u = self.signed(numbers(row), r)
            self.add(u, r)
            for c, x in enumerate(u):
                row[c] = rectified(x)

    def finished(self, largest: Float32, shift: Float32, total: Float32, sink: Float32 | None) -> Finished:
        """A row of these numbers. Where all scores are 0 or masked, it is as if there were none."""
        nothing = total == Float32(0.0)
        return super().finished(select_(nothing, -Float32.inf, largest), shift, total, sink)


class LaneSoftpick(Softpick, LaneSoftmax):
    """Softpick of one row that a lane has to itself."""
