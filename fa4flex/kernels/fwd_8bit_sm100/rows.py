"""A row of products of codes in the registers of one thread, two columns at a time."""

from __future__ import annotations

from cutlass import Float32, Int32, cute
from cutlass._mlir import ir
from cutlass._mlir.dialects import nvvm, vector
from cutlass.cutlass_dsl import T

from fa4flex.kernels.common.fragment import pack_four
from fa4flex.kernels.fwd_sm100.rows import Pair, add, halves, pair

WHOLE = 1.5 * 2.0**23
"""float32 from 2^22 below it to 2^22 above are the whole numbers: so far reach products of 256 codes of 8
bits."""

BITS_OF_WHOLE = 0x4B400000


def of_integers(row: list[Float32]) -> list[Float32]:
    """Numbers of the int32 that registers hold. An integer is added to the bits of WHOLE, and WHOLE taken
    away from the number, two at once: a conversion would share the unit that exponentials wait for."""
    whole = pair(Float32(-WHOLE), Float32(-WHOLE))
    found: list[Float32] = []
    for i in range(0, len(row), 2):
        low, high = ((x.bitcast(Int32) + BITS_OF_WHOLE).bitcast(Float32) for x in row[i : i + 2])
        found += halves(add(pair(low, high), whole))
    return found


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
