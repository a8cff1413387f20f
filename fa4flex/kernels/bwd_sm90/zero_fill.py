"""Zeros of the tiles that the mask hides, which no consumer visits: in captured gradients of which each
element belongs to one pair, by warps of their own; in dQ, where it is not added up, by the one that stores
it. All others are written by consumers, zeros too, so that no element is written twice, and the memory may
have held anything before."""

from __future__ import annotations

import cutlass
from cutlass import Int32, const_expr, cute

from fa4flex.kernels.bwd_sm90.config import Config
from fa4flex.kernels.common.backward import (
    BackwardArguments,
    BackwardTileScheduler,
    KeyGrid,
    KeyWork,
    QueryTiles,
    token_of,
)
from fa4flex.kernels.common.hooks import At, Hooks, Share

WARPS = 2
"""They take turns at rows."""

BYTES = 16
"""Bytes that a lane writes at once; rows of such gradients are padded to a multiple of them."""

WIDE = 8
"""Elements of 16 bits among them."""

LANES = 32


class ZeroFill:
    def __init__(self, config: Config, hooks: Hooks, scheduler: BackwardTileScheduler) -> None:
        self.config = config
        self.hooks = hooks
        self.scheduler = scheduler

    def shares(self, arguments: BackwardArguments) -> list[Share]:
        """Whose gradients [copies, shape...] are written once, and lie in memory along the keys."""
        if not self.config.masked or self.config.ragged:
            return []
        ranks = [cute.rank(x) - 1 for x in arguments.gradients]
        return [s for s in self.hooks.shares if s.axes and s.axes[1] == ranks[s.which] - 1]

    @cute.jit
    def run(self, arguments: BackwardArguments, grid: KeyGrid, warp: Int32) -> None:
        """`warp` of WARPS. Blocks are not persistent where pairs have elements of their own."""
        if const_expr(len(self.shares(arguments)) > 0):
            self.erase_all(arguments, self.scheduler.work(self.scheduler.first(), grid, arguments), warp)

    @cute.jit
    def erase_all(self, arguments: BackwardArguments, work: KeyWork, warp: Int32) -> None:
        heads = Int32(arguments.q.shape[-2])
        tiles = (work.q_len + (self.config.tile_m - 1)) // self.config.tile_m
        for g in cutlass.range(work.group, unroll=1):
            h = work.part * work.group + g
            at = self.scheduler.place(work, h, heads, arguments)
            queries = self.scheduler.queries(work, h, arguments)
            for first in cutlass.range(0, tiles, LANES, unroll=1):
                seen = visited(queries, first)
                for i in cutlass.range(cutlass.min(tiles - first, LANES), unroll=1):
                    if (seen >> i) & 1 == 0:
                        self.erase(arguments, work, at, first + i, warp)

    @cute.jit
    def erase(
        self,
        arguments: BackwardArguments,
        work: KeyWork,
        at: cutlass.Constexpr[At],
        tile: Int32,
        warp: Int32,
    ) -> None:
        first_q, first_kv = tile * self.config.tile_m, work.tile * self.config.tile_n
        lane = cute.arch.lane_idx()
        for share in self.shares(arguments):
            gradient = arguments.gradients[share.which]
            per_lane = BYTES * 8 // gradient.element_type.width
            across = self.config.tile_n // per_lane
            together = LANES // across
            row, kv = warp * together + lane // across, first_kv + lane % across * per_lane
            place = share.place.element(at.but(q=first_q + row, kv=kv))
            start = gradient.iterator + cute.crd2idx((0, *place), gradient.layout)
            stride = gradient.stride[1 + share.axes[0]]
            for step in cutlass.range(0, self.config.tile_m, together * WARPS, unroll=1):
                if (first_q + row + step < work.q_len) & (kv < work.kv_len):
                    cute.arch.inline_ptx(
                        "st.global.v4.b32 [{$r0}], {{$r1}, {$r1}, {$r1}, {$r1}};",
                        read_only_args=[(start + step * stride).toint(), Int32(0)],
                    )


@cute.jit
def visited(queries: QueryTiles, first: Int32) -> Int32:
    """A warp's: a bit for each of 32 tiles of queries from `first` on."""
    lane = cute.arch.lane_idx()
    found = Int32(0)
    both = queries.full is not None
    for tiles in (queries.masked, queries.full) if both else (queries.masked,):
        for start in cutlass.range(0, tiles.total(), LANES, unroll=1):
            if start + lane < tiles.total():
                tile = tiles.at(start + lane)
                if const_expr(not both):
                    tile = tile >> 1  # see Turns.entries
                if (tile >= first) & (tile < first + LANES):
                    found = found | (Int32(1) << (tile - first))
    return Int32(cute.arch.warp_redux_sync(found, "or"))


@cute.jit
def clear_queries(
    dq: cute.Tensor, work: KeyWork, h: Int32, queries: QueryTiles, tile_m: cutlass.Constexpr[int]
) -> None:
    """A warp's: zeros for a head's dQ [B, S, H, D] in tiles of queries that are not among `queries`."""
    tiles = (work.q_len + (tile_m - 1)) // tile_m
    if queries.count < tiles:
        for first in cutlass.range(0, tiles, LANES, unroll=1):
            seen = visited(queries, first)
            for i in cutlass.range(cutlass.min(tiles - first, LANES), unroll=1):
                if (seen >> i) & 1 == 0:
                    clear_rows(dq, work, h, (first + i) * tile_m, tile_m)


@cute.jit
def clear_rows(dq: cute.Tensor, work: KeyWork, h: Int32, first: Int32, count: cutlass.Constexpr[int]) -> None:
    """A warp's: zeros for `count` queries from `first` on, as far as there are any; a row has no more pieces
    than a warp lanes."""
    zeros = cute.make_rmem_tensor((WIDE,), dq.element_type)
    zeros.fill(0.0)
    lane = cute.arch.lane_idx()
    for q in cutlass.range(first, cutlass.min(work.q_len, first + count), unroll=1):
        if lane < dq.shape[-1] // WIDE:
            row = token_of(dq, work.b, work.q_offset, q, h)
            cute.autovec_copy(zeros, cute.logical_divide(row, cute.make_layout(WIDE))[None, lane])
