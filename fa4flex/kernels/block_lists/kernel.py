"""Classes of the blocks of a map, empty, partial or full, from the lists of each row: a warp per row.

clear: all blocks of the row are empty
  |
mark:  those that are listed as partial, then those that are listed as full
  |
count: fewer blocks are not empty than entries are valid where one is listed twice

A list's count beyond its entries stands for all of them, or for none; entries that are no block are left out;
full overrides partial. Each of these is a fault, told by the next call.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
from cuda.bindings import driver as cuda
from cutlass import Int32, Int64, Uint8, const_expr, cute, select_

from fa4flex.kernels.common.arguments import named
from fa4flex.kernels.common.faults import report
from fa4flex.kernels.plan.arguments import BLOCK_LISTS

THREADS = 128
WARPS = THREADS // 32
EMPTY, PARTIAL, FULL = 0, 1, 2

_Arguments: Any = named("BlockListArguments", BLOCK_LISTS.read_by("kernel"))


class BlockListArguments(_Arguments):
    """counts [B, H, R] and indices [B, H, R, entries], of partial blocks, and alike full_counts and
    full_indices, None where absent: int32 or int64 of any strides. classes uint8 [B, H, R, C] is written."""


class Row(NamedTuple):
    """A row of blocks."""

    b: Int32
    h: Int32
    number: Int32


class Listed(NamedTuple):
    """Lists of one kind of blocks."""

    counts: cute.Tensor
    indices: cute.Tensor


class OfRows:
    """A kernel that makes classes [B, H, R, C], a warp for each row."""

    direction: str
    """Schema of its arguments."""

    config = None

    @cute.jit
    def __call__(self, arguments: Any, stream: cuda.CUstream) -> None:
        self.device(arguments).launch(
            grid=[cute.ceil_div(self.rows(arguments), WARPS), 1, 1],
            block=[THREADS, 1, 1],
            stream=stream,
            use_pdl=True,
        )

    def rows(self, arguments: Any) -> Int32:
        """Rows of all batch entries and heads."""
        batch, heads, rows, _ = arguments.classes.shape
        return Int32(batch) * Int32(heads) * Int32(rows)

    @cute.kernel
    def device(self, arguments: Any) -> None:
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        number = cute.arch.block_idx()[0] * WARPS + cute.arch.make_warp_uniform(cute.arch.warp_idx())
        _, heads, rows, _ = arguments.classes.shape
        if number < self.rows(arguments):
            self.classify(arguments, Row(number // rows // heads, number // rows % heads, number % rows))

    def classify(self, arguments: Any, row: Row) -> None:
        """A warp's: the classes of a row."""
        raise NotImplementedError


class BlockLists(OfRows):
    direction = "lists"

    @cute.jit
    def classify(self, arguments: BlockListArguments, row: Row) -> None:
        """A warp's: the classes of a row's blocks."""
        a, lane = arguments, cute.arch.lane_idx()
        classes = a.classes[row.b, row.h, row.number, None]
        columns = Int32(classes.shape[0])
        for first in cutlass.range(0, columns, 32, unroll=1):
            if first + lane < columns:
                classes[first + lane] = Uint8(EMPTY)
        cute.arch.sync_warp()
        valid = self.mark(arguments, Listed(a.counts, a.indices), row, PARTIAL)
        if const_expr(a.full_counts is not None):
            cute.arch.sync_warp()
            valid += self.mark(arguments, Listed(a.full_counts, a.full_indices), row, FULL)
        cute.arch.sync_warp()
        marked = Int32(0)
        for first in cutlass.range(0, columns, 32, unroll=1):
            kind = classes[cutlass.min(first + lane, columns - 1)]
            marked += select_((first + lane < columns) & (kind != EMPTY), Int32(1), Int32(0))
        missing = cute.arch.warp_redux_sync(valid - marked, "add")
        if missing != 0 and lane == 0:
            report(a.faults, "block repeated", (Int64(row.b), Int64(row.h), Int64(row.number)))

    @cute.jit
    def mark(
        self,
        arguments: BlockListArguments,
        listed: Listed,
        row: Row,
        kind: cutlass.Constexpr[int],
    ) -> Int32:
        """A warp's: give the listed blocks of a row their class. Returns a lane's number of valid entries."""
        counts, indices, lane = listed.counts, listed.indices, cute.arch.lane_idx()
        classes = arguments.classes[row.b, row.h, row.number, None]
        entries, columns = Int32(indices.shape[3]), Int64(classes.shape[0])
        value = Int64(counts[row.b, row.h, row.number])
        count = Int32(cutlass.max(cutlass.min(value, Int64(entries)), Int64(0)))
        if Int64(count) != value and lane == 0:
            report(arguments.faults, "block count", (value, Int64(entries)))
        valid, outside, wrong = Int32(0), Int32(0), Int64(0)
        for first in cutlass.range(0, count, 32, unroll=1):
            if first + lane < count:
                block = Int64(indices[row.b, row.h, row.number, first + lane])
                if block >= 0 and block < columns:
                    classes[Int32(block)] = Uint8(kind)
                    valid += 1
                else:
                    outside, wrong = Int32(1), block
        some = cute.arch.vote_ballot_sync(outside != 0)
        if outside != 0 and (some & ((Int32(1) << lane) - 1)) == 0:
            report(arguments.faults, "block beyond", (wrong, columns - 1))
        return valid
