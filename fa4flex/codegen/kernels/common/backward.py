"""What a launch passes to the kernels of a backward pass, and the tiles of keys that its blocks take."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, const_expr, cute, select_

from fa4flex.codegen.kernels.common.arguments import Tables
from fa4flex.codegen.kernels.common.hooks import At, Hooks
from fa4flex.codegen.kernels.common.keys import Listed
from fa4flex.codegen.kernels.common.work import Grid, locate

ROW_BLOCK = 128
"""Rows that the statistics and the accumulated dQ of a sequence are padded to a multiple of."""


class BackwardArguments(NamedTuple):
    """q, dout [B, S, H, D], k, v, dk, dv [B, S, H, D]; any strides whose last is 1.
    lse2, delta float32 [B, H, R], R being S padded to ROW_BLOCK: log-sum-exp in log2 units, and the sum of
    out * dout less the gradient of the log-sum-exp; rows past the end, and rows without keys, have lse2 inf.
    dq_sum float32 [B, H, R * head_dim], zero at first: dQ / scale by tiles of tile_m rows, each in its
    kernel's own order.
    tables: by tile of keys, the tiles of queries to visit; pointers [B, H, key tiles + 1].
    gradients: of captured tensors, [copies, shape...], zero at first; the sum of its copies is a gradient.
    """

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    dout: cute.Tensor
    lse2: cute.Tensor
    delta: cute.Tensor
    dq_sum: cute.Tensor
    dk: cute.Tensor
    dv: cute.Tensor
    seqused_q: cute.Tensor | None
    seqused_k: cute.Tensor | None
    tables: Tables | None
    operands: tuple  # a length would be read from tuple[X, ...]: two
    scalars: tuple
    scale: Float32
    gradients: tuple = ()


class KeyWork(NamedTuple):
    """One tile of keys: `tile` of sequence (b, kv_head), and the lengths."""

    tile: Int32
    kv_head: Int32
    b: Int32
    q_len: Int32
    kv_len: Int32


class QueryTiles(NamedTuple):
    """Tiles of queries: `masked_count` that need the mask, then the others."""

    masked: Any
    full: Any
    masked_count: Int32
    count: Int32


class BackwardCourse:
    """The tile of keys that a block takes; `config` has tile_m, tile_n and masked."""

    def __init__(self, config: Any, hooks: Hooks) -> None:
        self.config = config
        self.hooks = hooks

    @cute.jit
    def grid(self, arguments: BackwardArguments) -> Grid:
        batch, kv_len, kv_heads, _ = arguments.k.shape
        tiles = Int32(cute.ceil_div(kv_len, self.config.tile_n))
        return Grid(tiles, Int32(kv_heads), Int32(batch), Int32(1))

    @cute.jit
    def work(self, grid: Grid, arguments: BackwardArguments) -> KeyWork:
        tile, kv_head, b = locate(Int32(cute.arch.block_idx()[0]), grid, False)
        q_len, kv_len = Int32(arguments.q.shape[1]), Int32(arguments.k.shape[1])
        if const_expr(arguments.seqused_q is not None):
            q_len = Int32(arguments.seqused_q[b])
        if const_expr(arguments.seqused_k is not None):
            kv_len = Int32(arguments.seqused_k[b])
        return KeyWork(tile, kv_head, b, q_len, kv_len)

    @cute.jit
    def steps(self, work: KeyWork, arguments: BackwardArguments) -> Int32:
        """Tiles of queries to visit, of all query heads that share the block's keys."""
        group = arguments.q.shape[2] // arguments.k.shape[2]
        count = Int32(0)
        for g in cutlass.range(group, unroll=1):
            count += self.queries(work, work.kv_head * group + g, arguments).count
        return count

    def place(self, work: KeyWork, h: Int32, heads: Int32, arguments: BackwardArguments) -> At:
        """Where hooks are called for a tile and query head, with the uniform terms."""
        at = At(
            b=work.b,
            h=h,
            q_len=work.q_len,
            kv_len=work.kv_len,
            num_heads=heads,
            scale=arguments.scale,
            operands=tuple(arguments.operands),
            scalars=tuple(arguments.scalars),
        )
        return at if self.hooks.uniform is None else at.but(uniform=tuple(self.hooks.uniform(at)))

    def queries(self, work: KeyWork, h: Int32, arguments: BackwardArguments) -> QueryTiles:
        """The tiles of queries to visit. In a tile of keys that passes the end, all need the mask; and so
        does a tile of queries that passes the end."""
        ends = work.tile * self.config.tile_n + self.config.tile_n > work.kv_len
        if not self.config.masked:
            whole = work.q_len // self.config.tile_m
            count = (work.q_len + (self.config.tile_m - 1)) // self.config.tile_m
            return QueryTiles(None, None, select_(ends, count, count - whole), count)
        tables = arguments.tables
        assert tables is not None
        parts = []
        for pointers, tiles in (
            (tables.partial_ptr, tables.partial_tiles),
            (tables.full_ptr, tables.full_tiles),
        ):
            first, last = pointers[work.b, h, work.tile], pointers[work.b, h, work.tile + 1]
            parts.append(Listed(tiles, first, last - first))
        some, more = parts[0].total(), parts[1].total()
        return QueryTiles(parts[0], parts[1], select_(ends, some + more, some), some + more)


@cute.jit
def query_tile_at(queries: QueryTiles, i: Int32) -> Int32:
    """Tile i of both parts; without tables, from the last to the first."""
    tile = queries.count - 1 - i
    if const_expr(queries.masked is not None):
        passed = queries.masked.total()
        if i < passed:
            tile = queries.masked.at(i)
        else:
            tile = queries.full.at(i - passed)
    return tile
