"""Pools blocks of tokens by one launch: threads that share a block have tokens in turns, summed in float32,
and shared memory has what each made of its own."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
from cuda.bindings import driver as cuda
from cutlass import Float32, Int32, const_expr, cute, range_constexpr
from cutlass.memory import SmemAllocator

from fa4flex.kernels.common.arguments import named
from fa4flex.kernels.common.fragment import widened
from fa4flex.kernels.common.math import where
from fa4flex.kernels.plan.arguments import POOL
from fa4flex.kernels.pool.config import AHEAD, PIECE, THREADS, Config

_Arguments: Any = named("PoolArguments", POOL.read_by("kernel"))


class PoolArguments(_Arguments):
    """x [B, H, S, D] of any strides, and out [B, H, R, D], which is written; block: tokens of a row."""


class Share(NamedTuple):
    """A thread's: its number along the channels, among those that share a block, and that of the row that it
    takes part in among those of the block of threads."""

    lane: Int32
    turn: Int32
    row: Int32


class Pool:
    direction = "pool"
    """Schema of its arguments."""

    def __init__(self, config: Config) -> None:
        self.config = config

    @cute.jit
    def __call__(self, arguments: PoolArguments, stream: cuda.CUstream) -> None:
        batch, heads, rows, _ = arguments.out.shape
        self.device(arguments).launch(
            grid=[cute.ceil_div(Int32(rows), self.config.rows) * heads * batch, 1, 1],
            block=[THREADS, 1, 1],
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def device(self, arguments: PoolArguments) -> None:
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        a, config, thread = arguments, self.config, cute.arch.thread_idx()[0]
        _, heads, rows, _ = a.out.shape
        groups = cute.ceil_div(Int32(rows), config.rows)
        number = cute.arch.block_idx()[0]
        head = number // groups
        b, h = head // heads, head % heads
        group, lane = thread // config.lanes, thread % config.lanes
        share = Share(lane, group % config.share, number % groups * config.rows + group // config.share)
        x, out = a.x[b, h, None, None], a.out[b, h, None, None]
        held = self.pooled(x, share, a.block)
        if const_expr(config.share > 1):
            self.together(held, thread)
        if share.turn == 0 and share.row < rows and lane * PIECE < config.width:
            first = share.row * a.block
            count = cutlass.min(a.block, Int32(x.shape[0]) - first)
            self.store(held, out[share.row, None], lane, count)

    @cute.jit
    def pooled(self, x: cute.Tensor, share: Share, block: Int32) -> cute.Tensor:
        """Sums or largest numbers of a thread's tokens [S, D], float32 [PIECE]; where the least are asked
        for, all signs are turned."""
        config, length = self.config, Int32(x.shape[0])
        held = cute.make_rmem_tensor((PIECE,), Float32)
        held.fill(0.0 if config.how in ("mean", "sum") else -Float32.inf)
        piece = cutlass.min(share.lane, Int32(config.width // PIECE - 1))
        first = share.row * block
        end = cutlass.min(first + block, length)
        for start in cutlass.range(first + share.turn, end, config.share * AHEAD, unroll=1):
            tokens = [start + n * config.share for n in range(AHEAD)]
            words = [_piece(x[cutlass.min(token, end - 1), None], piece) for token in tokens]
            for n in range_constexpr(AHEAD):
                for i in range_constexpr(PIECE // 2):
                    for j, number in enumerate(widened(words[n][i], x.element_type)):
                        held[2 * i + j] = self.folded(held[2 * i + j], number, tokens[n] < end)
        return held

    def folded(self, total: Float32, number: Float32, exists: Any) -> Float32:
        """A token that does not exist is another one, which is counted once."""
        if self.config.how in ("mean", "sum"):
            return total + where(exists, number, Float32(0.0))
        return greater(total, -number if self.config.how == "min" else number)

    @cute.jit
    def together(self, held: cute.Tensor, thread: Int32) -> None:
        """Put together what threads made that share a block: the first of them has it."""
        config = self.config
        layout = cute.make_layout((PIECE, config.lanes, config.share, config.rows))
        parts = SmemAllocator().allocate_tensor(Float32, layout, byte_alignment=16)
        lane, turn = thread % config.lanes, thread // config.lanes % config.share
        row = thread // (config.lanes * config.share)
        for i in range_constexpr(PIECE):
            parts[i, lane, turn, row] = held[i]
        half = config.share // 2
        while const_expr(half > 0):
            cute.arch.sync_threads()
            if turn < half:
                for i in range_constexpr(PIECE):
                    held[i] = self.both(held[i], parts[i, lane, turn + half, row])
                    parts[i, lane, turn, row] = held[i]
            half //= 2

    def both(self, a: Float32, b: Float32) -> Float32:
        return a + b if self.config.how in ("mean", "sum") else greater(a, b)

    @cute.jit
    def store(self, held: cute.Tensor, row: cute.Tensor, lane: Int32, count: Int32) -> None:
        """A thread's channels of a row of `count` tokens."""
        made = cute.make_rmem_tensor((PIECE,), row.element_type)
        for i in range_constexpr(PIECE):
            number = held[i]
            if const_expr(self.config.how == "mean"):
                number = number / Float32(count)
            if const_expr(self.config.how == "min"):
                number = -number
            made[i] = number.to(row.element_type)
        cute.autovec_copy(made, cute.logical_divide(row, cute.make_layout(PIECE))[None, lane])


def _piece(row: cute.Tensor, piece: Int32) -> list[Int32]:
    """16 bytes of a row as words."""
    held = cute.make_rmem_tensor((PIECE,), row.element_type)
    cute.autovec_copy(cute.logical_divide(row, cute.make_layout(PIECE))[None, piece], held)
    words = cute.recast_tensor(held, Int32)
    return [words[i] for i in range(PIECE // 2)]


def greater(a: Float32, b: Float32) -> Float32:
    """The greater one; NaN if one is NaN."""
    return cute.arch.fmax(a, b, nan=True)
