"""Score and mask hooks applied to a tile of scores in registers, each part at its own rate."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import cutlass
from cutlass import Float32, Int32, cute, select_

from fa4flex.kernels.common.ahead import Held, holding
from fa4flex.kernels.common.bits import (
    RUN,
    WORD,
    between,
    bit,
    columns_below,
    ones,
    with_bit,
    word_between,
)
from fa4flex.kernels.common.folds import with_folds
from fa4flex.kernels.common.fragment import compute_before, computed_once
from fa4flex.kernels.common.hooks import At, Hooks, Pointwise
from fa4flex.kernels.common.keys import RowEnds, row_spans
from fa4flex.kernels.common.logistic import weigh


@dataclass(frozen=True)
class Rows:
    """Values computed once per query row of a thread: indices, the hooks' row terms, the keys' limits."""

    q: tuple[Int32, ...]
    q_float: tuple[Float32, ...]
    start: tuple[tuple[Any, ...], ...]
    score: tuple[tuple[Any, ...], ...]
    mask: tuple[tuple[Any, ...], ...]
    spans: tuple[list[tuple[Int32 | None, Int32]], ...]
    in_order: Int32 | None = None
    """Flag where a mask hook is given besides: not 0 if the spans hold."""
    hidden: float = -float("inf")
    """Score of what is not allowed."""

    @property
    def most_spans(self) -> int:
        return max(map(len, self.spans))


def prepare_rows(
    hooks: Hooks, at: At, first: Int32, offsets: tuple[int, ...], ends: RowEnds | None = None
) -> Rows:
    """Rows first + offset. Rows past the end of the sequence repeat its last one: they are not written.
    ends: where spans come from, if not from a hook."""
    q = tuple(cutlass.max(cutlass.min(first + offset, at.q_len - 1), Int32(0)) for offset in offsets)
    q_float = tuple(x.to(Float32) for x in q)
    places = [at.but(q=x, q_float=y) for x, y in zip(q, q_float, strict=True)]
    return Rows(
        q,
        q_float,
        tuple(terms_of(hooks.start, "row", place) for place in places),
        tuple(terms_of(hooks.score, "row", place) for place in places),
        tuple(terms_of(hooks.mask, "row", place) for place in places) if ends is None else (),
        tuple(row_spans(hooks, place) if ends is None else ends.at(place) for place in places),
        None if ends is None else ends.in_order,
        hooks.hidden,
    )


def terms_of(pointwise: Pointwise | None, rate: str, at: At) -> tuple[Any, ...]:
    """Terms that a hook computes once per "row", "column", "diagonal" or "pair" of elements."""
    hook = None if pointwise is None else getattr(pointwise, rate)
    return () if hook is None else hook(at)


@dataclass(frozen=True)
class _Places:
    """Places of a thread's elements: row r is at.q = rows.q[r], column c is at.kv = first + columns[c]."""

    at: At
    rows: Rows
    row_terms: tuple[tuple[Any, ...], ...]
    row_offsets: tuple[int, ...]
    first_row: Int32
    first: Int32
    columns: tuple[int, ...]

    def elements(self, pointwise: Pointwise) -> Any:
        """Elements as `_elements` yields them, with long sums."""
        return with_folds(pointwise, self._elements(pointwise))

    def _elements(self, pointwise: Pointwise) -> Any:
        """(r, c, at) of every element, columns outermost: a column's terms are computed once, and a
        diagonal's once for all elements of the thread that lie on it."""
        diagonals: dict[int, tuple[Any, ...]] = {}
        base, base_float = self.first, self.first.to(Float32)
        across_float = (self.first - self.first_row).to(Float32)
        # A row past the end has its own difference from its q, which is the last one: at another, tables need
        # not have an element. Where nothing is read, no such row matters.
        across = [self.first - (q - row) for q, row in zip(self.rows.q, self.row_offsets, strict=True)]
        for c, column in enumerate(self.columns):
            kv = base + column
            if self.at.guard:
                kv = cutlass.min(kv, self.at.kv_len - 1)
            place = self.at.but(
                kv=kv,
                kv_float=base_float + Float32(column),
                kv_base=base,
                kv_base_float=base_float,
                kv_step=column,
            )
            place = place.but(column=terms_of(pointwise, "column", place))
            for r, row in enumerate(self.row_offsets):
                offset = column - row
                lies = {
                    "offset": across[r] + offset,
                    "offset_float": across_float + Float32(offset),
                    "offset_base": across[r],
                    "offset_base_float": across_float,
                    "offset_step": offset,
                }
                if offset not in diagonals:
                    diagonals[offset] = terms_of(pointwise, "diagonal", self.at.but(**lies))
                here = place.but(
                    **lies,
                    diagonal=diagonals[offset],
                    q=self.rows.q[r],
                    q_float=self.rows.q_float[r],
                    row=self.row_terms[r],
                )
                yield r, c, here.but(pair=terms_of(pointwise, "pair", here))


Early = tuple[tuple[int, int, At], ...]
"""The elements of a tile as (r, c, at), with all that needs no score computed."""

Words = tuple[tuple[Int32, ...], ...]
"""Bits of the columns of a tile, for each of its rows; see bits.py."""

GROUP = 16
"""Columns whose mask is computed at a time: their loads and terms take about a register each."""


@dataclass(frozen=True)
class Fragment:
    """The places of one tile of scores: thread-constant offsets, and the tile's first key. `below` says how
    many of the columns lie below a limit."""

    at: At
    rows: Rows
    row_offsets: tuple[int, ...]
    columns: tuple[int, ...]
    first_row: Int32
    first_column: Int32
    below: Callable[[Int32], Int32] = columns_below

    def _places(self, kv_first: Int32, guard: bool, row_terms: tuple[tuple[Any, ...], ...]) -> _Places:
        return _Places(
            self.at.but(guard=guard),
            self.rows,
            row_terms,
            self.row_offsets,
            self.first_row,
            kv_first + self.first_column,
            self.columns,
        )

    def start(self, hooks: Hooks, scores: cute.Tensor, kv_first: Int32, guard: bool) -> None:
        """scores (row, column): what q.k is to be added to. Nothing happens where that is 0."""
        if hooks.start is None:
            return
        places = self._places(kv_first, guard, self.rows.start)
        values = [(r, c, hooks.start.element(at)) for r, c, at in places.elements(hooks.start)]
        met: set[int] = set()
        for r, c, value in values:
            # What rows share, what a loop leaves, and what follows a branch is copied here, or the compiler
            # does it between the turn and the product, behind the product's fence.
            once = id(value) in met or hooks.start.folds or hooks.start.branches
            scores[r, c] = computed_once(value) if once else value
            met.add(id(value))

    def read_start(self, hooks: Hooks, kv_first: Int32, guard: bool, held: Held) -> None:
        """Read and hold the elements of captured tensors that `start` needs for this tile."""
        assert hooks.start is not None
        reading = replace(self, at=self.at.but(operands=holding(self.at.operands, held, True)))
        for _, _, at in reading._places(kv_first, guard, self.rows.start).elements(hooks.start):
            hooks.start.element(at)

    def start_held(self, hooks: Hooks, scores: cute.Tensor, kv_first: Int32, held: Held) -> None:
        """`start` of a tile of which all elements are held."""
        found = replace(self, at=self.at.but(operands=holding(self.at.operands, held, False)))
        found.start(hooks, scores, kv_first, False)

    def change(self, hooks: Hooks, scores: Any, kv_first: Int32, guard: bool) -> None:
        """scores (row, column) that started from 0: q.k becomes y. A group of columns is done before the next
        one begins: addresses, elements and terms of all of them would else be alive at once."""
        if hooks.start is not None:
            places = self._places(kv_first, guard, self.rows.start).elements(hooks.start)
            for r, c, at in self._pinned(scores, places):
                scores[r, c] = scores[r, c] + hooks.start.element(at)
        if hooks.score is not None:
            places = self._places(kv_first, guard, self.rows.score).elements(hooks.score)
            for r, c, at in self._pinned(scores, places):
                scores[r, c] = hooks.score.element(at.but(score=scores[r, c]))

    def by_groups(
        self, hook: Pointwise, made: Any, kv_first: Int32, guard: bool, row_terms: tuple[tuple[Any, ...], ...]
    ) -> Any:
        """(r, c, at) of all elements of a tile, one group of columns after another: of each, `made` (row,
        column) is computed before the next begins. row_terms: of the hook, row by row."""
        return self._pinned(made, self._places(kv_first, guard, row_terms).elements(hook))

    def _pinned(self, scores: Any, places: Any) -> Any:
        rows, columns = len(self.row_offsets), len(self.columns)
        for c in range(0, columns, GROUP):
            yield from itertools.islice(places, GROUP * rows)
            compute_before(scores[rows - 1, min(c + GROUP, columns) - 1])

    def prepare(self, hooks: Hooks, kv_first: Int32, guard: bool) -> Early | None:
        """Terms that `modify` needs besides scores: may be computed before they are."""
        if hooks.score is None:
            return None
        return tuple(self._places(kv_first, guard, self.rows.score).elements(hooks.score))

    def modify(self, hooks: Hooks, scores: cute.Tensor, early: Early | None) -> None:
        """scores (row, column): q.k becomes y. `early` is what `prepare` returned for this tile."""
        if hooks.score is None or early is None:
            return
        if hooks.score.logistic is not None:
            weigh(hooks.score, scores, early)
            return
        for r, c, at in early:
            scores[r, c] = hooks.score.element(at.but(score=scores[r, c]))

    def allowed(self, hooks: Hooks, kv_first: Int32) -> Words | None:
        """The bits of what a mask hook allows: it needs no score, and is called before there are any.

        What it computes per column and per pair would else be alive beside scores, probabilities and output.
        For the same reason, a group of columns is done before the next one begins.
        """
        if hooks.mask is None:
            return None
        if self.rows.in_order is not None:
            return _compared_or_asked(self, hooks, kv_first)
        return self.asked(hooks, kv_first)

    def compared(self, kv_first: Int32) -> Words:
        """The bits of what the rows' spans allow."""
        origin, starts = kv_first + self.first_column, range(0, len(self.columns), WORD)
        words = []
        for spans in self.rows.spans:
            ends = [
                (None if lo is None else self.below(lo - origin), self.below(hi - origin)) for lo, hi in spans
            ]
            words.append(
                tuple(
                    functools.reduce(operator.or_, (word_between(lo, hi, start) for lo, hi in ends))
                    for start in starts
                )
            )
        return tuple(words)

    def asked(self, hooks: Hooks, kv_first: Int32) -> Words:
        """The bits of what a mask hook allows, pair by pair."""
        assert hooks.mask is not None
        count = len(self.columns)
        words = [[Int32(0)] * len(range(0, count, WORD)) for _ in self.row_offsets]
        inside = self.below(self.at.kv_len - (kv_first + self.first_column))
        elements = self._places(kv_first, True, self._mask_terms(hooks)).elements(hooks.mask)
        for start in range(0, count, GROUP):
            which, place = divmod(start, WORD)
            for r, c, at in itertools.islice(elements, GROUP * len(words)):
                words[r][which] = with_bit(words[r][which], c % WORD, hooks.mask.element(at))
            exist = ones(inside - start, GROUP) << place | ((1 << place) - 1)
            for row in words:
                row[which] = row[which] & exist
            # Of bits, it may be known that they never are the number that is looked for; not so with kv_len.
            compute_before(functools.reduce(operator.xor, (row[which] for row in words), self.at.kv_len))
        return tuple(map(tuple, words))

    def _mask_terms(self, hooks: Hooks) -> tuple[tuple[Any, ...], ...]:
        """The mask's row terms; beside spans, which are what counts, they are not kept."""
        if self.rows.in_order is None:
            return self.rows.mask
        rows = zip(self.rows.q, self.rows.q_float, strict=True)
        return tuple(terms_of(hooks.mask, "row", self.at.but(q=q, q_float=x)) for q, x in rows)

    def inside(self, kv_first: Int32, count: int) -> list[Int32]:
        """Bits of what the spans of the only row allow, in `count` fragments of WORD columns next to each
        other."""
        origin = kv_first + self.first_column
        ends = [(None if lo is None else lo - origin, hi - origin) for lo, hi in self.rows.spans[0]]
        return [
            functools.reduce(operator.or_, (word_between(lo, hi, i * WORD) for lo, hi in ends))
            for i in range(count)
        ]

    def mask(
        self,
        scores: cute.Tensor,
        kv_first: Int32,
        allowed: Words | None,
        tangents: cute.Tensor | None = None,
    ) -> None:
        """scores (row, column): what is not allowed becomes `hidden`, and its tangent 0. `allowed` is what
        that returned for this tile; where it is None, the rows' spans decide."""
        if allowed is None:
            self._limit(scores, kv_first, tangents)
            return
        for r, words in enumerate(allowed):
            for i, bits in enumerate(words):
                self._keep(scores, tangents, r, i * WORD, WORD, bits)

    def _limit(self, scores: cute.Tensor, kv_first: Int32, tangents: cute.Tensor | None) -> None:
        origin = kv_first + self.first_column
        for r, spans in enumerate(self.rows.spans):
            ends = [
                (None if lo is None else self.below(lo - origin), self.below(hi - origin)) for lo, hi in spans
            ]
            for start in range(0, len(self.columns), RUN):
                bits = functools.reduce(operator.or_, (between(lo, hi, start) for lo, hi in ends))
                self._keep(scores, tangents, r, start, RUN, bits)

    def _keep(
        self, scores: cute.Tensor, tangents: cute.Tensor | None, r: int, start: int, most: int, bits: Int32
    ) -> None:
        """Row r of scores and their tangents: `hidden` and 0 where a column from `start` on has no bit."""
        for place in range(min(most, len(self.columns) - start)):
            allowed = (bits & bit(place)) != 0
            scores[r, start + place] = select_(allowed, scores[r, start + place], Float32(self.rows.hidden))
            if tangents is not None:
                tangents[r, start + place] = select_(allowed, tangents[r, start + place], Float32(0.0))


def apply_output(hooks: Hooks, fragment: Fragment, out: cute.Tensor, width: Any) -> None:
    """out (row, column): the normalised output becomes the function of it, at the places of a fragment whose
    columns are channels; `width` is how many channels there are."""
    assert hooks.output is not None
    last = fragment.columns[-1]
    at, first = fragment.at.but(kv_len=Int32(width)), fragment.first_row
    q = tuple(
        cutlass.max(cutlass.min(first + offset, at.q_len - 1), Int32(0)) for offset in fragment.row_offsets
    )
    q_float = tuple(x.to(Float32) for x in q)
    places = [at.but(q=x, q_float=y) for x, y in zip(q, q_float, strict=True)]
    terms = tuple(terms_of(hooks.output, "row", place) for place in places)
    here = replace(fragment, at=at, rows=Rows(q, q_float, (), (), (), ()))
    guard = not isinstance(width, int) or width % CHANNELS != 0 or last >= width
    elements = here._places(Int32(0), guard, terms).elements(hooks.output)
    for r, c, place in here._pinned(out, elements):
        out[r, c] = hooks.output.element(place.but(score=out[r, c]))


CHANNELS = 32
"""Widths of heads that are a multiple of this fill tiles of channels: there are no columns past the last."""

NO_ROWS = Rows((), (), (), (), (), ())


def quad_channels(
    at: At, first_row: Int32, out: cute.Tensor, lane: Int32, offsets: tuple[int, ...]
) -> Fragment:
    """Places of a lane's outputs (row, column) in accumulators."""
    return quad_fragment(at, NO_ROWS, first_row, 4 * cute.size(out, mode=[1]), lane, offsets)


def row_channels(at: At, q: Int32, first: Int32, count: int) -> Fragment:
    """Places of `count` channels of one row, from `first` on, which is even."""
    return Fragment(at, NO_ROWS, (0,), tuple(range(count)), q, first)


def one_row(x: cute.Tensor) -> cute.Tensor:
    """A vector as (1, column): the same registers."""
    return cute.make_tensor(x.iterator, cute.prepend(x.layout, cute.make_layout(1)))


def quad_fragment(
    at: At, rows: Rows, first_row: Int32, width: int, lane: Int32, offsets: tuple[int, ...] = (0,)
) -> Fragment:
    """Places of a lane in accumulators of `width` keys: of each 8 columns the two from 2 (lane % 4) on, of
    rows at these offsets from the first."""
    columns = tuple(8 * (c // 2) + c % 2 for c in range(width // 4))
    return Fragment(at, rows, offsets, columns, first_row, lane % 4 * 2)


@cute.jit
def _compared_or_asked(
    fragment: cutlass.Constexpr[Fragment], hooks: cutlass.Constexpr[Hooks], kv_first: Int32
) -> Words:
    """The bits of what a mask allows: by the rows' spans if these hold, else pair by pair. Either leaves the
    same few registers behind."""
    rows, count = len(fragment.row_offsets), len(range(0, len(fragment.columns), WORD))
    words = cute.make_rmem_tensor((rows, count), Int32)
    if fragment.rows.in_order != 0:
        _store(words, fragment.compared(kv_first))
    else:
        _store(words, fragment.asked(hooks, kv_first))
    return tuple(tuple(words[r, i] for i in range(count)) for r in range(rows))


def _store(target: cute.Tensor, words: Words) -> None:
    for r, row in enumerate(words):
        for i, word in enumerate(row):
            target[r, i] = word
