"""Heads of a token on their way into a cache: normalised, rotated and scaled in float32, and rounded once.

A thread takes pieces of heads, of `together` elements, with the pieces that turn with them. Where a number of
the whole head is needed, the root mean square or the largest element, a warp takes a head.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, Uint8, const_expr, cute, select_

from fa4flex.kernels.append.config import E4M3_LARGEST, Config
from fa4flex.kernels.common.math import absolute

THREADS, LANES = 128, 32


class Angles(NamedTuple):
    """Angles of a token: tables [positions, half]; its row in them; or where the axis of each angle says
    which row, `axes` [half] and the token's position on each axis [axes]."""

    cos: cute.Tensor
    sin: cute.Tensor
    row: Int32
    axes: cute.Tensor | None
    positions: cute.Tensor | None


class Way(NamedTuple):
    """Heads of a token [H, W], their destination [H, W], and what they become on the way. weight [W]: of
    their norm; scales [H]: of what is written. None: they stay so."""

    source: cute.Tensor
    target: cute.Tensor
    angles: Angles | None = None
    weight: cute.Tensor | None = None
    eps: Float32 | None = None
    scales: cute.Tensor | None = None


class Numbers(NamedTuple):
    """Numbers of a whole head: by which its elements are multiplied before they turn, and divided after."""

    factor: Float32
    scale: Float32


class Unit(NamedTuple):
    """Two pieces of a head that turn together, or one."""

    x: cute.Tensor
    y: cute.Tensor
    first: Int32
    second: Int32
    paired: Boolean


class Heads:
    def __init__(self, config: Config) -> None:
        self.config, self.together = config, config.together

    @cute.jit
    def carry(self, way: Way, thread: Int32) -> None:
        heads, width = way.source.shape
        units = width // self.together
        if const_expr(way.angles is not None and not self.turns_within):
            units = units - way.angles.cos.shape[1] // self.together
        if const_expr(self._needs_whole_heads(way)):
            for h in cutlass.range(thread // LANES, heads, THREADS // LANES, unroll=1):
                numbers = self.numbers(way, h, thread % LANES, units)
                for number in cutlass.range(thread % LANES, units, LANES, unroll=1):
                    self.write(way, h, self.unit(way, h, number, numbers.factor), numbers.scale)
        else:
            for number in cutlass.range(thread, heads * units, THREADS, unroll=1):
                h = number // units
                scale = Float32(1.0)
                if const_expr(way.scales is not None):
                    scale = way.scales[h]
                self.write(way, h, self.unit(way, h, number % units, Float32(1.0)), scale)

    @property
    def turns_within(self) -> bool:
        """True if elements turn with others of their own piece."""
        return self.config.interleaved and self.together > 1

    def _needs_whole_heads(self, way: Way) -> bool:
        return way.weight is not None or (way.scales is not None and self.config.own_scales)

    # --- numbers of whole heads -----------------------------------------------------------------------------

    @cute.jit
    def numbers(self, way: Way, h: Int32, lane: Int32, units: Int32) -> Numbers:
        factor, scale = Float32(1.0), Float32(1.0)
        if const_expr(way.weight is not None):
            width = way.source.shape[1]
            total = Float32(0.0)
            for piece in cutlass.range(lane, width // self.together, LANES, unroll=1):
                x = self.load(way.source[h, None], piece)
                for e in cutlass.range_constexpr(self.together):
                    total = total + x[e].to(Float32) * x[e].to(Float32)
            mean = cute.arch.warp_reduction_sum(total) / Float32(width)
            factor = cute.math.rsqrt(mean + way.eps)
        if const_expr(way.scales is not None):
            if const_expr(self.config.own_scales):
                scale = self.own_scale(way, h, lane, units, factor)
                if lane == 0:
                    way.scales[h] = scale
            else:
                scale = way.scales[h]
        return Numbers(factor, scale)

    @cute.jit
    def own_scale(self, way: Way, h: Int32, lane: Int32, units: Int32, factor: Float32) -> Float32:
        """The scale by which the head's largest element is e4m3's largest number; 1 of a head of zeros."""
        largest = Float32(0.0)
        for number in cutlass.range(lane, units, LANES, unroll=1):
            unit = self.unit(way, h, number, factor)
            for e in cutlass.range_constexpr(self.together):
                largest = cute.arch.fmax(largest, absolute(unit.x[e]))
                if unit.paired:
                    largest = cute.arch.fmax(largest, absolute(unit.y[e]))
        largest = cute.arch.warp_reduction_max(largest)
        return select_(largest > 0.0, largest / Float32(E4M3_LARGEST), Float32(1.0))

    # --- pieces ---------------------------------------------------------------------------------------------

    @cute.jit
    def unit(self, way: Way, h: Int32, number: Int32, factor: Float32) -> Unit:
        """Pieces in float32, normalised and rotated."""
        x, y = (cute.make_rmem_tensor((self.together,), Float32) for _ in "xy")
        first, second, paired = number, number, Boolean(False)
        if const_expr(way.angles is not None and not self.turns_within):
            pairs = way.angles.cos.shape[1] // self.together
            paired = number < pairs
            first = select_(paired, 2 * number if self.config.interleaved else number, number + pairs)
            second = first + (1 if self.config.interleaved else pairs)
        self.read(way, h, first, factor, x)
        if const_expr(way.angles is not None):
            if const_expr(self.turns_within):
                if first * self.together < 2 * way.angles.cos.shape[1]:
                    self.turn_within(way.angles, x, first)
            elif paired:
                self.read(way, h, second, factor, y)
                for e in cutlass.range_constexpr(self.together):
                    cos, sin = self.angle(way.angles, number * self.together + e)
                    x[e], y[e] = x[e] * cos - y[e] * sin, y[e] * cos + x[e] * sin
        return Unit(x, y, first, second, paired)

    @cute.jit
    def turn_within(self, angles: Angles, x: cute.Tensor, piece: Int32) -> None:
        for e in cutlass.range_constexpr(0, self.together, 2):
            cos, sin = self.angle(angles, (piece * self.together + e) // 2)
            x[e], x[e + 1] = x[e] * cos - x[e + 1] * sin, x[e + 1] * cos + x[e] * sin

    @cute.jit
    def angle(self, angles: Angles, number: Int32) -> tuple[Float32, Float32]:
        row = angles.row
        if const_expr(angles.axes is not None):
            axis = cutlass.max(cutlass.min(angles.axes[number], angles.positions.shape[0] - 1), Int32(0))
            last = angles.cos.shape[0] - 1
            row = Int32(cutlass.max(cutlass.min(angles.positions[axis], last), 0))
        return angles.cos[row, number].to(Float32), angles.sin[row, number].to(Float32)

    @cute.jit
    def read(self, way: Way, h: Int32, piece: Int32, factor: Float32, into: cute.Tensor) -> None:
        held = self.load(way.source[h, None], piece)
        for e in cutlass.range_constexpr(self.together):
            into[e] = held[e].to(Float32)
            if const_expr(way.weight is not None):
                weight = way.weight[piece * self.together + e].to(Float32)
                if const_expr(self.config.unit_offset):
                    weight = weight + 1.0
                into[e] = into[e] * factor * weight

    @cute.jit
    def write(self, way: Way, h: Int32, unit: Unit, scale: Float32) -> None:
        row = way.target[h, None]
        self.store_rounded(unit.x, row, unit.first, scale)
        if unit.paired:
            self.store_rounded(unit.y, row, unit.second, scale)

    @cute.jit
    def store_rounded(self, x: cute.Tensor, row: cute.Tensor, piece: Int32, scale: Float32) -> None:
        held = cute.make_rmem_tensor((self.together,), row.element_type)
        if const_expr(row.element_type is not Uint8):
            for e in cutlass.range_constexpr(self.together):
                held[e] = x[e].to(row.element_type)
        elif const_expr(self.together == 1):
            value = x[0] / scale
            held[0] = _e4m3([value] * 4).to(Uint8)
        else:
            words = cute.recast_tensor(held, Int32)
            for word in cutlass.range_constexpr(self.together // 4):
                words[word] = _e4m3([x[4 * word + e] / scale for e in range(4)])
        self.store(held, row, piece)

    # --- as they are ----------------------------------------------------------------------------------------

    @cute.jit
    def move(self, source: cute.Tensor, target: cute.Tensor, thread: Int32) -> None:
        """All heads as they are."""
        heads, width = source.shape
        pieces = width // self.together
        for unit in cutlass.range(thread, heads * pieces, THREADS, unroll=1):
            h, piece = unit // pieces, unit % pieces
            self.store(self.load(source[h, None], piece), target[h, None], piece)

    def load(self, row: cute.Tensor, piece: Int32) -> cute.Tensor:
        held = cute.make_rmem_tensor((self.together,), row.element_type)
        if self.together == 1:
            held[0] = row[piece]
        else:
            cute.autovec_copy(self.pieces(row)[None, piece], held)
        return held

    def store(self, held: cute.Tensor, row: cute.Tensor, piece: Int32) -> None:
        if self.together == 1:
            row[piece] = held[0]
        else:
            cute.autovec_copy(held, self.pieces(row)[None, piece])

    def pieces(self, row: cute.Tensor) -> cute.Tensor:
        return cute.logical_divide(row, cute.make_layout(self.together))


def _e4m3(values: list[Float32]) -> Int32:
    """Four numbers as bytes of e4m3, the first one lowest: rounded to nearest even, and clamped to 448."""
    word: Int32 = cute.arch.inline_ptx(
        "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, {$r1}, {$r0};"
        " cvt.rn.satfinite.e4m3x2.f32 high, {$r3}, {$r2}; mov.b32 {$w0}, {low, high}; }",
        write_only_types=[Int32],
        read_only_args=values,
    )
    return word
