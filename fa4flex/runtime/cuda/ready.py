"""A forward launch in which only pointers are missing, and the memory of its results."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fa4flex.codegen.analyze.domain import Shape
from fa4flex.runtime.cuda.call import NO_LENGTHS, Call, SequenceLengths
from fa4flex.runtime.cuda.counter import counter
from fa4flex.runtime.cuda.lengths import LengthsKernel
from fa4flex.runtime.layouts import empty_output

Results = tuple[Tensor, Tensor | None, Tensor | None]
"""out in q's layout; lse and max_scores [B, Hq, Sq], or [Hq, Tq] for packed queries, each None or empty where
it is computed on request and was not asked for."""

Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""Shape, strides and dtype of a result."""


PARAMETERS = "call", "out", "lse", "max_scores", "tables", "counter", "order", *SequenceLengths._fields
"""Parameters of a Ready's launch function; other arguments are the same for all calls that look alike."""


@dataclass(frozen=True, eq=False, slots=True)
class Ready:
    """A launch in which only pointers are missing.

    kernel      what is launched, with all arguments of its schema
    launch      the same as a function of PARAMETERS
    constants   arguments that are the same for all such calls
    converts    whether tensors are converted at each launch
    layouts     of out, lse and max_scores; None for what is not computed
    gaps        whether there are query rows that no sequence uses, which kernels do not write
    counted     whether blocks take tiles from a counter
    lengths     what corrects the lengths of a ragged batch, and sorts its tiles where that is asked for
    tables      makes or finds the block tables of a call, where the mask is told by them
    """

    kernel: Callable[..., None]
    launch: Callable[..., None]
    constants: Mapping[str, Any]
    converts: bool
    layouts: tuple[Layout, Layout | None, Layout | None]
    gaps: bool
    counted: bool
    lengths: LengthsKernel | None = None
    tables: Callable[[Call], Any] | None = None

    def __call__(self, call: Call) -> Results:
        device = call.q.get_device()
        out, lse, largest = self.results(call.q)
        tables = None if self.tables is None else self.tables(call)
        taken = counter(device) if self.counted else None
        lengths, order = (NO_LENGTHS, None) if self.lengths is None else self.lengths(call)
        self.launch(call, out, lse, largest, tables, taken, order, *lengths)
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
