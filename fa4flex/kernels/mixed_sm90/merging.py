"""Merges what parts of the keys of a tile of few rows leave, by the warp that ends the last one: 16 rows at a
time. Whoever that is adds up in the same order."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, const_expr, cute, select_

from fa4flex.kernels.combine.sums import BATCH, Batch, largest_of_lanes
from fa4flex.kernels.common.arguments import Arguments
from fa4flex.kernels.common.packed_rows import Row, Tile
from fa4flex.kernels.common.softmax import LOG2_E, finish_row, finite, sink_of
from fa4flex.kernels.common.work import Work, put_statistic
from fa4flex.kernels.mixed_sm90.sequences import Piece, log_sums, outputs
from fa4flex.kernels.plan.arguments import TAKEN

WARP_ROWS = 16
"""Rows of a warp."""


class RowParts(NamedTuple):
    """Rows of the workspace that parts leave of one row: the first, how many, and how far apart they lie."""

    first: Int32
    count: Int32
    apart: Int32


class Share(NamedTuple):
    """A lane's part of a row: the largest log-sum-exp of its parts, the finite one that exponents are taken
    from, and the sums of some columns (together, 1)."""

    lane: Int32
    largest: Float32
    shift: Float32
    sums: cute.Tensor


class Merging:
    """A lane adds up `together` columns next to each other, of tiles as wide as `config.head_dim_v`, which is
    128 at most."""

    def __init__(self, config: Any) -> None:
        self.together = 4 if config.head_dim_v > 64 else 2

    @cute.jit
    def run(self, arguments: Arguments, piece: Piece, tile: Tile, lane: Int32) -> None:
        """One warp's, which has written its rows of a part. `lane`: of its warpgroup."""
        cut = piece.cut
        warp, lane = cute.arch.make_warp_uniform(lane // 32), lane % 32
        place = arguments.counters.iterator + (TAKEN + 4 * cut.split + warp)
        cute.arch.fence_acq_rel_gpu()
        cute.arch.sync_warp()
        done = Int32(0)
        if lane == 0:
            done = cute.arch.atomic_add(place, Int32(1), sem="acq_rel", scope="gpu")
        if cute.arch.shuffle_sync(done, 0) == cut.parts - 1:
            # What others wrote before they counted up is seen from here on.
            cute.arch.fence_acq_rel_gpu()
            if lane == 0:
                cute.arch.store(place, Int32(0), sem="relaxed", scope="gpu")
            first, end = WARP_ROWS * warp, cutlass.min(WARP_ROWS * (warp + 1), tile.rows)
            for number in cutlass.range(first, end, unroll=1):
                self.row(arguments, piece, tile, number, lane)

    @cute.jit
    def row(self, arguments: Arguments, piece: Piece, tile: Tile, number: Int32, lane: Int32) -> None:
        """A row of all parts, which lie `tile.rows` rows apart."""
        work, cut = piece
        first = cut.first - cut.part * tile.rows + number
        sums = log_sums(arguments)
        largest = -Float32.inf
        for part in cutlass.range(lane, cut.parts, 32, unroll=1):
            largest = cute.arch.fmax(largest, sums[first + part * tile.rows])
        largest = largest_of_lanes(largest)
        mine = cute.make_rmem_tensor((self.together, 1), Float32)
        mine.fill(0.0)
        share = Share(lane, largest, finite(largest), mine)
        total = Float32(0.0)
        for part in cutlass.range(0, cut.parts, BATCH, unroll=1):
            total = self.add(arguments, RowParts(first, cut.parts, tile.rows), part, share, total)
        self.write(arguments, work, tile.row(number), share, total)

    def add(
        self, arguments: Arguments, parts: RowParts, begun: Int32, share: Share, total: Float32
    ) -> Float32:
        """Add BATCH parts of a row to this lane's sums; returns the sum of their weights and `total`."""
        sums, kept = log_sums(arguments), outputs(arguments)
        column = cutlass.min(share.lane, arguments.v.shape[3] // self.together - 1)
        batch = Batch.of(self.together, 1)
        for i in range(BATCH):
            part = cutlass.min(begun + i, parts.count - 1)
            some = begun + i < parts.count
            at = parts.first + part * parts.apart
            batch.log_sums[i] = select_(some, sums[at], -Float32.inf)
            row = cute.logical_divide(kept[at, None], cute.make_layout(self.together))
            cute.autovec_copy(row[None, column], batch.outputs[None, 0, i])
        return batch.add(share.shift, share.sums, total)

    @cute.jit
    def write(self, arguments: Arguments, work: Work, row: Row, share: Share, total: Float32) -> None:
        """The row's output and its log-sum-exp."""
        lane = share.lane
        scale, lse = finish_row(share.largest, share.shift * LOG2_E, total, sink_of(arguments, row.h))
        if const_expr(arguments.lse is not None):  # noqa: SIM102  one is decided when compiled, one when run
            if lane == 0:
                put_statistic(arguments.lse, work._replace(h=row.h), row.q, lse)
        target = arguments.out[work.q_offset + row.q, row.h, None]
        if lane * self.together < arguments.v.shape[3]:
            kind = target.element_type
            rounded = cute.make_rmem_tensor((self.together,), kind)
            for j in cutlass.range_constexpr(self.together):
                rounded[j] = (share.sums[j, 0] * scale).to(kind)
            pieces = cute.logical_divide(target, cute.make_layout(self.together))
            cute.autovec_copy(rounded, pieces[None, lane])
