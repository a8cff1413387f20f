"""Share of the exponentials that FMA units compute, by the width of heads and how they are multiplied.

FlashAttention-4's numbers (arXiv 2603.05451, section 3.1.3, and its published kernel), which it found by
measurement on a B200; where it has none of its own for a case, those that it falls back to. One CTA alone
waits longer for its products, which leaves time. docs/notes/exponential.md has the accuracy.
"""

from __future__ import annotations

from dataclasses import dataclass

from fa4flex.kernels.fwd_sm100.config import FRAGMENT, Exponential
from fa4flex.kernels.fwd_sm100.tiles import WIDEST, narrow
from fa4flex.kernels.plan.errors import PlanError
from fa4flex.kernels.plan.problem import Problem
from fa4flex.kernels.plan.target import Target

ENOUGH = 16
"""Special functions per clock and multiprocessor, beyond which they take less time than products."""

DEGREES = (3, 4, 5)
"""Degrees of the polynomials that the kernel has coefficients of."""

OFF = Exponential(count=0)


@dataclass(frozen=True)
class Row:
    """For heads of q and k up to this width: where pairs of CTAs multiply together, and where one does."""

    head_dim: int
    paired: Exponential
    alone: Exponential


TABLE = (
    Row(64, Exponential(every=8, skip=1), Exponential(every=8, skip=1)),
    Row(128, Exponential(every=5, skip=1), Exponential(every=8, skip=1)),
    Row(192, Exponential(every=8, skip=0), Exponential(every=16, skip=1)),
    Row(WIDEST, OFF, OFF),
)
"""Two of every `every` pairs of keys, by a polynomial of degree 3. Products of the widest take twice as long
as special functions."""


def choose_exponential(problem: Problem, target: Target, ctas: int) -> Exponential:
    if target.special_results > ENOUGH:
        return OFF
    width = problem.head_dim if narrow(problem) else WIDEST
    row = next(row for row in TABLE if row.head_dim >= width)
    return row.paired if ctas == 2 else row.alone


def check_exponential(e: Exponential, tile_n: int) -> None:
    fragments = tile_n // FRAGMENT
    if e.count and e.degree not in DEGREES:
        raise PlanError(f"a polynomial of degree {e.degree}", f"one of {DEGREES}", "use one of these")
    if not 0 <= e.count <= e.every <= FRAGMENT // 2 or not 0 <= e.skip <= fragments:
        raise PlanError(
            f"{e!r}",
            f"0 <= count <= every <= {FRAGMENT // 2}, the pairs of a fragment, and 0 <= skip <= {fragments}",
            "change the share",
        )


def share(e: Exponential, tile_n: int) -> float:
    """Share of a row's exponentials that polynomials compute."""
    pairs, fragments = FRAGMENT // 2, tile_n // FRAGMENT
    in_fragment = sum(pair % e.every >= e.every - e.count for pair in range(pairs))
    return max(fragments - 1 - e.skip, 0) * in_fragment / (fragments * pairs)


def explain_exponential(e: Exponential, tile_n: int) -> str:
    part = share(e, tile_n)
    if not part:
        return "all exponentials on special-function units"
    return f"{part:.1%} of the exponentials by a polynomial of degree {e.degree} on FMA units"
