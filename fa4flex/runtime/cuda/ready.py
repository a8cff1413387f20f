"""A forward launch in which only pointers are missing, and the memory of its results."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fa4flex.codegen.analyze.domain import Shape
from fa4flex.runtime.cuda.block_tables import BlockTables
from fa4flex.runtime.cuda.call import Call
from fa4flex.runtime.cuda.conversions import converted
from fa4flex.runtime.cuda.counter import counter
from fa4flex.runtime.cuda.graphs import hold_if_captured
from fa4flex.runtime.cuda.tile_order import TileOrder
from fa4flex.runtime.layouts import empty_output

Results = tuple[Tensor, Tensor | None, Tensor | None]
"""out in q's layout; lse and max_scores [B, Hq, Sq], or [Hq, Tq] for packed queries, each None or empty where
it is computed on request and was not asked for."""

Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""Shape, strides and dtype of a result."""


@dataclass(frozen=True, eq=False, slots=True)
class Ready:
    """A launch in which only pointers are missing.

    conversions   by argument, what makes a tensor as the kernel reads it; most need nothing
    layouts   of out, lse and max_scores; None for what is not computed
    rows      tables of key intervals, which follow the captured tensors
    gaps      whether there are query rows that no sequence uses, which kernels do not write
    counted   whether blocks take tiles from a counter
    order     of the tiles of a ragged batch, where they are sorted
    """

    launch: Callable[..., None]
    conversions: dict[int, Callable[[Tensor], Tensor]]
    layouts: tuple[Layout, Layout | None, Layout | None]
    tables: BlockTables | None
    rows: tuple[Tensor, ...]
    scalars: tuple[int | float, ...] | None
    max_q_len: int
    gaps: bool
    counted: bool
    order: TileOrder | None = None

    def __call__(self, call: Call) -> Results:
        q, k, v, operands, sinks, lengths, _, scale, _, _ = call
        out, lse, largest = self.results(q)
        if self.rows or self.tables is not None:
            hold_if_captured(q.get_device(), self)
        if self.conversions:
            q, k, v, sinks, lengths, operands = converted(call, self.conversions)
        self.launch(
            q, k, v, out, lse, largest, *lengths,
            self.tables, sinks, operands + self.rows or None, self.scalars, scale, self.max_q_len,
            counter(q.get_device()) if self.counted else None,
            None if self.order is None else self.order(call),
        )  # fmt: skip
        return out, lse, largest

    def results(self, q: Tensor) -> Results:
        """Memory for what a launch computes."""
        (shape, strides, dtype), of_lse, of_largest = self.layouts
        out = q.new_empty_strided(shape, strides, dtype=dtype)
        lse = None if of_lse is None else _empty(q, of_lse)
        largest = None if of_largest is None else _empty(q, of_largest)
        if self.gaps:
            _fill(out, lse, largest)
        return out, lse, largest


def _fill(out: Tensor, *statistics: Tensor | None) -> None:
    """Fill the output and statistics as for rows without keys."""
    out.zero_()
    for x in statistics:
        if x is not None:
            x.fill_(-math.inf)


def _empty(q: Tensor, layout: Layout) -> Tensor:
    return q.new_empty_strided(layout[0], layout[1], dtype=layout[2])


def result_layouts(
    call: Call, shape: Shape, dtype: torch.dtype
) -> tuple[Layout, Layout | None, Layout | None]:
    """Layouts of out, lse and max_scores."""
    out = empty_output(call.q, call.v.shape[-1], dtype)
    sizes = (shape.heads, shape.q_len) if call.packed else (shape.batch, shape.heads, shape.q_len)
    strides = tuple(math.prod(sizes[i + 1 :]) for i in range(len(sizes)))
    row = sizes, strides, torch.float32
    lse, largest = (row if name in call.statistics else None for name in ("lse", "max_scores"))
    return (tuple(out.shape), out.stride(), dtype), lse, largest
