"""Long sums for each score, and their like: one loop for many elements, whose body the elements share.

Each round reads what it needs of rows and of keys once for all elements of a group, and multiplies it for
each. A loop for each element would read twice as much for every product, and be as much code again.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import cutlass
from cutlass import Boolean, Int32, cute

from fa4flex.kernels.common.hooks import At, Fold, Pointwise
from fa4flex.kernels.common.math import way, where

GROUP = 32
"""Elements of a loop: each takes a register, and so does what a round reads."""

Places = Iterator[tuple[int, int, At]]


@cute.jit
def repeated(count: cutlass.Constexpr, body: cutlass.Constexpr, together: cutlass.Constexpr = 1) -> None:
    """body(0), body(1), ..., by a loop; `together` rounds are written out side by side."""
    for n in cutlass.range(count, unroll=together):
        body(n)


def with_folds(pointwise: Pointwise, places: Places) -> Places:
    """(r, c, at) with the folds of a function in `at`."""
    if not pointwise.folds:
        yield from places
        return
    while group := list(itertools.islice(places, GROUP)):
        found = folds_of(pointwise.folds, [at for *_, at in group])
        for (r, c, at), values in zip(group, found, strict=True):
            yield r, c, at.but(folds=values)


def folds_of(folds: Iterable[Fold], places: Sequence[At]) -> list[tuple[Any, ...]]:
    """The folds at each of the places."""
    known: list[tuple[Any, ...]] = [()] * len(places)
    for fold in folds:  # each sees those before it
        values = _folded(fold, [at.but(folds=x) for at, x in zip(places, known, strict=True)])
        known = [(*x, value) for x, value in zip(known, values, strict=True)]
    return known


def _folded(fold: Fold, places: Sequence[At]) -> list[Any]:
    combine, first = way(fold.how, fold.like)
    # A truth has no register of its own.
    like: Any = Int32 if fold.like is Boolean else fold.like
    totals = cute.make_rmem_tensor((len(places),), like)
    totals.fill(like(first))

    def round(n: Int32) -> None:
        for i, at in enumerate(places):
            term = fold.term(at.but(loop=(n,)))
            term = where(term, Int32(1), Int32(0)) if fold.like is Boolean else term
            totals[i] = combine(totals[i], term)

    repeated(fold.extent, round)
    return [totals[i] != 0 if fold.like is Boolean else totals[i] for i in range(len(places))]
