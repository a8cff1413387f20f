"""Masses of tiles of keys by codes of 8 bits: a warp has a tile, and bounds the sum of the exponentials of
the scores of each row in it.

Queries have two codes for each channel, the second of what the first one lacks, so that a row of scores is
as exact as its keys. A product of 16 rows has 8 rows of queries twice: a thread finds both halves of a score
in its own registers. Lanes read keys from memory in runs of 16 bytes, as queries are arranged alike: which
channel is which of a product's inner dimension does not matter. fa4flex/runtime/cpu/planes.py has the bound.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
from cuda.bindings import driver as cuda
from cutlass import Boolean, Float32, Int32, cute

from fa4flex.kernels.common.arguments import named
from fa4flex.kernels.common.math import exp2, log2, where
from fa4flex.kernels.plan.arguments import PLANES
from fa4flex.kernels.planes.config import GROUP, LOW, SLACK, ULPS, Config
from fa4flex.kernels.planes.looks import INFINITY, LN2, LOG2E, looks

_Arguments: Any = named("PlanesArguments", PLANES.read_by("kernel"))

QUAD = 4
"""Lanes that have a key of an operand, and a row of a product."""


class PlanesArguments(_Arguments):
    """codes int32 [B, Hkv, slots, D / 4]: four channels of a key each. queries int32 [B, Hkv, 16 groups,
    D / 4]: of each group, high halves of 8 rows, then low ones. numbers float32 [B, Hkv, rows, 4] of each
    row: see Row; spans int32 [B, Hkv, rows, 2]: first allowed key, and the one past the last. scale, error,
    size float32 [B, Hkv, T] of tiles; norms float32 [B, Hkv] of offsets; share float32 [B, Hkv], step int64
    [1], worth: see looks. upper, lower float32 [B, Hkv, T, rows] are written, -inf for heads that do not
    look."""


class Row(NamedTuple):
    """A row of a group: factor of its codes; what it has of the offset of the keys; what errors of keys, and
    of its own codes, are multiplied by; the keys that it may see."""

    unit: Float32
    shift: Float32
    steep: Float32
    own: Float32
    first: Int32
    end: Int32


class Place(NamedTuple):
    """Sequence, head of keys, tile; and a lane's row of a group, and its quarter of it."""

    b: Int32
    h: Int32
    tile: Int32
    row: Int32
    quarter: Int32


class Masses:
    direction = "planes"
    """Schema of its arguments."""

    def __init__(self, config: Config) -> None:
        self.config = config

    @cute.jit
    def __call__(self, arguments: PlanesArguments, stream: cuda.CUstream) -> None:
        warps, (batch, heads, tiles) = self.config.warps, arguments.scale.shape
        self.device(arguments).launch(
            grid=[cute.ceil_div(Int32(tiles), warps), heads, batch],
            block=[32 * warps, 1, 1],
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def device(self, arguments: PlanesArguments) -> None:
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        n, h, b = cute.arch.block_idx()
        tile = n * self.config.warps + cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        if tile < arguments.scale.shape[2]:
            self.bound(arguments, Place(b, h, tile, lane // QUAD, lane % QUAD))

    @cute.jit
    def bound(self, arguments: PlanesArguments, at: Place) -> None:
        """A warp's: the masses of a tile."""
        a, block = arguments, self.config.block
        rows = [row_of(a, at, g) for g in range(self.config.groups)]
        seen = Boolean(False)
        for row in rows:
            seen = seen | ((row.first < (at.tile + 1) * block) & (row.end > at.tile * block))
        if cute.arch.vote_any_sync(seen & looks(a, at.b, at.h)):
            self.write(a, at, rows)
        else:
            for g in cutlass.range_constexpr(self.config.groups):
                store(a, at, g, -Float32.inf, Float32(0.0))

    @cute.jit
    def write(self, arguments: cutlass.Constexpr, at: Place, rows: cutlass.Constexpr) -> None:
        a, groups = arguments, self.config.groups
        scale, error, size = (x[at.b, at.h, at.tile] for x in (a.scale, a.error, a.size))
        scores = self.scores(a, at, rows, scale)
        whole = 2 * (size + a.norms[at.b, at.h])
        for g in cutlass.range_constexpr(groups):
            row = rows[g]
            off = row.steep * (error * SLACK + (ULPS * self.config.width) * whole) + row.own * (size + error)
            store(a, at, g, log_of_sum(scores[g]), off)

    @cute.jit
    def scores(
        self, arguments: cutlass.Constexpr, at: Place, rows: cutlass.Constexpr, scale: Float32
    ) -> list[list[Float32]]:
        """A lane's scores of its row of each group: of keys 8 i + 2 quarter, and the next. -inf where they
        are masked."""
        config, a = self.config, arguments
        queries = [self.query(a, at, g) for g in range(config.groups)]
        factors = [row.unit * scale for row in rows]
        found: list[list[Float32]] = [[] for _ in range(config.groups)]
        first = at.tile * config.block
        for i in cutlass.range_constexpr(config.block // GROUP):
            key = self.words(a.codes[at.b, at.h, first + i * GROUP + at.row, None], at.quarter)
            for g in cutlass.range_constexpr(config.groups):
                products = [Int32(0)] * 4
                for step in cutlass.range_constexpr(config.width // 32):
                    products = multiply(products, queries[g][step], key[2 * step : 2 * step + 2])
                for column in cutlass.range_constexpr(2):
                    high, low = Float32(products[column]), Float32(products[column + 2])
                    score = (high + low * (1 / LOW)) * factors[g] + rows[g].shift
                    number = first + i * GROUP + at.quarter * 2 + column
                    allowed = (number >= rows[g].first) & (number < rows[g].end)
                    found[g].append(where(allowed, score, -INFINITY))
        return found

    @cute.jit
    def query(self, arguments: cutlass.Constexpr, at: Place, group: cutlass.Constexpr) -> list[list[Int32]]:
        """First operands of the products of a group's rows."""
        rows = arguments.queries[at.b, at.h, None, None]
        high = self.words(rows[2 * GROUP * group + at.row, None], at.quarter)
        low = self.words(rows[2 * GROUP * group + GROUP + at.row, None], at.quarter)
        return [[high[n], low[n], high[n + 1], low[n + 1]] for n in range(0, len(high), 2)]

    @cute.jit
    def words(self, row: cute.Tensor, quarter: Int32) -> list[Int32]:
        """A lane's channels of a row: of each run of 64, 16."""
        pieces, found = cute.logical_divide(row, cute.make_layout(4)), []
        for run in cutlass.range_constexpr(self.config.runs):
            held = cute.make_rmem_tensor((4,), Int32)
            cute.autovec_copy(pieces[None, run * QUAD + quarter], held)
            found += [held[i] for i in range(4)]
        return found


def row_of(a: PlanesArguments, at: Place, group: int) -> Row:
    row = group * GROUP + at.row
    numbers, span = a.numbers[at.b, at.h, row, None], a.spans[at.b, at.h, row, None]
    return Row(numbers[0], numbers[1], numbers[2], numbers[3], span[0], span[1])


def log_of_sum(scores: list[Float32]) -> Float32:
    """Logarithm of the sum of exponentials of a row's scores, which four lanes have. NaN where one is."""
    most = scores[0]
    for x in scores[1:]:
        most = cutlass.max(most, x)
    most = cute.arch.warp_reduction_max(most, threads_in_group=QUAD)
    most = where(most == -INFINITY, Float32(0.0), most)
    total = Float32(0.0)
    for x in scores:
        total = total + exp2((x - most) * LOG2E)
    total = cute.arch.warp_reduction_sum(total, threads_in_group=QUAD)
    return log2(total) * LN2 + most


@cute.jit
def store(a: cutlass.Constexpr, at: Place, group: cutlass.Constexpr, log: Float32, off: Float32) -> None:
    if at.quarter == 0:
        row = group * GROUP + at.row
        a.upper[at.b, at.h, at.tile, row] = log + off
        a.lower[at.b, at.h, at.tile, row] = log - off


def multiply(acc: list[Int32], a: list[Int32], b: list[Int32]) -> list[Int32]:
    """acc + a b: 16 rows x 32, times 32 x 8 columns of bytes (PTX ISA, fragments of mma.m16n8k32)."""
    return list(
        cute.arch.inline_ptx(
            "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {{$w0}, {$w1}, {$w2}, {$w3}},"
            " {{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, {{$r6}, {$r7}, {$r8}, {$r9}};",
            write_only_types=[Int32] * 4,
            read_only_args=[*a, *b, *acc],
        )
    )
