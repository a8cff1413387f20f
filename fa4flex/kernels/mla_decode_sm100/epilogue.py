"""Epilogue, from tensor to global memory: each thread writes its columns of a row of the output, or of a
split's part of it.

The two threads of a row have the same maximum, and add up their sums as copies of a row do.
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, const_expr, cute

from fa4flex.kernels.common.arguments import Arguments
from fa4flex.kernels.common.packed_rows import Tile
from fa4flex.kernels.common.tensor_core import Blocks
from fa4flex.kernels.decode_sm100 import epilogue as base
from fa4flex.kernels.decode_sm100.config import LANES, MERGED
from fa4flex.kernels.decode_sm100.epilogue import WIDE, meet
from fa4flex.kernels.decode_sm100.softmax import load_op
from fa4flex.kernels.fwd_sm100.rows import multiply
from fa4flex.kernels.mla_decode_sm100.config import Config
from fa4flex.kernels.mla_decode_sm100.resources import Shared


class Epilogue(base.Epilogue):
    config: Config  # type: ignore[assignment]

    @cute.jit
    def merge(
        self,
        arguments: Arguments,
        tile: Tile,
        shared: cutlass.Constexpr[Shared],
        output: cute.Tensor,
        scale: Float32 | None,
    ) -> None:
        """There is nothing to merge: a thread has columns of its own. They are stored as they are read."""
        thread, config = cute.arch.thread_idx()[0], self.config
        row, part = tile.row(thread % config.rows), thread // config.rows
        blocks = cute.flat_divide(output, (LANES, MERGED))[None, None, 0, None]
        whole = Blocks.load(load_op(MERGED), blocks, thread)
        each = config.product_columns // config.copies
        for block in cutlass.range_constexpr(config.output_columns // MERGED):
            held = cute.make_rmem_tensor((MERGED,), Float32)
            whole.take(block, held)
            cute.arch.fence_view_async_tmem_load()
            if const_expr(scale is not None):
                multiply(held, scale)
            product, within = divmod(block * MERGED, each)
            first = product * config.product_columns + part * each + within
            eights = cute.logical_divide(held, cute.make_layout(WIDE))
            if row.exists:
                for i in cutlass.range_constexpr(MERGED // WIDE):
                    self.put(arguments, tile, row, eights[None, i], first + i * WIDE)
        meet()
