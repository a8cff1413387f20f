"""A forward launch in which only pointers are missing, and the memory of its results."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fa4flex.codegen.analyze.reach import Reach
from fa4flex.runtime.cuda.call import Call
from fa4flex.runtime.cuda.counter import counter
from fa4flex.runtime.cuda.graphs import hold_if_captured
from fa4flex.runtime.cuda.tile_order import TileOrder
from fa4flex.runtime.layouts import output_layout

Results = tuple[Tensor, Tensor | None, Tensor | None]
"""out in q's layout; lse and max_scores [B, Hq, Sq], or [Hq, Tq] for packed queries, each None or empty where
it is computed on request and was not asked for."""

Layouts = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...] | None, tuple[int, ...] | None]
"""Shape and strides of the output, shapes of lse and max_scores; None for what is not computed."""


PARAMETERS = "call", "out", "lse", "max_scores", "max_q_len", "counter", "order"
"""Parameters of a Ready's launch function; other arguments are the same for all calls that look alike."""


@dataclass(frozen=True, eq=False, slots=True)
class Ready:
    """A launch in which only pointers are missing.

    kernel      what is launched, with all arguments of its schema
    launch      the same as a function of PARAMETERS
    constants   arguments that are the same for all such calls; intervals: tables of key intervals
    owns        whether tensors are among them, which captured graphs must keep
    converts    whether tensors are converted at each launch
    dtype, width   of the output
    statistics  which of lse and max_scores are computed
    reach       extents of the calls that it serves
    gaps        whether there are query rows that no sequence uses, which kernels do not write
    counted     whether blocks take tiles from a counter
    order       of the tiles of a ragged batch, where they are sorted
    """

    kernel: Callable[..., None]
    launch: Callable[..., None]
    constants: Mapping[str, Any]
    owns: bool
    converts: bool
    dtype: torch.dtype
    width: int
    statistics: tuple[str, ...]
    reach: Reach
    gaps: bool
    counted: bool
    order: TileOrder | None = None

    def __call__(self, call: Call) -> Results:
        q = call.q
        device, (length, layouts) = q.get_device(), self.layouts(call)
        out, lse, largest = self.results(q, layouts)
        if self.owns:
            hold_if_captured(device, self)
        taken = counter(device) if self.counted else None
        order = None if self.order is None else self.order(call)
        self.launch(call, out, lse, largest, length, taken, order)
        return out, lse, largest

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
