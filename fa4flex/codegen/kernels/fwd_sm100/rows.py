"""A row of scores in the registers of one thread: packed arithmetic on two columns at a time."""

from __future__ import annotations

from typing import Any

from cutlass import Float32, cute
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

from fa4flex.codegen.kernels.common.exponential import emulated, exp2_pair
from fa4flex.codegen.kernels.fwd_sm100.config import Exponential

CHAINS = 4
"""Independent chains of maxima or sums: a single one would wait for itself."""


@dsl_user_op
def maximum(a: Float32, b: Float32, c: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """One instruction on Blackwell."""
    return Float32(
        llvm.inline_asm(
            T.f32(),
            [Float32(x).ir_value(loc=loc, ip=ip) for x in (a, b, c)],
            "max.f32 $0, $1, $2, $3;",
            "=f,f,f,f",
            has_side_effects=False,
            is_align_stack=False,
            asm_dialect=llvm.AsmDialect.AD_ATT,
        )
    )


def largest_of(row: cute.Tensor) -> Float32:
    """A multiple of 8 numbers."""
    chains = [row[i] for i in range(CHAINS)]
    for i in range(CHAINS, cute.size(row) - CHAINS, 2 * CHAINS):
        for c in range(CHAINS):
            chains[c] = maximum(chains[c], row[i + 2 * c], row[i + 2 * c + 1])
    last = [row[i] for i in range(cute.size(row) - CHAINS, cute.size(row))]
    chains = [*chains, *last]
    return maximum(maximum(*chains[:3]), maximum(*chains[3:6]), cute.arch.fmax(*chains[6:]))


def total_of(row: cute.Tensor, before: Float32) -> Float32:
    """`before` and the sum of a multiple of 8 numbers."""
    chains = [(row[2 * c], row[2 * c + 1]) for c in range(CHAINS)]
    for i in range(CHAINS, cute.size(row) // 2):
        chains[i % CHAINS] = cute.arch.add_packed_f32x2(chains[i % CHAINS], (row[2 * i], row[2 * i + 1]))
    halves = [cute.arch.add_packed_f32x2(chains[c], chains[c + 2]) for c in range(2)]
    low, high = cute.arch.add_packed_f32x2(*halves)
    return before + (low + high)


def exponentiate(row: cute.Tensor, factor: Float32, shift: Float32, how: Exponential, fragment: int) -> None:
    """y becomes 2^(factor y - shift), in this fragment of a row."""
    size = cute.size(row)
    for i in range(0, size, 2):
        x = cute.arch.fma_packed_f32x2((row[i], row[i + 1]), (factor, factor), (-shift, -shift))
        if emulated((fragment * size + i) // 2, how.every, how.count, how.skip):
            row[i], row[i + 1] = exp2_pair(x[0], x[1], how.degree)
        else:
            row[i], row[i + 1] = (cute.math.exp2(one, fastmath=True) for one in x)


def multiply(row: cute.Tensor, scale: Float32) -> None:
    for i in range(0, cute.size(row), 2):
        row[i], row[i + 1] = cute.arch.mul_packed_f32x2((row[i], row[i + 1]), (scale, scale))
