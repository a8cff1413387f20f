"""Queries of a tile of few rows on their way to shared memory: no tensor map describes pairs of a query and a
head, so a warpgroup copies them, 16 bytes a lane (cp.async)."""

from __future__ import annotations

import cutlass
from cutlass import Int32, Int64, const_expr, cute

from fa4flex.kernels.common.gathered_key_values import CHUNK, copy_chunk, swizzled
from fa4flex.kernels.common.packed_rows import Tile
from fa4flex.kernels.plan.memory import block_bytes

THREADS = 128
"""Threads of a warpgroup."""


@cute.jit
def copy_rows(queries: cute.Tensor, first: Int32, tile: Tile, target: cute.Tensor, lane: Int32) -> None:
    """Copy all rows of a tile from `queries` [token, head, width], where its queries begin at token `first`,
    to a tile of products (row, column). Rows past the last are zeros, of which products take less power, and
    so is what the tile is wider than the tensor. Lanes must meet before a product reads it.

    A loop: instructions that a tile runs once come from far, and warps wait for them.
    """
    rows, width = cute.size(target, mode=[0]), cute.size(target, mode=[1])
    span, start = block_bytes(width), queries.iterator.toint()
    chunks, given = 2 * width // CHUNK, 2 * queries.shape[2]
    for i in cutlass.range(rows * chunks // THREADS, unroll=1):
        number = lane + THREADS * i
        row, column = number // chunks, number % chunks * CHUNK
        source, size = start, Int32(0)
        if row < tile.rows:
            one = tile.row(row)
            source = queries[first + one.q, one.h, None].iterator.toint() + Int64(column)
            size = Int32(CHUNK)
            if const_expr(given < 2 * width):  # noqa: SIM102  one is decided when compiled, one when run
                if column >= given:
                    size = Int32(0)
        place = column // span * (rows * span) + swizzled(row * span + column % span, span)
        copy_chunk(target.iterator.toint() + place, source, size)
    cute.arch.cp_async_commit_group()
    cute.arch.cp_async_wait_group(0)
    cute.arch.fence_proxy("async.shared", space="cta")
