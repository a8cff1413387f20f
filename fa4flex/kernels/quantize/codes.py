"""Codes of q, k and v, and their scales: a block takes 128 tokens of a head of one of them.

Queries have a scale for each token, keys one for the tile. Values have one for each channel, which is known
before; their codes are transposed on the way through shared memory. There, 16 bytes of a channel lie in an
order by which threads write and read other banks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
from cuda.bindings import driver as cuda
from cutlass import Float16, Float32, Int32, Uint8, const_expr, cute
from cutlass.memory import SmemAllocator

from fa4flex.kernels.common.arguments import named
from fa4flex.kernels.common.fragment import widened
from fa4flex.kernels.common.math import where
from fa4flex.kernels.decode_fp8_sm90 import instructions
from fa4flex.kernels.plan.arguments import QUANTIZE
from fa4flex.kernels.quantize.config import LANE, ROWS, TALL, TILE, Config, lanes
from fa4flex.kernels.quantize.rows import (
    WARP,
    Divisor,
    Row,
    divisor_of,
    factors_of,
    floats_of,
    greater,
    greatest,
    greatest_of_lanes,
    numbers_of,
    quotients,
    rotated,
    scale_of,
    word_of,
    words_of,
)

ORDER = (0, 1, 8, 9)
"""Keys of a thread, behind 16 i + 2 j of its number 4 i + j: those of four columns next to each other, see
`swapped` in fa4flex/quantization/tokens.py."""

_CodeArguments: Any = named("QuantizeCodeArguments", QUANTIZE.read_by("codes"))


class CodeArguments(_CodeArguments):
    """q [B, Sq, Hq, D], k [B, S, Hk, D], v [B, S, Hv, Dv], and their codes, bytes: as q and k, and [B, Hv,
    Dv, columns]. signs float32 [D]; q_scale, q_bias [B, Hq, Sq], k_scale [B, Hk, tiles], v_scale, v_mean
    [B, Hv, Dv], k_mean [B, Hk, D], code_sums [B, Hv, tiles, 1, Dv]. None where absent."""


class Tile(NamedTuple):
    """Sequence, head, and number among those of the head."""

    b: Int32
    h: Int32
    n: Int32


class Share(NamedTuple):
    """A thread's place: its number along a row, and that of its rows; whether it has any."""

    lane: Int32
    row: Int32
    exists: Any


class Codes:
    def __init__(self, config: Config) -> None:
        self.config = config

    @cute.jit
    def __call__(self, arguments: CodeArguments, stream: cuda.CUstream) -> None:
        a, config = arguments, self.config
        tokens = cutlass.max(Int32(a.q.shape[1]), Int32(a.k.shape[1]))
        heads = self.heads(a.q) + self.heads(a.k) + self.heads(a.v)
        self.device(a).launch(
            grid=[cute.ceil_div(tokens, TILE), heads, a.q.shape[0]],
            block=[config.threads, 1, 1],
            stream=stream,
            use_pdl=True,
            min_blocks_per_mp=config.blocks,
            preferred_smem_carveout=config.carveout,
        )

    def heads(self, x: cute.Tensor | None) -> Int32:
        return Int32(0) if x is None else Int32(x.shape[2])

    @cute.kernel
    def device(self, arguments: CodeArguments) -> None:
        """A block of the grid [tiles, heads of q, of k and of v, sequences]."""
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        a = arguments
        n, h, b = cute.arch.block_idx()
        of_q, of_k = self.heads(a.q), self.heads(a.k)
        if h < of_q:
            if n * TILE < a.q.shape[1]:
                self.queries(a, Tile(b, h, n))
        elif n * TILE < a.k.shape[1]:
            if h < of_q + of_k:
                self.keys(a, Tile(b, h - of_q, n))
            elif const_expr(a.v is not None):
                self.values(a, Tile(b, h - of_q - of_k, n))

    def share(self, width: int) -> Share:
        thread, across = cute.arch.thread_idx()[0], lanes(width)
        lane, row = thread % across, thread // across
        return Share(lane, cutlass.min(row, Int32(TALL - 1)), (row < TALL) & (lane * LANE < width))

    # --- queries and keys -----------------------------------------------------------------------------------

    @cute.jit
    def queries(self, arguments: cutlass.Constexpr, tile: Tile) -> None:
        a, width, (b, h, n) = arguments, self.config.width, tile
        share, factors = self.share(width), self.factors(a)
        tokens = [n * TILE + i * TALL + share.row for i in range(ROWS)]
        rows = loaded(a.q[b, None, h, None], tokens, share.lane, width)
        if const_expr(a.q_bias is not None):
            head = h // (a.q.shape[2] // a.k.shape[2])
            self.bias(a.q_bias[b, h, None], rows, (tokens, share), a.k_mean[b, head, None])
        for i in cutlass.range_constexpr(ROWS):
            row = self.turned(rows[i], factors, share.lane)
            scale = scale_of(greatest_of_lanes(greatest(row), lanes(width)), self.config.qk)
            self.store(row, divisor_of(scale), a.q_codes[b, None, h, None], tokens[i], share)
            if share.exists and share.lane == 0 and tokens[i] < a.q.shape[1]:
                a.q_scale[b, h, tokens[i]] = scale

    @cute.jit
    def bias(
        self,
        bias: cute.Tensor,
        rows: cutlass.Constexpr,
        at: cutlass.Constexpr,
        mean: cute.Tensor,
    ) -> None:
        (tokens, share), width = at, self.config.width
        factors = floats_of(mean, share.lane, width)
        for i in cutlass.range_constexpr(ROWS):
            total = Float32(0.0)
            for x, y in zip(rows[i], factors):
                total = total + x * y
            total = cute.arch.warp_reduction_sum(total, threads_in_group=lanes(width))
            if share.exists and share.lane == 0 and tokens[i] < bias.shape[0]:
                bias[tokens[i]] = total

    @cute.jit
    def keys(self, arguments: cutlass.Constexpr, tile: Tile) -> None:
        a, width, (b, h, n) = arguments, self.config.width, tile
        share, factors = self.share(width), self.factors(a)
        tokens = [n * TILE + i * TALL + share.row for i in range(ROWS)]
        rows = loaded(a.k[b, None, h, None], tokens, share.lane, width)
        if const_expr(a.k_mean is not None):
            mean = floats_of(a.k_mean[b, h, None], share.lane, width)
            rows = [self.centred(row, mean, share) for row in rows]
        rows = [self.turned(row, factors, share.lane) for row in rows]
        scale = scale_of(self.greatest_of_block([x for row in rows for x in row]), self.config.qk)
        by = divisor_of(scale)
        for i in cutlass.range_constexpr(ROWS):
            self.store(rows[i], by, a.k_codes[b, None, h, None], tokens[i], share)
        if cute.arch.thread_idx()[0] == 0:
            a.k_scale[b, h, n] = scale

    def factors(self, a: CodeArguments) -> Row | None:
        if a.signs is None:
            return None
        width = self.config.width
        return factors_of(floats_of(a.signs, self.share(width).lane, width), width)

    def turned(self, row: Row, factors: Row | None, lane: Int32) -> Row:
        return row if factors is None else rotated(row, factors, lane, self.config.width)

    def centred(self, row: Row, mean: Row, share: Share) -> Row:
        """row - mean, and 0 past its end."""
        found = [x - y for x, y in zip(row, mean, strict=True)]
        if lanes(self.config.width) * LANE == self.config.width:
            return found
        within = share.lane * LANE < self.config.width
        return [where(within, x, Float32(0.0)) for x in found]

    @cute.jit
    def greatest_of_block(self, x: cutlass.Constexpr[Row]) -> Float32:
        warps, thread = self.config.threads // WARP, cute.arch.thread_idx()[0]
        parts = SmemAllocator().allocate_tensor(Float32, cute.make_layout(warps), byte_alignment=16)
        most = greatest_of_lanes(greatest(x), WARP)
        if thread % WARP == 0:
            parts[thread // WARP] = most
        cute.arch.sync_threads()
        most = parts[0]
        for n in cutlass.range_constexpr(1, warps):
            most = greater(most, parts[n])
        return most

    @cute.jit
    def store(
        self, row: cutlass.Constexpr[Row], by: Divisor, to: cute.Tensor, token: Int32, share: Share
    ) -> None:
        """A thread's codes of a row, in `to` [S, D]."""
        held = cute.make_rmem_tensor((LANE,), Uint8)
        words = cute.recast_tensor(held, Int32)
        x = quotients(row, by)
        for i in cutlass.range_constexpr(LANE // 4):
            words[i] = where(by.finite, word_of(x[4 * i : 4 * i + 4], self.config.qk), Int32(0))
        if share.exists and token < to.shape[0]:
            cute.autovec_copy(
                held, cute.logical_divide(to[token, None], cute.make_layout(LANE))[None, share.lane]
            )

    # --- values ---------------------------------------------------------------------------------------------

    @cute.jit
    def values(self, arguments: cutlass.Constexpr, tile: Tile) -> None:
        a, width = arguments, self.config.width_v
        layout = cute.make_layout(width * TILE // 4)
        memory = SmemAllocator().allocate_tensor(Int32, layout, byte_alignment=16)
        self.fill(a, tile, memory)
        cute.arch.sync_threads()
        pieces, threads = width * TILE // 16, self.config.threads
        for start in cutlass.range_constexpr(0, pieces, threads):
            piece = start + cute.arch.thread_idx()[0]
            exists = True if start + threads <= pieces else piece < pieces
            if exists:
                self.empty(a, tile, memory, piece)

    @cute.jit
    def fill(self, arguments: cutlass.Constexpr, tile: Tile, memory: cute.Tensor) -> None:
        """Codes of the tile's values into shared memory, [Dv, TILE / 4] words."""
        a, width, (b, h, n) = arguments, self.config.width_v, tile
        share = self.share(width)
        first, length = n * TILE + share.row // 4 * 16 + share.row % 4 * 2, Int32(a.v.shape[1])
        tokens = [first + i for i in ORDER]
        rows = loaded(a.v[b, None, h, None], tokens, share.lane, width)
        there = Int32(0)
        for i in cutlass.range_constexpr(ROWS):
            there = there | where(tokens[i] < length, Int32(0xFF << 8 * i if i < 3 else -(1 << 24)), Int32(0))
        scale, mean = floats_of(a.v_scale[b, h, None], share.lane, width), None
        if const_expr(a.v_mean is not None):
            mean = floats_of(a.v_mean[b, h, None], share.lane, width)
        column = (
            share.lane * (LANE * TILE // 4) + 4 * (share.row // 4 ^ self.turn(share.lane)) + share.row % 4
        )
        for e in cutlass.range_constexpr(LANE):
            by = divisor_of(scale[e])
            x = [row[e] if mean is None else row[e] - mean[e] for row in rows]
            word = where(by.finite, word_of(quotients(x, by), "float8_e4m3") & there, Int32(0))
            if share.exists:
                memory[column + e * (TILE // 4)] = word

    def turn(self, lane: Int32) -> Int32:
        """Number that those of 16 bytes of a thread's channels are combined with."""
        return lane * max(1, 8 // lanes(self.config.width_v)) % 8

    @cute.jit
    def empty(self, arguments: cutlass.Constexpr, tile: Tile, memory: cute.Tensor, piece: Int32) -> None:
        """16 codes of a channel to where they belong, and the sum of a tile's."""
        a, (b, h, n) = arguments, tile
        channel, part = piece // 8, piece % 8
        held = cute.make_rmem_tensor((16,), Uint8)
        words = cute.recast_tensor(held, Int32)
        place = channel * 8 + (part ^ self.turn(channel // LANE))
        cute.autovec_copy(cute.logical_divide(memory, cute.make_layout(4))[None, place], words)
        to = cute.logical_divide(a.v_codes[b, h, channel, None], cute.make_layout(16))
        cute.autovec_copy(held, to[None, n * 8 + part])
        if const_expr(a.code_sums is not None):
            total = Float32(0.0)
            for i in cutlass.range_constexpr(4):
                for pair in instructions.widened(words[i]):
                    low, high = widened(pair, Float16)
                    total = total + (low + high)
            total = cute.arch.warp_reduction_sum(total, threads_in_group=8)
            if part == 0:
                a.code_sums[b, h, n, 0, channel] = total


def loaded(x: cute.Tensor, tokens: list[Int32], lane: Int32, width: int) -> list[Row]:
    """Shares of rows of tokens [S, D]; of those past the end, the last one, which changes no greatest
    number."""
    last = Int32(x.shape[0]) - 1
    words = [words_of(x[cutlass.min(t, last), None], lane, width) for t in tokens]
    return [numbers_of(each, x.element_type) for each in words]
