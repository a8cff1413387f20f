"""A row of products of codes in the registers of one thread, two columns at a time."""

from __future__ import annotations

import functools

import cutlass
from cutlass import Float32, Int32, cute
from cutlass._mlir import ir
from cutlass._mlir.dialects import nvvm, vector
from cutlass.cutlass_dsl import T

from fa4flex.kernels.common.fragment import pack_four
from fa4flex.kernels.fwd_sm100.rows import CHAINS, Pair, add, halves, largest_of, pair

WHOLE = 1.5 * 2.0**23
"""float32 from 2^22 below it to 2^22 above are the whole numbers: so far reach products of 256 codes of 8
bits."""

BITS_OF_WHOLE = 0x4B400000


Numbers = list[Float32] | list[Int32]
"""Numbers of one row."""


def integers(row: list[Float32]) -> list[Int32]:
    """The int32 that registers hold."""
    return [x.bitcast(Int32) for x in row]


def in_float32(row: Numbers) -> list[Float32]:
    """The same numbers. An integer is added to the bits of WHOLE, and WHOLE taken away from the number, two
    at once: a conversion would share the unit that exponentials wait for."""
    found: list[Float32] = []
    whole = pair(Float32(-WHOLE), Float32(-WHOLE))
    if not isinstance(row[0], Int32):
        return row
    for i in range(0, len(row), 2):
        both = ((x + BITS_OF_WHOLE).bitcast(Float32) for x in row[i : i + 2])
        found += halves(add(pair(*both), whole))
    return found


def largest_number(row: Numbers, before: Float32 | Int32 | None = None) -> Float32 | Int32:
    """`largest_of`, of integers, too."""
    if not isinstance(row[0], Int32):
        return largest_of(row, before)
    chains = row[:CHAINS]
    for i in range(CHAINS, len(row)):
        chains[i % CHAINS] = cutlass.max(chains[i % CHAINS], row[i])
    return functools.reduce(cutlass.max, chains if before is None else [*chains, before])


def brought_to_scale(row: list[Float32], scale: Float32, bias: Float32 | None) -> list[Float32]:
    """scale * x + bias of each number."""
    scales, rounding = pair(scale, scale), nvvm.FPRoundingMode.RN
    found: list[Float32] = []
    for i in range(0, len(row), 2):
        two = pair(*row[i : i + 2])
        if bias is None:
            made = nvvm.mul_packed_f32x2(two, scales, rnd=rounding)
        else:
            made = nvvm.fma_packed_f32x2(two, scales, pair(bias, bias), rnd=rounding)
        found += halves(made)
    return found


def narrowed_to_bytes(row: list[Pair]) -> cute.Tensor:
    """Registers, float32 (pairs / 2,), each with four of the numbers rounded to e4m3, in the order in which
    quantised values have 16 keys: 0 1 8 9, 2 3 10 11, 4 5 12 13, 6 7 14 15."""
    words = [
        pack_four(*halves(row[first + i]), *halves(row[first + i + 4])).ir_value()
        for first in range(0, len(row), 8)
        for i in range(4)
    ]
    whole = vector.from_elements(ir.VectorType.get([len(words)], T.i32()), words)
    bits = vector.bitcast(ir.VectorType.get([len(words)], T.f32()), whole)
    registers = cute.make_rmem_tensor((len(words),), Float32)
    registers.store(cute.TensorSSA(bits, (len(words),), Float32))
    return registers
