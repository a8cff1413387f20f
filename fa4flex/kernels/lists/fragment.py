"""Score and mask hooks applied to a tile of listed keys, each of which has an index of its own."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import cutlass
from cutlass import Boolean, Float32, Int32, Uint32, cute, select_

from fa4flex.kernels.common.bits import WORD, bit, with_bit
from fa4flex.kernels.common.folds import with_folds
from fa4flex.kernels.common.fragment import compute_before
from fa4flex.kernels.common.hooks import At, Hooks, Pointwise
from fa4flex.kernels.common.pointwise import GROUP, Fragment, Rows, Words, terms_of
from fa4flex.kernels.lists.tiles import Near


@dataclass(frozen=True)
class Found:
    """Keys of a thread's columns of a tile, -1 for none; whether they are those beside the lists; and bits of
    the rows of the lists, of those of a tile, that list them, None where all do."""

    keys: tuple[Int32, ...]
    beside: Boolean | None
    rows: tuple[Int32, ...] | None = None


@dataclass(frozen=True)
class _Places:
    """Places of a thread's elements: row r is at.q = rows.q[r], column c is at.kv = found.keys[c]."""

    at: At
    rows: Rows
    row_terms: tuple[tuple[Any, ...], ...]
    found: Found

    def elements(self, pointwise: Pointwise) -> Any:
        """Elements as `_elements` yields them, with long sums."""
        return with_folds(pointwise, self._elements(pointwise))

    def _elements(self, pointwise: Pointwise) -> Iterator[tuple[int, int, At]]:
        """(r, c, at) of every element, columns outermost. Nothing is a step from what another has, and reads
        are clamped: where there is no key, at.kv is the first one."""
        for c, key in enumerate(self.found.keys):
            kv = Int32(cutlass.max(key, Int32(0)))
            number = kv.to(Float32)
            place = self.at.but(kv=kv, kv_float=number, kv_base=kv, kv_base_float=number)
            place = place.but(column=terms_of(pointwise, "column", place))
            for r, (q, q_float) in enumerate(zip(self.rows.q, self.rows.q_float, strict=True)):
                offset = kv - q
                across = offset.to(Float32)
                lies = {
                    "offset": offset,
                    "offset_float": across,
                    "offset_base": offset,
                    "offset_base_float": across,
                }
                here = place.but(
                    **lies,
                    diagonal=terms_of(pointwise, "diagonal", self.at.but(**lies)),
                    q=q,
                    q_float=q_float,
                    row=self.row_terms[r],
                )
                yield r, c, here.but(pair=terms_of(pointwise, "pair", here))


@dataclass(frozen=True)
class ListFragment(Fragment):
    """A Fragment of one row whose methods take what was Found in place of a tile's first key.

    near      keys that the row's query sees beside its list; None where no query sees any
    mine      bit of the row of the lists, of those of a tile, that the row's query has
    limited   spans decide, too
    """

    near: Near | None = None
    mine: Int32 | None = None
    limited: bool = False

    @classmethod
    def of(cls, plain: Fragment, near: Near | None, mine: Int32 | None, hooks: Hooks) -> Self:
        limited = hooks.spans is not None and hooks.mask is None
        return cls(**vars(plain), near=near, mine=mine, limited=limited)

    def _places(self, found: Any, guard: bool, row_terms: tuple[tuple[Any, ...], ...]) -> Any:
        return _Places(self.at.but(guard=True), self.rows, row_terms, found)

    def asked(self, hooks: Hooks, found: Any) -> Words:
        """The bits of what a mask hook allows, pair by pair."""
        assert hooks.mask is not None
        count = len(found.keys)
        words = [Int32(0) for _ in range(0, count, WORD)]
        elements = self._places(found, True, self.rows.mask).elements(hooks.mask)
        for start in range(0, count, GROUP):
            which = start // WORD
            for _, c, at in itertools.islice(elements, GROUP):
                words[which] = with_bit(words[which], c % WORD, hooks.mask.element(at))
            compute_before(functools.reduce(operator.xor, words, self.at.kv_len))
        return (tuple(words),)

    def mask(self, scores: Any, found: Any, allowed: Words | None, tangents: Any = None) -> None:
        """scores (1, column): what the row does not see, or counts in a tile of the other kind, becomes
        `hidden`."""
        for c, seen in self._each_seen(found, allowed):
            scores[0, c] = select_(seen, scores[0, c], Float32(self.rows.hidden))

    def _each_seen(self, found: Found, allowed: Words | None) -> Iterator[tuple[int, Boolean]]:
        """Columns one after the other, and whether the row sees their keys, and counts them in a tile of this
        kind."""
        spans = self._spans() if allowed is None and self.limited else None
        for c, key in enumerate(found.keys):
            # NOTHING is in no span.
            seen = key >= 0 if spans is None else functools.reduce(operator.or_, [x.has(key) for x in spans])
            if found.rows is not None:
                seen = seen & ((found.rows[c] & self.mine) != 0)
            if self.near is not None:
                seen = seen & (self.near.has(key) == found.beside)
            if allowed is not None:
                seen = seen & ((allowed[0][c // WORD] & bit(c % WORD)) != 0)
            yield c, seen

    def sees_all(self, found: Any, allowed: Words | None) -> Boolean | None:
        """True where the row sees all of a thread's keys of a tile, so that nothing is left to `mask`; None
        where that takes more than to find the largest key's place in a span."""
        if found.rows is not None or self.near is not None or allowed is not None:
            return None
        spans = self._spans() if self.limited else [Span.of(None, Int32(MOST))]
        if len(spans) > 1:
            return None
        places = [spans[0].place(key) for key in found.keys]
        return functools.reduce(cutlass.max, places) < spans[0].count

    def _spans(self) -> list[Span]:
        return [Span.of(lo, hi) for lo, hi in self.rows.spans[0]]


@dataclass(frozen=True)
class SeenFragment(ListFragment):
    """One for which it is found before there are scores which keys the row sees."""

    def seen(self, hooks: Hooks, found: Found) -> Words:
        """The bits of the keys that the row sees, and counts in a tile of this kind."""
        words = [Int32(0) for _ in range(0, len(found.keys), WORD)]
        for c, seen in self._each_seen(found, self.allowed(hooks, found)):
            words[c // WORD] = with_bit(words[c // WORD], c % WORD, seen)
        return (tuple(words),)

    def asks_more(self, hooks: Hooks, found: Found) -> bool:
        """True if more decides than whether there is a key, and the row's only span."""
        many = self.limited and len(self._spans()) > 1
        return many or found.rows is not None or self.near is not None or hooks.mask is not None

    def has_all(self, lowest: Int32, highest: Int32) -> Boolean:
        """True if the row's only span has keys from the one to the other."""
        (span,) = self._spans()
        return span.has(lowest) & span.has(highest)

    def mask(self, scores: Any, found: Any, allowed: Words | None, tangents: Any = None) -> None:
        """allowed: what `seen` returned, or the like."""
        Fragment.mask(self, scores, found, allowed, tangents)


MOST = 0x7FFFFFFF
"""Number above all keys."""


@dataclass(frozen=True)
class Span:
    """Keys `first` and up to `count` - 1 after it: one comparison tells whether it has a key, which NOTHING
    is not, as below 0 a number without a sign is large."""

    first: Int32
    count: Uint32

    @classmethod
    def of(cls, lo: Int32 | None, hi: Int32) -> Self:
        first = Int32(0) if lo is None else Int32(cutlass.max(lo, Int32(0)))
        return cls(first, Uint32(cutlass.max(hi - first, Int32(0))))

    def place(self, key: Int32) -> Uint32:
        return Uint32(key - self.first)

    def has(self, key: Int32) -> Boolean:
        return self.place(key) < self.count


def keys_of(ids: cute.Tensor, first: Int32, columns: tuple[int, ...]) -> tuple[Int32, ...]:
    """Keys of a thread's columns of a tile, of which ids has the keys."""
    return tuple(ids[first + column] for column in columns)
