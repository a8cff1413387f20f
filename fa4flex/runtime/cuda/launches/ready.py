"""A forward launch in which only pointers are missing, and the memory of its results."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fa4flex.codegen.analyze.extents import Extents, Reach, extents_of
from fa4flex.compiler.background import Awaited
from fa4flex.kernels.plan.sizes import NO_ANSWERS, Answers
from fa4flex.kernels.plan.splitting import Splitting
from fa4flex.runtime.call import NO_LENGTHS, Call, Results, SequenceLengths, more_than_rows
from fa4flex.runtime.cuda.device import faults
from fa4flex.runtime.cuda.device.counters import counters
from fa4flex.runtime.cuda.tables.lengths import LengthsKernel
from fa4flex.runtime.layouts import output_layout

_FLOAT = torch.float32


class Layouts(NamedTuple):
    """Shapes and strides of results, which follow from those of q.

    like_q   whether the output is in all respects like q, which torch allocates fastest: q has no gaps
    length   of the queries
    rows     shape of lse and max_scores
    """

    q_shape: tuple[int, ...]
    q_strides: tuple[int, ...]
    length: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    like_q: bool
    rows: tuple[int, ...]


class Sized(NamedTuple):
    """Everything of a launch that follows from the extents of a call and how its queries lie.

    splits, even   how many blocks share the keys of a tile, of kernels that split
    floats         of memory for their parts; None for kernels that do not split
    rows, parts    tensors without memory like the statistics and these parts: what is like another tensor
                   takes less host time than what is described; None where they would be made for one call
    """

    layouts: Layouts
    splits: int | None = None
    even: int | None = None
    floats: int | None = None
    rows: Tensor | None = None
    parts: Tensor | None = None


@dataclass(eq=False, slots=True)
class Remembered:
    """Layouts of the last results: they serve queries of this very shape and these strides."""

    layouts: Layouts | None = None


PARAMETERS = (
    "call", "out", "lse", "max_scores", "max_logit", "entropy", "tables", "max_q_len", "counters", "order",
    "splits", "even_splits", "workspace", "faults", *SequenceLengths._fields
)  # fmt: skip
"""Parameters of a Ready's launch function; other arguments are the same for all calls that look alike."""

REPEATED = (
    "q", "k", "v", "operands", "sinks", "scale", "out", "lse", "max_scores", "counters", "workspace"
)  # fmt: skip
"""Parameters of that of plain calls of the same sizes."""


@dataclass(frozen=True, eq=False, slots=True)
class Ready:
    """A launch in which only pointers are missing.

    launch      a function of PARAMETERS
    repeated    makes one of REPEATED, of the other arguments; None where tensors are converted, and for other
                keys than contiguous ones
    dtype, width   of the output
    kv_heads    heads of k and v
    statistics  which are computed
    reach       extents of the calls that it serves
    gaps        whether there are query rows that no sequence uses, which kernels do not write
    counted     whether blocks take tiles from a counter
    lengths     what corrects the lengths of a ragged batch, and sorts its tiles where that is asked for
    paged       whether keys and values are read from pages by a table, whose contents the kernel checks
    splitting   how many blocks share the keys of a tile, where several may
    tables      makes or finds the block tables of a call, where the mask is told by them, from it and
                its corrected lengths
    watch       looks after contents of captured tensors that launches take for granted, where there are any
    bits        of captured integers that the kernel was made for: see Engine
    answers     to questions about speed that the kernel was planned with
    until       what is to replace it, where it serves until a faster kernel is compiled
    remembered  what the last call had made that the next may use
    beside      whether there are max_logit and entropy among results
    more        whether a call does more than launch
    """

    launch: Callable[..., None]
    repeated: Callable[[dict[str, Any]], Callable[..., None]] | None
    dtype: torch.dtype
    width: int
    kv_heads: int
    statistics: tuple[str, ...]
    reach: Reach
    gaps: bool
    counted: bool
    paged: bool
    splitting: Splitting | None = None
    lengths: LengthsKernel | None = None
    tables: Callable[..., Any] | None = None
    watch: Callable[[Call], None] | None = None
    bits: tuple[tuple[int, int], ...] = ()
    answers: Answers = NO_ANSWERS
    until: Awaited | None = None
    remembered: Remembered = field(default_factory=Remembered)
    beside: bool = field(init=False)
    more: bool = field(init=False)

    def __post_init__(self) -> None:
        beside = more_than_rows(self.statistics)
        more = beside or self.gaps or self.paged or not self.lengths is self.tables is self.watch is None
        object.__setattr__(self, "beside", beside)
        object.__setattr__(self, "more", more)

    def __call__(self, call: Call, extents: Extents | None = None, sized: Sized | None = None) -> Results:
        """The results of a call within reach. `extents` and `sized` are those of the call, where they are
        known."""
        q = call.q
        if sized is None:
            sized = self.sized(call, extents)
        layouts, splits, even, floats, rows, like_parts = sized
        if layouts.like_q:
            out = torch.empty_like(q)
        else:
            out = q.new_empty_strided(layouts.shape, layouts.strides, dtype=self.dtype)
        lse = largest = of_heads = entropy = tables = order = taken = parts = told = None
        if self.statistics:
            lse, largest = self._statistics(q, layouts, rows)
        lengths = NO_LENGTHS
        if self.more:
            if self.beside:
                of_heads, entropy = self._beside(q, layouts)
            if self.gaps:
                _fill(out, entropy, lse, largest)
            if self.lengths is not None:
                lengths, order = self.lengths(call)
            if self.tables is not None:
                tables = self.tables(call, lengths)
            if self.watch is not None:
                self.watch(call)
            if self.paged:
                told = faults.table()
        if self.counted:
            taken = counters(q.get_device())
        if like_parts is not None:
            parts = torch.empty_like(like_parts)
        elif floats is not None:
            parts = q.new_empty(floats, dtype=_FLOAT)
        more = tables, layouts.length, taken, order, splits, even, parts, told
        self.launch(call, out, lse, largest, of_heads, entropy, *more, *lengths)
        return (out, lse, largest, of_heads, entropy) if self.beside else (out, lse, largest)

    def sized(self, call: Call, extents: Extents | None = None) -> Sized:
        layouts = self.layouts(call)
        if self.splitting is None:
            return Sized(layouts)
        batch, _, keys = extents_of(call.extents()) if extents is None else extents
        rows, keys = call.q.numel() // call.q.shape[-1], call.kv.visited(keys, self.splitting.tile_n)
        return Sized(layouts, *self.splitting.splits(batch, batch * self.kv_heads, keys, rows))

    def sized_again(self, call: Call, extents: Extents) -> Sized:
        """The same for many calls."""
        result, like = self.sized(call, extents), call.q.new_empty(1, dtype=_FLOAT)
        rows = like.expand(result.layouts.rows) if self.statistics == ("lse",) else None
        if result.floats is None:
            return result._replace(rows=rows)
        # What is like an empty tensor of stride 0 has that stride, too.
        return result._replace(rows=rows, parts=like.expand(result.floats) if result.floats else like[:0])

    def direct(self, sized: Sized) -> Callable[..., Results] | None:
        """Function of q, k, v, operands, sinks and scale of calls of these sizes, which are not gathered in a
        Call; None where a call does more than launch."""
        if self.repeated is None or self.more:
            return None
        layouts, splits, even, _, rows, parts = sized
        extents = {"max_q_len": layouts.length, "splits": splits, "even_splits": even}
        launch, like_q, counted = self.repeated(extents), layouts.like_q, self.counted

        def launched(q: Tensor, k: Tensor, v: Tensor, operands: Any, sinks: Any, scale: float) -> Results:
            lse = largest = None
            if like_q:
                out = torch.empty_like(q)
            else:
                out = q.new_empty_strided(layouts.shape, layouts.strides, dtype=self.dtype)
            if self.statistics:
                lse, largest = self._statistics(q, layouts, rows)
            taken = counters(q.get_device()) if counted else None
            memory = None if parts is None else torch.empty_like(parts)
            launch(q, k, v, operands or None, sinks, scale, out, lse, largest, taken, memory)
            return out, lse, largest

        return launched

    def layouts(self, call: Call) -> Layouts:
        """Layouts of out, lse and max_scores."""
        q = call.q
        sizes, strides = q.shape, q.stride()
        known = self.remembered.layouts
        if known is not None and known.q_shape == sizes and known.q_strides == strides:
            return known
        like_q = q.dtype is self.dtype and self.width == sizes[-1] and q.is_contiguous()
        laid = (sizes, strides) if like_q else output_layout(q, self.width)
        if call.packed:
            length, heads, _ = sizes
            rows: tuple[int, ...] = heads, length
        elif call.heads_first:
            rows, length = tuple(sizes[:-1]), sizes[2]
        else:
            batch, length, heads, _ = sizes
            rows = batch, heads, length
        result = Layouts(sizes, strides, length, *laid, like_q, rows)
        self.remembered.layouts = result
        return result

    def _statistics(
        self, q: Tensor, layouts: Layouts, like: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Memory for lse and max_scores."""
        if like is not None:
            return torch.empty_like(like, memory_format=torch.contiguous_format), None
        lse, largest = (
            q.new_empty(layouts.rows, dtype=_FLOAT) if name in self.statistics else None
            for name in ("lse", "max_scores")
        )
        return lse, largest

    def _beside(self, q: Tensor, layouts: Layouts) -> tuple[Tensor | None, Tensor | None]:
        """Memory for max_logit, which kernels raise, and for the entropy."""
        heads = layouts.rows[-2]
        of_heads = entropy = None
        if "max_logit" in self.statistics:
            of_heads = q.new_full((heads,), -math.inf, dtype=_FLOAT)
        if "entropy" in self.statistics:
            entropy = q.new_empty(layouts.rows, dtype=_FLOAT)
        return of_heads, entropy


def _fill(out: Tensor, entropy: Tensor | None, *statistics: Tensor | None) -> None:
    """Fill the output and statistics as for rows without keys."""
    out.zero_()
    if entropy is not None:
        entropy.zero_()
    for x in statistics:
        if x is not None:
            x.fill_(-math.inf)
