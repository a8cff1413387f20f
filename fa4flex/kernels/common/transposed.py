"""Score and mask hooks applied to a tile of transposed scores in registers: its rows are keys.

A thread keeps few keys for all of a block's life, and meets new queries with every tile.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator
from dataclasses import dataclass, replace

import cutlass
from cutlass import Float32, Int32, cute, select_

from fa4flex.kernels.common.dropout import ColumnDropout
from fa4flex.kernels.common.folds import with_folds
from fa4flex.kernels.common.hooks import At, Hooks, Pointwise
from fa4flex.kernels.common.keys import column_spans, row_spans
from fa4flex.kernels.common.pointwise import terms_of
from fa4flex.kernels.common.softmax import FAR

Slopes = dict[tuple[int, int], Float32]
"""Slopes by (row, column) of a tile."""


def apply_slopes(ds: cute.Tensor, slopes: Slopes) -> None:
    """Gradients of modified scores, (row, column), become those of scaled ones."""
    for (r, c), slope in slopes.items():
        ds[r, c] = ds[r, c] * slope


@dataclass(frozen=True)
class Slab:
    """Places of a thread's elements of a tile: row r is key kv_first + keys[r], column first + c is query
    q_first + queries[c], q_first being the tile's first query and this thread's first column. pulled: see
    BackwardArguments, the rows of this head."""

    at: At
    kv_first: Int32
    keys: tuple[int, ...]
    queries: tuple[int, ...]
    first: int = 0
    dropout: ColumnDropout | None = None
    pulled: cute.Tensor | None = None

    def part(self, first: int, count: int) -> Slab:
        """Columns `first` to `first` + `count` of a whole tile."""
        return replace(self, queries=self.queries[first : first + count], first=first)

    def pull(self, probabilities: cute.Tensor, ds: cute.Tensor, q_first: Int32) -> None:
        """Take the entropy's gradient into dP' (row, column), which is still to be multiplied by P'. Where P'
        is 0, so is the product, but 0 times the logarithm's infinity would be NaN."""
        if self.pulled is None:
            return
        for c, query in enumerate(self.queries, self.first):
            factor = self.pulled[q_first + query]
            for r in range(len(self.keys)):
                log = cute.math.log2(probabilities[r, c], fastmath=True)
                ds[r, c] = ds[r, c] - factor * cute.arch.fmax(log, Float32(FAR))

    def elements(self, pointwise: Pointwise, q_first: Int32, guard: bool) -> Iterator[tuple[int, int, At]]:
        """Elements as `_elements` yields them, with long sums."""
        return with_folds(pointwise, self._elements(pointwise, q_first, guard))

    def _elements(self, pointwise: Pointwise, q_first: Int32, guard: bool) -> Iterator[tuple[int, int, At]]:
        """(r, c, at) of every element, columns outermost: a query's terms are computed once."""
        base_float = self.kv_first.to(Float32)
        across = self.kv_first - q_first
        across_float = across.to(Float32)
        columns = [self._key(pointwise, r, guard, base_float) for r in range(len(self.keys))]
        for c, query in enumerate(self.queries, self.first):
            q = q_first + query
            if guard:
                q = cutlass.max(cutlass.min(q, self.at.q_len - 1), Int32(0))
            row = self.at.but(guard=guard, q=q, q_float=q.to(Float32))
            row = row.but(row=terms_of(pointwise, "row", row))
            for r, key in enumerate(self.keys):
                step = key - query
                # Past an end, the difference of the indices that stand in: tables need have no other element.
                base = columns[r].kv - q - step if guard else across
                here = row.but(
                    kv=columns[r].kv,
                    kv_float=columns[r].kv_float,
                    kv_base=columns[r].kv_base,
                    kv_base_float=base_float,
                    kv_step=key,
                    column=columns[r].column,
                    offset=base + step,
                    offset_float=across_float + Float32(step),
                    offset_base=base,
                    offset_base_float=across_float,
                    offset_step=step,
                )
                here = here.but(diagonal=terms_of(pointwise, "diagonal", here))
                yield r, c, here.but(pair=terms_of(pointwise, "pair", here))

    def _key(self, pointwise: Pointwise, r: int, guard: bool, base_float: Float32) -> At:
        kv = self.kv_first + self.keys[r]
        if guard:
            kv = cutlass.max(cutlass.min(kv, self.at.kv_len - 1), Int32(0))
        at = self.at.but(
            guard=guard,
            kv=kv,
            kv_float=base_float + Float32(self.keys[r]),
            kv_base=kv - self.keys[r],
            kv_base_float=base_float,
            kv_step=self.keys[r],
        )
        return at.but(column=terms_of(pointwise, "column", at))

    def modify(self, hooks: Hooks, scores: cute.Tensor, q_first: Int32, guard: bool) -> None:
        """scores (row, column): q.k becomes y."""
        if hooks.start is not None:
            for r, c, at in self.elements(hooks.start, q_first, guard):
                scores[r, c] = scores[r, c] + hooks.start.element(at)
        if hooks.score is not None:
            for r, c, at in self.elements(hooks.score, q_first, guard):
                scores[r, c] = hooks.score.element(at.but(score=scores[r, c]))

    def slopes(self, hooks: Hooks, scores: cute.Tensor, q_first: Int32, guard: bool) -> Slopes | None:
        """Factors of gradients on their way to scores (row, column), which hold q.k here."""
        return None if hooks.slope is None else self.values(hooks.slope, q_first, guard, scores)

    def values(
        self, hook: Pointwise, q_first: Int32, guard: bool, scores: cute.Tensor | None = None
    ) -> Slopes:
        """Values of the hook at every element; where there are `scores`, at.score is one."""
        places = self.elements(hook, q_first, guard)
        if scores is None:
            return {(r, c): hook.element(at) for r, c, at in places}
        return {(r, c): hook.element(at.but(score=scores[r, c])) for r, c, at in places}

    def mask(self, hooks: Hooks, probabilities: cute.Tensor, q_first: Int32) -> None:
        """probabilities (row, column): what is not allowed, or past an end, becomes 0."""
        if hooks.queries is not None:
            self._keep_spans(hooks, probabilities, q_first)
            return
        for c, query in enumerate(self.queries, self.first):
            q = q_first + query
            safe = cutlass.max(cutlass.min(q, self.at.q_len - 1), Int32(0))
            spans = row_spans(hooks, self.at.but(q=safe, q_float=safe.to(Float32)))
            for r, key in enumerate(self.keys):
                kv = self.kv_first + key
                inside = [kv < hi if lo is None else (kv >= lo) & (kv < hi) for lo, hi in spans]
                allowed = functools.reduce(operator.or_, inside) & (q < self.at.q_len)
                probabilities[r, c] = select_(allowed, probabilities[r, c], Float32(0.0))
        if hooks.mask is not None:
            for r, c, at in self.elements(hooks.mask, q_first, True):
                probabilities[r, c] = select_(hooks.mask.element(at), probabilities[r, c], Float32(0.0))

    def _keep_spans(self, hooks: Hooks, probabilities: cute.Tensor, q_first: Int32) -> None:
        """Keep probabilities inside the spans of queries of a thread's few keys, and make the others 0."""
        for r, key in enumerate(self.keys):
            kv = self.kv_first + key
            safe = cutlass.max(cutlass.min(kv, self.at.kv_len - 1), Int32(0))
            # A key past the end sees nothing.
            spans = [
                (None if lo is None else lo - q_first, select_(kv < self.at.kv_len, hi, Int32(0)) - q_first)
                for lo, hi in column_spans(hooks, self.at.but(kv=safe, kv_float=safe.to(Float32)))
            ]
            for c, query in enumerate(self.queries, self.first):
                inside = [query < hi if lo is None else (query >= lo) & (query < hi) for lo, hi in spans]
                allowed = functools.reduce(operator.or_, inside)
                probabilities[r, c] = select_(allowed, probabilities[r, c], Float32(0.0))
