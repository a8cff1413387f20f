"""Sums over all tokens of a sequence, in an order that is the same at each run: of chunks of tokens by one
launch, of chunks by the next.

What sums of keys and of values make is a mean; the scale of values follows from their greatest and least
ones, as rounding a difference to the mean keeps the order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
from cuda.bindings import driver as cuda
from cutlass import Float32, Int32, const_expr, cute
from cutlass.memory import SmemAllocator

from fa4flex.kernels.common.arguments import named
from fa4flex.kernels.common.math import absolute, where
from fa4flex.kernels.plan.arguments import QUANTIZE
from fa4flex.kernels.quantize.config import LANE, ROWS, Config, lanes
from fa4flex.kernels.quantize.rows import WARP, Row, greater, numbers_of, scale_of, words_of

SUM, MOST, LEAST = range(3)
"""Numbers that are kept of the values of a chunk; the least one with its sign turned. Of keys, the first
alone."""

GROUPS = 8
"""Warps that share out the chunks of 32 channels."""

_SumArguments: Any = named("QuantizeSumArguments", QUANTIZE.read_by("sums"))
_MeanArguments: Any = named("QuantizeMeanArguments", QUANTIZE.read_by("means"))
_OffsetArguments: Any = named("QuantizeOffsetArguments", QUANTIZE.read_by("offsets"))


class SumArguments(_SumArguments):
    """k [B, S, Hk, D], v [B, S, Hv, Dv]; k_sums float32 [B, Hk, chunks, 1, D], v_sums [B, Hv, chunks, 3, Dv];
    chunk: tokens of a chunk. None where nothing is summed."""


class MeanArguments(_MeanArguments):
    """k_sums, v_sums as above; k_mean float32 [B, Hk, D], v_mean, v_scale [B, Hv, Dv]; kv_len: tokens."""


class OffsetArguments(_OffsetArguments):
    """code_sums float32 [B, Hv, tiles, 1, Dv]; v_mean, v_scale, v_offset [B, Hv, Dv]; kv_len: tokens."""


class Chunk(NamedTuple):
    """Tokens [S, D] of a head, those that are summed, and where the sums go, [kinds, D]."""

    x: cute.Tensor
    first: Int32
    end: Int32
    to: cute.Tensor


class Sums:
    """Sums of chunks. A block takes one of a head of k or of v."""

    def __init__(self, config: Config) -> None:
        self.config = config

    @cute.jit
    def __call__(self, arguments: SumArguments, stream: cuda.CUstream) -> None:
        blocks = self.blocks(arguments.k_sums) + self.blocks(arguments.v_sums)
        self.device(arguments).launch(grid=[blocks, 1, 1], block=[self.config.threads, 1, 1], stream=stream)

    def blocks(self, sums: cute.Tensor | None) -> Int32:
        return Int32(0) if sums is None else Int32(sums.shape[0] * sums.shape[1] * sums.shape[2])

    @cute.kernel
    def device(self, arguments: SumArguments) -> None:
        cute.arch.griddepcontrol_launch_dependents()
        a, number = arguments, cute.arch.block_idx()[0]
        of_keys = self.blocks(a.k_sums)
        if const_expr(a.k_sums is not None):  # noqa: SIM102  one is decided when compiled, one when run
            if number < of_keys:
                self.add(self.chunk(a.k, a.k_sums, number, a.chunk), self.config.width, 1)
        if const_expr(a.v_sums is not None):  # noqa: SIM102  one is decided when compiled, one when run
            if number >= of_keys:
                self.add(self.chunk(a.v, a.v_sums, number - of_keys, a.chunk), self.config.width_v, 3)

    def chunk(self, x: cute.Tensor, sums: cute.Tensor, number: Int32, tokens: Int32) -> Chunk:
        _, heads, chunks = sums.shape[:3]
        n, h, b = number % chunks, number // chunks % heads, number // (chunks * heads)
        first = n * tokens
        end = cutlass.min(first + tokens, Int32(x.shape[1]))
        return Chunk(x[b, None, h, None], first, end, sums[b, h, n, None, None])

    @cute.jit
    def add(self, chunk: Chunk, width: cutlass.Constexpr[int], kinds: cutlass.Constexpr[int]) -> None:
        """Sums by threads, by warps, and by the block."""
        thread, across = cute.arch.thread_idx()[0], lanes(width)
        lane, tall = thread % across, self.config.threads // across
        held = [cute.make_rmem_tensor((LANE,), Float32) for _ in range(kinds)]
        for kind in cutlass.range_constexpr(kinds):
            held[kind].fill(0.0 if kind == SUM else -Float32.inf)
        for start in cutlass.range(chunk.first, chunk.end, ROWS * tall, unroll=1):
            rows = [start + thread // across + n * tall for n in range(ROWS)]
            words = [words_of(chunk.x[cutlass.min(row, chunk.end - 1), None], lane, width) for row in rows]
            for row, each in zip(rows, words):
                x = numbers_of(each, chunk.x.element_type)
                self.keep(held, x, row < chunk.end)
        self.reduce([[x[i] for i in range(LANE)] for x in held], chunk.to, width)

    def keep(self, held: list[cute.Tensor], x: Row, exists: Any) -> None:
        """A row that does not exist is another one, which is counted once."""
        for i, a in enumerate(x):
            held[SUM][i] = held[SUM][i] + where(exists, a, Float32(0.0))
            if len(held) > 1:
                held[MOST][i] = greater(held[MOST][i], a)
                held[LEAST][i] = greater(held[LEAST][i], -a)

    @cute.jit
    def reduce(
        self, held: cutlass.Constexpr[list[Row]], to: cute.Tensor, width: cutlass.Constexpr[int]
    ) -> None:
        thread, across, warps = cute.arch.thread_idx()[0], lanes(width), self.config.threads // WARP
        lane, warp, kinds = thread % across, thread // WARP, len(held)
        layout = cute.make_layout(
            (warps, kinds, across * LANE), stride=(kinds * across * LANE, across * LANE, 1)
        )
        parts = SmemAllocator().allocate_tensor(Float32, layout, byte_alignment=16)
        for kind in cutlass.range_constexpr(kinds):
            row = held[kind]
            distance = across
            while const_expr(distance < WARP):
                row = [folded(kind, a, cute.arch.shuffle_sync_bfly(a, offset=distance)) for a in row]
                distance *= 2
            if thread % WARP < across:
                for i in cutlass.range_constexpr(LANE):
                    parts[warp, kind, lane * LANE + i] = row[i]
        cute.arch.sync_threads()
        for c in cutlass.range(thread, width, self.config.threads, unroll=1):
            for kind in cutlass.range_constexpr(kinds):
                total = parts[0, kind, c]
                for n in cutlass.range_constexpr(1, warps):
                    total = folded(kind, total, parts[n, kind, c])
                to[kind, c] = total


def folded(kind: int, a: Float32, b: Float32) -> Float32:
    return a + b if kind == SUM else greater(a, b)


class Channels:
    """Numbers of 32 channels of a head from sums of its chunks, by a block of GROUPS warps."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def blocks(self, sums: cute.Tensor | None) -> Int32:
        if sums is None:
            return Int32(0)
        return Int32(sums.shape[0] * sums.shape[1] * -(-self.width(sums) // WARP))

    def width(self, sums: cute.Tensor) -> int:
        return self.config.width if sums.shape[3] == 1 else self.config.width_v

    def place(self, sums: cute.Tensor, number: Int32) -> tuple[Int32, Int32, Int32]:
        """Sequence and head of a block, and the channel of a thread, which may lie past the last."""
        groups = -(-self.width(sums) // WARP)
        head = number // groups
        channel = number % groups * WARP + cute.arch.thread_idx()[0] % WARP
        return head // sums.shape[1], head % sums.shape[1], channel

    @cute.jit
    def total(self, sums: cute.Tensor, channel: Int32) -> Any:
        """Sums [chunks, kinds, D] of a channel as a list, of which the block's first warp has what is right.
        Warps take every GROUPS-th chunk."""
        kinds, warp, lane = sums.shape[1], cute.arch.thread_idx()[0] // WARP, cute.arch.thread_idx()[0] % WARP
        c = cutlass.min(channel, Int32(sums.shape[2]) - 1)
        held = cute.make_rmem_tensor((kinds,), Float32)
        for kind in cutlass.range_constexpr(kinds):
            held[kind] = Float32(0.0) if kind == SUM else -Float32.inf
        for n in cutlass.range(warp, sums.shape[0], GROUPS, unroll=4):
            for kind in cutlass.range_constexpr(kinds):
                held[kind] = folded(kind, held[kind], sums[n, kind, c])
        parts = SmemAllocator().allocate_tensor(
            Float32, cute.make_layout((kinds, GROUPS, WARP)), byte_alignment=16
        )
        for kind in cutlass.range_constexpr(kinds):
            parts[kind, warp, lane] = held[kind]
        cute.arch.sync_threads()
        found = []
        for kind in cutlass.range_constexpr(kinds):
            total = parts[kind, 0, lane]
            for n in cutlass.range_constexpr(1, GROUPS):
                total = folded(kind, total, parts[kind, n, lane])
            found.append(total)
        return found


class Means(Channels):
    """Means of keys and values, and scales of values."""

    @cute.jit
    def __call__(self, arguments: MeanArguments, stream: cuda.CUstream) -> None:
        blocks = self.blocks(arguments.k_sums) + self.blocks(arguments.v_sums)
        threads = GROUPS * WARP
        self.device(arguments).launch(grid=[blocks, 1, 1], block=[threads, 1, 1], stream=stream, use_pdl=True)

    @cute.kernel
    def device(self, arguments: MeanArguments) -> None:
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        a, number = arguments, cute.arch.block_idx()[0]
        of_keys, count = self.blocks(a.k_sums), Float32(a.kv_len)
        if const_expr(a.k_sums is not None):  # noqa: SIM102  one is decided when compiled, one when run
            if number < of_keys:
                b, h, channel = self.place(a.k_sums, number)
                total = self.total(a.k_sums[b, h, None, None, None], channel)
                if cute.arch.thread_idx()[0] < WARP and channel < self.config.width:
                    a.k_mean[b, h, channel] = total[SUM] / count
        if const_expr(a.v_sums is not None):  # noqa: SIM102  one is decided when compiled, one when run
            if number >= of_keys:
                b, h, channel = self.place(a.v_sums, number - of_keys)
                total = self.total(a.v_sums[b, h, None, None, None], channel)
                if cute.arch.thread_idx()[0] < WARP and channel < self.config.width_v:
                    mean = Float32(0.0)
                    if const_expr(a.v_mean is not None):
                        mean = total[SUM] / count
                        a.v_mean[b, h, channel] = mean
                    most = greater(absolute(total[MOST] - mean), absolute(-total[LEAST] - mean))
                    a.v_scale[b, h, channel] = scale_of(most, "float8_e4m3")


class Offsets(Channels):
    """Number that is added to each value of a channel: their mean less that of what codes stand for."""

    def width(self, sums: cute.Tensor) -> int:
        return self.config.width_v

    @cute.jit
    def __call__(self, arguments: OffsetArguments, stream: cuda.CUstream) -> None:
        blocks = self.blocks(arguments.code_sums)
        threads = GROUPS * WARP
        self.device(arguments).launch(grid=[blocks, 1, 1], block=[threads, 1, 1], stream=stream, use_pdl=True)

    @cute.kernel
    def device(self, arguments: OffsetArguments) -> None:
        cute.arch.griddepcontrol_wait()
        a = arguments
        b, h, channel = self.place(a.code_sums, cute.arch.block_idx()[0])
        total = self.total(a.code_sums[b, h, None, None, None], channel)
        if cute.arch.thread_idx()[0] < WARP and channel < self.config.width_v:
            mean = total[SUM] / Float32(a.kv_len)
            a.v_offset[b, h, channel] = a.v_mean[b, h, channel] - mean * a.v_scale[b, h, channel]
