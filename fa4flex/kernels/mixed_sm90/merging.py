"""Merges what parts of the keys of a tile of few rows leave, by the warp that ends the last one: 16 rows at a
time. Whoever that is adds up in the same order."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, const_expr, cute, select_

from fa4flex.kernels.common.arguments import Arguments
from fa4flex.kernels.common.packed_rows import Tile
from fa4flex.kernels.common.softmax import LOG2_E, finish_row, finite, sink_of
from fa4flex.kernels.common.work import Work, put_statistic
from fa4flex.kernels.mixed_sm90.sequences import Cut, log_sums, outputs
from fa4flex.kernels.plan.arguments import TAKEN

WARP_ROWS = 16
"""Rows of a warp."""

BATCH = 8
"""Parts that a warp loads at once."""


class Merging:
    """A lane adds up `together` columns next to each other, of tiles as wide as `config.head_dim_v`, which is
    128 at most."""

    def __init__(self, config: Any) -> None:
        self.together = 4 if config.head_dim_v > 64 else 2

    @cute.jit
    def run(self, arguments: Arguments, one: tuple[Work, Cut], tile: Tile, lane: Int32) -> None:
        """One warp's, which has written its rows of a part. `lane`: of its warpgroup."""
        cut = one[1]
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
                self.row(arguments, one, tile, number, lane)

    @cute.jit
    def row(
        self, arguments: Arguments, one: tuple[Work, Cut], tile: Tile, number: Int32, lane: Int32
    ) -> None:
        """A row of all parts, which lie `tile.rows` rows apart."""
        work, cut = one
        first = cut.first - cut.part * tile.rows + number
        sums = log_sums(arguments)
        largest = -Float32.inf
        for part in cutlass.range(lane, cut.parts, 32, unroll=1):
            largest = cute.arch.fmax(largest, sums[first + part * tile.rows])
        for distance in cutlass.range_constexpr(5):
            largest = cute.arch.fmax(largest, cute.arch.shuffle_sync_bfly(largest, offset=1 << distance))
        shift = finite(largest)
        mine = cute.make_rmem_tensor((self.together,), Float32)
        mine.fill(0.0)
        total = Float32(0.0)
        for part in cutlass.range(0, cut.parts, BATCH, unroll=1):
            total = self.add(arguments, (first, part, cut.parts, tile.rows), (shift, lane), mine, total)
        self.write(arguments, work, tile, (number, lane), (largest, shift, total, mine))

    @cute.jit
    def add(
        self,
        arguments: Arguments,
        which: tuple[Int32, Int32, Int32, Int32],
        how: tuple[Float32, Int32],
        mine: cute.Tensor,
        total: Float32,
    ) -> Float32:
        """Add BATCH parts of a row to this lane's sums; returns the sum of their weights and `total`."""
        (first, begun, parts, step), (shift, lane) = which, how
        sums, kept = log_sums(arguments), outputs(arguments)
        column = cutlass.min(lane, arguments.v.shape[3] // self.together - 1)
        weights = cute.make_rmem_tensor((BATCH,), Float32)
        loaded = cute.make_rmem_tensor((self.together, BATCH), Float32)
        for i in cutlass.range_constexpr(BATCH):
            part = cutlass.min(begun + i, parts - 1)
            weights[i] = select_(begun + i < parts, sums[first + part * step], -Float32.inf)
            row = cute.logical_divide(kept[first + part * step, None], cute.make_layout(self.together))
            cute.autovec_copy(row[None, column], loaded[None, i])
        for i in cutlass.range_constexpr(BATCH):
            weight = cute.math.exp2((weights[i] - shift) * LOG2_E, fastmath=True)
            total = total + weight
            for j in cutlass.range_constexpr(self.together):
                # A part without keys has written no output.
                mine[j] = mine[j] + select_(weight > 0, loaded[j, i] * weight, Float32(0.0))
        return total

    @cute.jit
    def write(
        self,
        arguments: Arguments,
        work: Work,
        tile: Tile,
        which: tuple[Int32, Int32],
        found: tuple[Float32, Float32, Float32, cute.Tensor],
    ) -> None:
        (number, lane), (largest, shift, total, mine) = which, found
        row = tile.row(number)
        scale, lse = finish_row(largest, shift * LOG2_E, total, sink_of(arguments, row.h))
        if const_expr(arguments.lse is not None):  # noqa: SIM102  one is decided when compiled, one when run
            if lane == 0:
                put_statistic(arguments.lse, work._replace(h=row.h), row.q, lse)
        target = arguments.out[work.q_offset + row.q, row.h, None]
        if lane * self.together < arguments.v.shape[3]:
            kind = target.element_type
            rounded = cute.make_rmem_tensor((self.together,), kind)
            for j in cutlass.range_constexpr(self.together):
                rounded[j] = (mine[j] * scale).to(kind)
            pieces = cute.logical_divide(target, cute.make_layout(self.together))
            cute.autovec_copy(rounded, pieces[None, lane])
