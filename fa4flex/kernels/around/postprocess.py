"""After a backward pass: dQ leaves the order in which the registers of matrix products held it."""

from __future__ import annotations

from typing import Any

import cutlass
from cuda.bindings import driver as cuda
from cutlass import Float32, Int32, const_expr, cute
from cutlass.memory import SmemAllocator

from fa4flex.kernels.common.arguments import named
from fa4flex.kernels.common.backward import backwards, first_row, sequence_of_row, token_of
from fa4flex.kernels.plan.arguments import BACKWARD

THREADS = (256, 128)
"""Numbers of threads that a block may have: the first that divides the number of a tile's pieces."""
WIDE = 8
"""Elements of 16 bits that a thread stores at once."""

PAD = 8
"""Elements between rows in shared memory, so that rows start in different banks."""


_Arguments: Any = named("PostprocessArguments", BACKWARD.read_by("postprocess"))


class PostprocessArguments(_Arguments):
    """dq_sum float32 [B, H, R * head_dim] as in BackwardArguments; dq [B, S, H, D]. Packed: [H, R * head_dim]
    and [T, H, D]; cu_seqlens_q int32 [B + 1]."""


class Postprocess:
    """`config` is the main kernel's: tile_m, head_dim, and dq_order, in which the sums of a tile lie."""

    def __init__(self, config: Any) -> None:
        self.config = config
        pieces = config.tile_m * config.head_dim // WIDE
        self.threads = next(n for n in THREADS if pieces % n == 0)

    @cute.jit
    def __call__(self, arguments: PostprocessArguments, stream: cuda.CUstream) -> None:
        config = self.config
        if const_expr(arguments.cu_seqlens_q is not None):
            _, heads, _ = arguments.dq.shape
            tiles = arguments.dq_sum.shape[1] // (config.tile_m * config.head_dim)
            grid = [tiles, heads, 1]
        else:
            batch, q_len, heads, _ = arguments.dq.shape
            grid = [cute.ceil_div(q_len, config.tile_m), heads, batch]
        self.device(arguments).launch(grid=grid, block=[self.threads, 1, 1], stream=stream, use_pdl=True)

    @cute.kernel
    def device(self, arguments: PostprocessArguments) -> None:
        cute.arch.griddepcontrol_wait()
        config = self.config
        tile, h, b = backwards()
        thread = cute.arch.thread_idx()[0]
        layout = cute.make_layout((config.tile_m, config.head_dim), stride=(config.head_dim + PAD, 1))
        rows = SmemAllocator().allocate_tensor(arguments.dq.element_type, layout, byte_alignment=16)
        sums = arguments.dq_sum[h, None] if cute.rank(arguments.dq) == 3 else arguments.dq_sum[b, h, None]
        first_q, first, q_len = tile * config.tile_m, Int32(0), Int32(arguments.dq.shape[1])
        if const_expr(arguments.cu_seqlens_q is not None):
            cu = arguments.cu_seqlens_q
            b = sequence_of_row(first_q, cu)
            first_q, first, q_len = first_q - first_row(cu, b), cu[b], cu[b + 1] - cu[b]
        fours = self.load(sums, tile, q_len - first_q, thread)
        self.collect(fours, rows, arguments.scale, thread)
        cute.arch.sync_threads()
        pieces = config.head_dim // WIDE
        for i in cutlass.range_constexpr(config.tile_m * pieces // self.threads):
            number = i * self.threads + thread
            row, piece = number // pieces, number % pieces
            q = first_q + row
            if q < q_len and piece * WIDE < arguments.dq.shape[-1]:
                source = cute.logical_divide(rows[row, None], cute.make_layout(WIDE))[None, piece]
                target = cute.logical_divide(token_of(arguments.dq, b, first, q, h), cute.make_layout(WIDE))
                cute.autovec_copy(source, target[None, piece])

    @cute.jit
    def load(self, sums: cute.Tensor, tile: Int32, end: Int32, thread: Int32) -> list[cute.Tensor]:
        """A thread's sums of a tile, by fours, all on their way together. Rows from `end` on are not read,
        nor padding: nobody wrote there."""
        order, found = self.config.dq_order, []
        whole = cute.logical_divide(cute.local_tile(sums, (order.size,), (tile,)), cute.make_layout(4))
        for j in cutlass.range_constexpr(order.size // (4 * self.threads)):
            number = j * self.threads + thread
            four = cute.make_rmem_tensor((4,), Float32)
            four.fill(0.0)
            row, column = order.place(4 * number)
            wanted = row < end
            if const_expr(self.config.columns is not None):
                wanted = wanted & (column < self.config.columns)
            if wanted:
                cute.autovec_copy(whole[None, number], four)
            found.append(four)
        return found

    def collect(self, fours: list[cute.Tensor], rows: cute.Tensor, scale: Float32, thread: Int32) -> None:
        """Sums lie in fours, of which two next to each other are of one row, or of one column."""
        order = self.config.dq_order
        for j, four in enumerate(fours):
            row, column = order.place(4 * (j * self.threads + thread))
            if order.columns[0] == 0:
                for i in range(4):
                    down, across = order.place(i)
                    rows[row + down, column + across] = (four[i] * scale).to(rows.element_type)
                continue
            for start in range(0, 4, 2):
                down, across = order.place(start)
                pair = cute.make_rmem_tensor((2,), rows.element_type)
                for i in range(2):
                    pair[i] = (four[start + i] * scale).to(rows.element_type)
                pairs = cute.logical_divide(rows[row + down, None], cute.make_layout(2))
                cute.autovec_copy(pair, pairs[None, (column + across) // 2])
