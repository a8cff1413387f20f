"""scale * q.k in float32, by warps of their own: a warp keeps its rows of queries in registers, and reads
keys from memory as the tensor core takes them.

Sums are over channels, in any order: a thread of a quad reads 8 channels next to each other of its rows and
of its keys, and these stand for 4 that two products take from it. Likewise keys are numbered so that scores
of a thread are next to each other, four of them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
from cuda.bindings import driver as cuda
from cutlass import Float32, Int32, const_expr, cute, range_constexpr

from fa4flex.kernels.common.arguments import named
from fa4flex.kernels.common.math import where
from fa4flex.kernels.plan.arguments import SCORES
from fa4flex.kernels.scores.config import DEEP, KEYS, PIECE, ROWS, WARPS, Config

_Arguments: Any = named("ScoreArguments", SCORES.read_by("kernel"))


class ScoreArguments(_Arguments):
    """q [B, Hq, R, D] and k [B, Hk, C, D] of any strides; out float32 [B, Hq, R, C] is written, or odd where
    its rows begin anywhere. chunk: keys that a block of threads has, a multiple of KEYS; scale: a factor."""


class Place(NamedTuple):
    """A block's: sequence and heads, its first row and first key, and the key behind its last one."""

    b: Int32
    h: Int32
    k_head: Int32
    row: Int32
    begin: Int32
    end: Int32


class Products:
    direction = "scores"
    """Schema of its arguments."""

    def __init__(self, config: Config) -> None:
        self.config = config

    @cute.jit
    def __call__(self, arguments: ScoreArguments, stream: cuda.CUstream) -> None:
        batch, heads, rows, _ = arguments.q.shape
        tiles = cute.ceil_div(Int32(rows), self.config.rows)
        chunks = cute.ceil_div(Int32(arguments.k.shape[2]), arguments.chunk)
        self.device(arguments).launch(
            grid=[tiles * chunks * heads * batch, 1, 1],
            block=[32 * WARPS, 1, 1],
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def device(self, arguments: ScoreArguments) -> None:
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        a = arguments
        place = self.place(a)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        first = place.row + warp * (self.config.tall * ROWS)
        if first < a.q.shape[2]:
            out = a.out if const_expr(self.config.even) else a.odd
            keys, scores = a.k[place.b, place.k_head, None, None], out[place.b, place.h, None, None]
            queries = self.queries(a.q[place.b, place.h, None, None], first)
            self.multiply(queries, keys, scores, (first, place.begin, place.end, a.scale))

    def place(self, a: ScoreArguments) -> Place:
        """Blocks that have the same keys of a head follow each other."""
        _, heads, rows, _ = a.q.shape
        tiles = cute.ceil_div(Int32(rows), self.config.rows)
        chunks = cute.ceil_div(Int32(a.k.shape[2]), a.chunk)
        number = cute.arch.block_idx()[0]
        head = number // (tiles * chunks)
        b, h = head // heads, head % heads
        begin = number // tiles % chunks * a.chunk
        end = cutlass.min(begin + a.chunk, Int32(a.k.shape[2]))
        group = Int32(heads) // Int32(a.k.shape[1])
        return Place(b, h, h // group, number % tiles * self.config.rows, begin, end)

    def queries(self, q: cute.Tensor, first: Int32) -> list[list[Any]]:
        """A thread's words of a warp's rows [R, D]: by product, two rows, and channels."""
        lane, last = cute.arch.lane_idx(), Int32(q.shape[0]) - 1
        at = [first + ROWS * m + lane // 4 for m in range(self.config.tall)]
        return [[self.words(q, cutlass.min(row + 8 * half, last)) for half in range(2)] for row in at]

    def words(self, x: cute.Tensor, row: Int32) -> list[list[Int32]]:
        """A thread's words of a row of x [rows, D]: four of each DEEP channels."""
        lane, width, found = cute.arch.lane_idx() % 4, self.config.width, []
        pieces = cute.logical_divide(x[row, None], cute.make_layout(PIECE))
        for j in range(self.config.depth):
            piece = Int32(j * (DEEP // PIECE)) + lane
            within = piece < width // PIECE
            held = cute.make_rmem_tensor((PIECE,), x.element_type)
            whole = (j + 1) * DEEP <= width
            cute.autovec_copy(pieces[None, piece if whole else where(within, piece, Int32(0))], held)
            words = cute.recast_tensor(held, Int32)
            each = [words[i] for i in range(PIECE // 2)]
            found.append(each if whole else [where(within, word, Int32(0)) for word in each])
        return found

    @cute.jit
    def multiply(
        self,
        queries: cutlass.Constexpr,
        k: cute.Tensor,
        out: cute.Tensor,
        share: cutlass.Constexpr,
    ) -> None:
        """A warp's: products of its rows with keys [C, D], KEYS at a time. share: first row, first key, the
        key behind the last, and the scale."""
        first, begin, end, scale = share
        lane, last = cute.arch.lane_idx(), Int32(k.shape[0]) - 1
        own = lane // 8 * 4 + lane // 4 % 2  # of eight columns, those of two keys next to each other
        for base in cutlass.range(begin, end, KEYS, unroll=1):
            keys = [self.words(k, cutlass.min(base + own + 2 * n, last)) for n in range(2)]
            for m in range_constexpr(self.config.tall):
                sums = [[Float32(0.0)] * 4, [Float32(0.0)] * 4]
                for j in range_constexpr(self.config.depth):
                    for step in range_constexpr(2):
                        low, high = 2 * step, 2 * step + 1
                        a = [queries[m][0][j][low], queries[m][1][j][low],
                             queries[m][0][j][high], queries[m][1][j][high]]  # fmt: skip
                        for n in range_constexpr(2):
                            b = keys[n][j][low], keys[n][j][high]
                            sums[n] = product(sums[n], a, b, k.element_type)
                for half in range_constexpr(2):
                    row = first + ROWS * m + lane // 4 + 8 * half
                    four = [sums[n][2 * half + i] * scale for n in range(2) for i in range(2)]
                    if row < out.shape[0]:
                        self.store(four, out[row, None], base + lane % 4 * 4)

    @cute.jit
    def store(self, four: cutlass.Constexpr, row: cute.Tensor, key: Int32) -> None:
        """Scores of four keys that follow each other, as far as they exist."""
        if const_expr(self.config.even):
            if key < row.shape[0]:
                held = cute.make_rmem_tensor((4,), Float32)
                for i in range_constexpr(4):
                    held[i] = four[i]
                cute.autovec_copy(held, cute.logical_divide(row, cute.make_layout(4))[None, key // 4])
        else:
            for i in range_constexpr(4):
                if key + i < row.shape[0]:
                    row[key + i] = four[i]


def product(acc: list[Float32], a: list[Int32], b: tuple[Int32, Int32], kind: type) -> list[Float32]:
    """acc + a b: 16 rows x 16, times 16 x 8 columns (PTX ISA, fragments of mma.m16n8k16)."""
    name = "bf16" if kind is cutlass.BFloat16 else "f16"
    return list(
        cute.arch.inline_ptx(
            f"mma.sync.aligned.m16n8k16.row.col.f32.{name}.{name}.f32 {{{{$w0}}, {{$w1}}, {{$w2}}, {{$w3}}}},"
            " {{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, {{$r6}, {$r7}, {$r8}, {$r9}};",
            write_only_types=[Float32] * 4,
            read_only_args=[*a, *b, *acc],
        )
    )
