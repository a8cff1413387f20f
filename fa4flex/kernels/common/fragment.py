"""Registers of a warpgroup matrix product: views of accumulators, the products themselves, conversions."""

from __future__ import annotations

from typing import Any

from cutlass import Float32, Int32, cute
from cutlass._mlir.dialects import llvm, vector
from cutlass.cute.nvgpu import warpgroup
from cutlass.cutlass_dsl import T, dsl_user_op


def rows_and_columns(acc: cute.Tensor) -> cute.Tensor:
    """Accumulator ((2, 2, V), M, N) seen as (row (2, M), column (2, V, N)): the same registers."""
    shape, stride = acc.layout.shape, acc.layout.stride
    return cute.make_tensor(
        acc.iterator,
        cute.make_layout(
            ((shape[0][1], shape[1]), (shape[0][0], shape[0][2], shape[2])),
            stride=((stride[0][1], stride[1]), (stride[0][0], stride[0][2], stride[2])),
        ),
    )


def as_operand(acc: cute.Tensor) -> cute.Tensor:
    """Accumulator ((2, 2, N / 8), M, 1) seen as the A operand ((2, 2, 2), M, N / 16) of a next product."""
    split = cute.logical_divide(acc.layout, ((None, None, 2), None, None))
    shape, stride = split.shape, split.stride
    return cute.make_tensor(
        acc.iterator,
        cute.make_layout(
            ((shape[0][0], shape[0][1], shape[0][2][0]), shape[1], (shape[0][2][1], shape[2])),
            stride=((stride[0][0], stride[0][1], stride[0][2][0]), stride[1], (stride[0][2][1], stride[2])),
        ),
    )


def multiply(
    mma: cute.TiledMma,
    acc: cute.Tensor,
    a: cute.Tensor,
    b: cute.Tensor,
    accumulate: bool,
    depth: int | None = None,
) -> None:
    """Issue acc (+)= a b and commit it as one group; whoever needs acc waits for the group. depth: how many
    instructions; of those that follow, operands are zero."""
    # An atom of its own: the accumulate flag is state, which must not leak out of the caller's region.
    atom = cute.make_mma_atom(mma.op)
    atom.set(warpgroup.Field.ACCUMULATE, accumulate)
    warpgroup.fence()
    for k in range(cute.size(a.shape[2]) if depth is None else depth):
        cute.gemm(atom, acc, a[None, None, k], b[None, None, k], acc)
        atom.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()


def numbers(registers: cute.Tensor) -> list[Float32]:
    """All elements, loaded at once: one by one, each is an address and a load, and tracing takes a tenth
    longer."""
    return elements(registers.load(), cute.size(registers))


def elements(values: cute.TensorSSA, count: int) -> list[Float32]:
    """The first so many elements of a vector."""
    vectors = values.ir_value()
    return [Float32(vector.extract(vectors, [], [i])) for i in range(count)]


@dsl_user_op
def _pack(low: Float32, high: Float32, name: str, *, loc: Any = None, ip: Any = None) -> Int32:
    return Int32(
        llvm.inline_asm(
            T.i32(),
            [Float32(x).ir_value(loc=loc, ip=ip) for x in (low, high)],
            f"cvt.rn.{name}.f32 $0, $2, $1;",
            "=r,f,f",
            has_side_effects=False,
            is_align_stack=False,
            asm_dialect=llvm.AsmDialect.AD_ATT,
        )
    )


def packed(low: Float32, high: Float32, kind: Any) -> Int32:
    """Two numbers, rounded to a 16-bit dtype, in one register."""
    return _pack(low, high, "bf16x2" if kind.__name__ == "BFloat16" else "f16x2")


def narrow(source: cute.Tensor, target: cute.Tensor) -> None:
    """Round float32 registers to 16 bits, two at a time. The vector conversion does one at a time for most
    sizes, at half the rate."""
    pairs = cute.recast_tensor(target, Int32)
    for i in range(cute.size(pairs)):
        pairs[i] = packed(source[2 * i], source[2 * i + 1], target.element_type)


def narrow_to_bytes(source: cute.Tensor, target: cute.Tensor) -> None:
    """Round float32 registers (row, column) to e4m3, as an operand of 8 bits: its place 16 h + 4 c + 2 j + b
    in a row is that of key 16 h + 8 j + 2 c + b, of which lane c of four has the score."""
    words = cute.recast_tensor(target, Int32)
    for i in range(cute.size(words)):
        step, half, row = i // 4, i // 2 % 2, i % 2
        first = 8 * step + 4 * half
        words[i] = pack_four(*[source[row, first + j] for j in range(4)])


@dsl_user_op
def pack_four(a: Float32, b: Float32, c: Float32, d: Float32, *, loc: Any = None, ip: Any = None) -> Int32:
    return Int32(
        llvm.inline_asm(
            T.i32(),
            [Float32(x).ir_value(loc=loc, ip=ip) for x in (a, b, c, d)],
            "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;"
            " cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; mov.b32 $0, {low, high}; }",
            "=r,f,f,f,f",
            has_side_effects=False,
            is_align_stack=False,
            asm_dialect=llvm.AsmDialect.AD_ATT,
        )
    )


def widened(word: Int32, kind: Any) -> tuple[Float32, Float32]:
    """The two numbers of 16 bits in a word, as float32."""
    if kind.__name__ == "BFloat16":
        # A bfloat16 is the upper half of a float32: shifts, where a conversion would take four times as long.
        return (word << 16).bitcast(Float32), (word & -65536).bitcast(Float32)
    pair = cute.make_rmem_tensor((2,), kind)
    cute.recast_tensor(pair, Int32)[0] = word
    return pair[0].to(Float32), pair[1].to(Float32)


def multiply_narrow(ds: cute.Tensor, p: cute.Tensor) -> None:
    """ds (row, column) times an operand's numbers of 16 bits."""
    words = cute.recast_tensor(p, Int32)
    for c in range(0, cute.size(ds, mode=[1]), 2):
        for r in range(2):
            for i, weight in enumerate(widened(words[c + r], p.element_type)):
                ds[r, c + i] = weight * ds[r, c + i]


@dsl_user_op
def compute_before(x: Float32 | Int32, *, loc: Any = None, ip: Any = None) -> None:
    """Keep what comes after from moving ahead of the computation of x.

    The assembler hoists a wait above independent arithmetic that was written before it, and the arithmetic
    then no longer runs under another warpgroup's product. An event of the performance monitor pins x,
    triggered by one number in 2^32. Anything that may end the program would serialise products, and a sleep
    is branched around: behind a branch the addresses of products are no longer known to be uniform, which
    takes registers, and instructions between a turn and its product.
    """
    llvm.inline_asm(
        None,
        [x.ir_value(loc=loc, ip=ip)],
        "{ .reg .pred odd; setp.eq.b32 odd, $0, 0x7fa5a5a5; @odd pmevent 7; }",
        "f" if isinstance(x, Float32) else "r",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )


@dsl_user_op
def computed_once(x: Float32 | Int32, *, loc: Any = None, ip: Any = None) -> Float32 | Int32:
    """x, where it is: the compiler otherwise sinks what is used in a loop only into that loop, and moves out
    of a loop what depends on nothing that changes there."""
    kind, register = (T.f32(), "f") if isinstance(x, Float32) else (T.i32(), "r")
    return type(x)(
        llvm.inline_asm(
            kind,
            [x.ir_value(loc=loc, ip=ip)],
            "mov.b32 $0, $1;",
            f"={register},{register}",
            has_side_effects=True,
            is_align_stack=False,
            asm_dialect=llvm.AsmDialect.AD_ATT,
        )
    )


def alike_in_warp(x: Any) -> Any:
    """x, of which a warp's lanes have the same: a float then takes no register of theirs."""
    if not isinstance(x, Float32):
        return x
    return cute.arch.make_warp_uniform(x.bitcast(Int32)).bitcast(Float32)


@dsl_user_op
def thread_here(*, loc: Any = None, ip: Any = None) -> Int32:
    """The number of this thread, read here: what follows from one that was read before tiles is computed
    before them, and kept in registers."""
    return Int32(
        llvm.inline_asm(
            T.i32(),
            [],
            "mov.u32 $0, %tid.x;",
            "=r",
            has_side_effects=True,
            is_align_stack=False,
            asm_dialect=llvm.AsmDialect.AD_ATT,
        )
    )


def quad_reduce(x: Float32, combine: Any) -> Float32:
    """Combine over the four lanes that share a row of an accumulator."""
    for distance in (1, 2):
        x = combine(x, cute.arch.shuffle_sync_bfly(x, offset=distance))
    return x


__all__ = [
    "alike_in_warp",
    "as_operand",
    "compute_before",
    "computed_once",
    "multiply",
    "narrow",
    "narrow_to_bytes",
    "numbers",
    "packed",
    "quad_reduce",
    "rows_and_columns",
    "thread_here",
    "widened",
]
