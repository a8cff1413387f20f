"""Contributions of pairs to the gradients of captured tensors, lowered: place, value, and their rates."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace

from fa4flex.codegen.analyze.facts import Facts
from fa4flex.codegen.analyze.gradient import ONE, CapturedGradient, quotient
from fa4flex.codegen.emit.lower import Lowering
from fa4flex.codegen.emit.nodes import KV, RATES, SHORT, Q, Rate, rate
from fa4flex.codegen.expr import Expr, const, substitute, sym
from fa4flex.errors import UnsupportedError

MOST = 16
"""Reads of captured tensors whose gradients one kernel adds up: each takes registers and instructions."""

MOST_AXES = 5
"""Largest rank of a tensor that the copy engine writes tiles of."""


@dataclass(frozen=True)
class LoweredShare:
    """See kernels/common/hooks.py: Share. `at` is the rate of `place`; weight None means 1; `copied`: what a
    tile writes is dS itself. `loop`: axes and extents of a loop of the device around place and weight."""

    slot: int
    which: int
    at: Rate
    once: bool
    place: tuple[Expr, ...]
    weight: Expr | None
    scaled: bool
    copied: bool
    loop: tuple[tuple[str, int], ...] = ()

    @property
    def rate(self) -> str:
        return "copy" if self.copied else "once" if self.once else self.at

    @property
    def axes(self) -> tuple[int, int]:
        """Positions of the query and the key in the place."""
        return self.place.index(Q), self.place.index(KV)


def lowered_shares(
    facts: Facts, gradients: Sequence[tuple[int, str]], lowering: Lowering, copied: Container[int] = ()
) -> tuple[LoweredShare, ...]:
    """Shares of the slots asked for; `copied` are those that take copies of dS, where it is what they want.
    Raises UnsupportedError where there are too many reads."""
    results = []
    for which, (slot, adding), term in _terms(facts, gradients):
        share = _lowered(facts, term, (which, adding), lowering)
        results.append(replace(share, copied=share.copied and slot in copied))
    return tuple(results)


def _terms(
    facts: Facts, gradients: Sequence[tuple[int, str]]
) -> list[tuple[int, tuple[int, str], CapturedGradient]]:
    """Reads of captured tensors, and which of the gradients they are of. Those along axes are written out
    where there are few, else each is one in a loop."""
    terms = [
        (which, one, term)
        for which, one in enumerate(gradients)
        for term in facts.gradient.of_slots([one[0]])
    ]
    for most in (MOST, 1):
        results = [
            (which, one, point)
            for which, one, term in terms
            for point in ([term] if _loops(term, most) else _along_axes(term))
        ]
        if len(results) <= MOST:
            return results
    raise UnsupportedError(
        f"gradients of more than {MOST} reads of captured tensors",
        f"at most {MOST} in a kernel",
        "nothing: gradients are computed in PyTorch operations instead",
    )


def _loops(term: CapturedGradient, most: int) -> bool:
    """True if a read along axes is one in a loop: what is added for each pair at a place of its own is more
    code than sums are. When loops run, scores are gone."""
    most = min(most, SHORT) if term.pattern == "general" else most
    return "score" not in term.value.free and math.prod(extent for _, extent in term.axes) > most


def _along_axes(term: CapturedGradient) -> Iterator[CapturedGradient]:
    """One for every value of the axes of reductions around the read."""
    for point in term.points():
        values = {sym(axis): const(value) for axis, value in point.items()}
        index = tuple(substitute(i, values) for i in term.index)
        yield replace(term, index=index, value=substitute(term.value, values), axes=())


def _lowered(
    facts: Facts, term: CapturedGradient, target: tuple[int, str], lowering: Lowering
) -> LoweredShare:
    by_score = facts.gradient.by_score
    rest = None if by_score is ONE else quotient(term.value, by_score)
    value = term.value if rest is None else rest
    weight = None if value is ONE else lowering.value_within(value, facts.score)
    place = lowering.place(term.slot, term.index, facts.score)
    which, adding = target
    scaled, once = rest is not None, adding != "sum"
    # dS of scaled scores is what lies in shared memory.
    copied = once and weight is None and (scaled or by_score is ONE) and len(place) <= MOST_AXES
    at = _rate_of(place)
    return LoweredShare(term.slot, which, at, once, place, weight, scaled, copied, term.axes)


def _rate_of(place: Sequence[Expr]) -> Rate:
    """Rate at which a place changes: what moves with the query as well as the key changes for every pair."""
    rates = {rate(i) for i in place} - {"uniform"}
    if not rates:
        return "uniform"
    return max(rates, key=RATES.index) if len(rates) == 1 else "pair"
