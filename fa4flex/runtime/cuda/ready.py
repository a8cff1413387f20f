"""A forward launch in which only pointers are missing, and the memory of its results."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fa4flex.codegen.analyze.reach import Reach
from fa4flex.codegen.plan.splitting import Splitting
from fa4flex.runtime.cuda import faults
from fa4flex.runtime.cuda.call import NO_LENGTHS, Call, SequenceLengths
from fa4flex.runtime.cuda.counter import counter
from fa4flex.runtime.cuda.lengths import LengthsKernel
from fa4flex.runtime.layouts import output_layout

Results = tuple[Tensor, Tensor | None, Tensor | None]
"""out in q's layout; lse and max_scores [B, Hq, Sq], or [Hq, Tq] for packed queries, each None or empty where
it is computed on request and was not asked for."""

Layouts = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...] | None, tuple[int, ...] | None]
"""Shape and strides of the output, shapes of lse and max_scores; None for what is not computed."""


PARAMETERS = (
    "call", "out", "lse", "max_scores", "tables", "max_q_len", "counter", "order", "splits", "workspace",
    "faults", *SequenceLengths._fields
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
    tables      makes or finds the block tables of a call, where the mask is told by them
    watch       looks after contents of captured tensors that launches take for granted, where there are any
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
    tables: Callable[[Call], Any] | None = None
    watch: Callable[[Call], None] | None = None

    def __call__(self, call: Call) -> Results:
        q = call.q
        device, (length, layouts) = q.get_device(), self.layouts(call)
        out, lse, largest = self.results(q, layouts)
        tables = None if self.tables is None else self.tables(call)
        if self.watch is not None:
            self.watch(call)
        taken = counter(device) if self.counted else None
        lengths, order = (NO_LENGTHS, None) if self.lengths is None else self.lengths(call)
        splits = self.splits(call)
        parts = None if splits is None else q.new_empty(self.floats(q, splits), dtype=torch.float32)
        told = faults.table() if self.paged else None
        self.launch(call, out, lse, largest, tables, length, taken, order, splits, parts, told, *lengths)
        return out, lse, largest

    def splits(self, call: Call) -> int | None:
        """Splits of the keys of a tile; None where kernels do not split."""
        if self.splitting is None:
            return None
        shape = call.extents()
        return self.splitting.splits(shape.batch * call.kv_heads, shape.kv_len)

    def floats(self, q: Tensor, splits: int) -> int:
        """float32 of memory for the results of so many splits."""
        assert self.splitting is not None
        return self.splitting.floats(splits, q.numel() // q.shape[-1])

    def layouts(self, call: Call) -> tuple[int, Layouts]:
        """The query length, and layouts of out, lse and max_scores."""
        q = call.q
        shape, strides = output_layout(q, self.width)
        if call.packed:
            length, heads, _ = shape
            row: tuple[int, ...] = heads, length
        elif call.heads_first:
            row, length = shape[:-1], shape[2]
        else:
            batch, length, heads, _ = shape
            row = batch, heads, length
        lse, largest = (row if name in self.statistics else None for name in ("lse", "max_scores"))
        return length, (shape, strides, lse, largest)

    def results(self, q: Tensor, layouts: Layouts) -> Results:
        """Memory for what a launch computes."""
        shape, strides, of_lse, of_largest = layouts
        out = q.new_empty_strided(shape, strides, dtype=self.dtype)
        lse = None if of_lse is None else q.new_empty(of_lse, dtype=torch.float32)
        largest = None if of_largest is None else q.new_empty(of_largest, dtype=torch.float32)
        if self.gaps:
            _fill(out, lse, largest)
        return out, lse, largest


def _fill(out: Tensor, *statistics: Tensor | None) -> None:
    """Fill the output and statistics as for rows without keys."""
    out.zero_()
    for x in statistics:
        if x is not None:
            x.fill_(-math.inf)
