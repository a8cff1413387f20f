"""Numbers of rows that two warpgroups have in common, each a part of them: what they tell each other.

Threads of the same place in both warpgroups have parts of the same two rows, which four lanes share.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import cutlass
from cutlass import Float32, Int32, cute, select_

from fa4flex.kernels.common.barriers import sync
from fa4flex.kernels.common.softmax import OnlineSoftmax
from fa4flex.kernels.plan.barriers import NamedRow

Row = tuple[OnlineSoftmax, int]
"""A softmax, and a row of its."""


def row_number(lane: Int32, r: int) -> Int32:
    """Number of a thread's row among the 64 of a warpgroup."""
    return lane // 32 * 16 + lane % 32 // 4 + 8 * r


@cute.jit
def tell(target: cute.Tensor, unit: Any, lane: Int32, numbers: cutlass.Constexpr[list[Float32]]) -> None:
    """Write a number of each row to `target` (warpgroup, row), by one lane of four."""
    for r in cutlass.range_constexpr(len(numbers)):
        number = row_number(lane, r)
        if lane % 4 == 0:
            target[unit, number] = numbers[r]


@cute.jit
def add_totals(
    sums: cute.Tensor,
    unit: Any,
    lane: Int32,
    rows: cutlass.Constexpr[Sequence[Row]],
    written: cutlass.Constexpr[NamedRow],
) -> None:
    """Both warpgroups' totals of each row, which are relative to the same maxima. sums (warpgroup, row);
    written: where they meet."""
    for r in cutlass.range_constexpr(len(rows)):
        softmax, own = rows[r]
        mine = softmax.reduce(softmax.state.total[own], operator.add)
        softmax.state.total[own] = mine
        number = row_number(lane, r)
        if lane % 4 == 0:
            sums[unit, number] = mine
    sync(written)
    for r in cutlass.range_constexpr(len(rows)):
        softmax, own = rows[r]
        state = softmax.state
        both = state.total[own] + sums[1 - unit, row_number(lane, r)]
        # What ends the row adds up over its four lanes.
        state.total[own] = select_(lane % 4 == 0, both, Float32(0.0))
