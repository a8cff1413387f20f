"""A forward launch in which only pointers are missing, and the memory of its results."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fa4flex.codegen.analyze.extents import Extents, Reach, extents_of
from fa4flex.kernels.plan.splitting import Splits, Splitting
from fa4flex.runtime.call import NO_LENGTHS, Call, Results, SequenceLengths
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


@dataclass(eq=False, slots=True)
class Remembered:
    """Layouts of the last results: they serve queries of this very shape and these strides."""

    layouts: Layouts | None = None


PARAMETERS = (
    "call", "out", "lse", "max_scores", "tables", "max_q_len", "counters", "order", "splits", "even_splits",
    "workspace", "faults", *SequenceLengths._fields
)  # fmt: skip
"""Parameters of a Ready's launch function; other arguments are the same for all calls that look alike."""


@dataclass(frozen=True, eq=False, slots=True)
class Ready:
    """A launch in which only pointers are missing.

    kernel      what is launched, with all arguments of its schema
    launch      the same as a function of PARAMETERS
    constants   arguments that are the same for all such calls
    converts    whether tensors are converted at each launch
    dtype, width   of the output
    statistics  which of lse and max_scores are computed
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
    remembered  what the last call had made that the next may use
    """

    kernel: Callable[..., None]
    launch: Callable[..., None]
    constants: Mapping[str, Any]
    converts: bool
    dtype: torch.dtype
    width: int
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
    remembered: Remembered = field(default_factory=Remembered)

    def __call__(self, call: Call, extents: Extents | None = None) -> Results:
        """The results of a call within reach. `extents` are those of the call, where they are known."""
        q = call.q
        layouts = self.layouts(call)
        out, lse, largest = self.results(q, layouts)
        lengths, order = (NO_LENGTHS, None) if self.lengths is None else self.lengths(call)
        tables = None if self.tables is None else self.tables(call, lengths)
        if self.watch is not None:
            self.watch(call)
        taken = counters(q.get_device()) if self.counted else None
        splits = even = parts = None
        if self.splitting is not None:
            extents = extents_of(call.extents()) if extents is None else extents
            splits, even, floats = self.splits(call, extents)
            parts = q.new_empty(floats, dtype=_FLOAT)
        told = faults.table() if self.paged else None
        self.launch(
            call, out, lse, largest, tables, layouts.length, taken, order, splits, even, parts, told, *lengths
        )
        return out, lse, largest

    def splits(self, call: Call, extents: Extents) -> Splits:
        """Splits of the keys of a tile, of kernels that split."""
        assert self.splitting is not None
        batch, _, keys = extents
        return self.splitting.splits(batch, batch * call.kv_heads, keys, call.q.numel() // call.q.shape[-1])

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

    def results(self, q: Tensor, layouts: Layouts) -> Results:
        """Memory for what a launch computes."""
        if layouts.like_q:
            out = torch.empty_like(q)
        else:
            out = q.new_empty_strided(layouts.shape, layouts.strides, dtype=self.dtype)
        lse = largest = None
        if self.statistics:
            if "lse" in self.statistics:
                lse = q.new_empty(layouts.rows, dtype=_FLOAT)
            if "max_scores" in self.statistics:
                largest = q.new_empty(layouts.rows, dtype=_FLOAT)
        if self.gaps:
            _fill(out, lse, largest)
        return out, lse, largest


def _fill(out: Tensor, *statistics: Tensor | None) -> None:
    """Fill the output and statistics as for rows without keys."""
    out.zero_()
    for x in statistics:
        if x is not None:
            x.fill_(-math.inf)
