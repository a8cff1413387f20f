"""A row of scores in the registers of one thread: packed arithmetic on two columns at a time.

Numbers are values, in lists, and pairs of them vectors: a tensor of registers takes an address and a load or
a store for each element, which compiling a kernel would spend half of its time on.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from cutlass import Float32, cute
from cutlass._mlir import ir
from cutlass._mlir.dialects import arith, llvm, math, nvvm, vector
from cutlass.cutlass_dsl import T, dsl_user_op

from fa4flex.kernels.common.exponential import emulated, exp2_pair
from fa4flex.kernels.common.fragment import numbers, packed
from fa4flex.kernels.common.softmax import FAR
from fa4flex.kernels.common.softpick import Softpick, rectified
from fa4flex.kernels.fwd_sm100.config import Exponential

CHAINS = 4
"""Independent chains of maxima or sums: a single one would wait for itself."""

Pair = Any
"""A vector of two float32."""


class Row:
    """Numbers of one row, which hooks read and write as those of a tensor (1, columns)."""

    def __init__(self, registers: cute.Tensor) -> None:
        self.numbers = numbers(registers)

    def __getitem__(self, place: tuple[int, int]) -> Float32:
        return self.numbers[place[1]]

    def __setitem__(self, place: tuple[int, int], value: Float32) -> None:
        self.numbers[place[1]] = value


def pair(low: Float32, high: Float32) -> Pair:
    kind = ir.VectorType.get([2], T.f32())
    return vector.from_elements(kind, [Float32(x).ir_value() for x in (low, high)])


def halves(pair: Pair) -> tuple[Float32, Float32]:
    low, high = (Float32(vector.extract(pair, [], [i])) for i in range(2))
    return low, high


def add(a: Pair, b: Pair) -> Pair:
    return nvvm.add_packed_f32x2(a, b, rnd=nvvm.FPRoundingMode.RN)


@dsl_user_op
def _of_three(
    instruction: str, a: Float32, b: Float32, c: Float32, *, loc: Any = None, ip: Any = None
) -> Float32:
    """One instruction on Blackwell."""
    return Float32(
        llvm.inline_asm(
            T.f32(),
            [Float32(x).ir_value(loc=loc, ip=ip) for x in (a, b, c)],
            f"{instruction} $0, $1, $2, $3;",
            "=f,f,f,f",
            has_side_effects=False,
            is_align_stack=False,
            asm_dialect=llvm.AsmDialect.AD_ATT,
        )
    )


maximum = partial(_of_three, "max.f32")
"""The largest of three numbers."""
maximum_or_nan = partial(_of_three, "max.NaN.f32")
"""The same, and NaN where one of them is."""


def largest_or_nan(row: list[Float32], before: Float32 | None = None) -> Float32:
    """`largest_of`, and NaN where one of the numbers is."""
    return largest_of(row, before, maximum_or_nan)


def largest_of(row: list[Float32], before: Float32 | None = None, maximum: Any = maximum) -> Float32:
    """The largest of a multiple of 8 numbers, and of what was the largest before them."""
    chains = row[:CHAINS]
    for i in range(CHAINS, len(row) - CHAINS, 2 * CHAINS):
        for c in range(CHAINS):
            chains[c] = maximum(chains[c], row[i + 2 * c], row[i + 2 * c + 1])
    chains = [*chains, *row[-CHAINS:]]
    *six, last, other = chains
    if before is None:
        end = cute.arch.fmax(last, other) if maximum is not maximum_or_nan else maximum(last, other, other)
    else:
        end = maximum(last, other, before)
    return maximum(maximum(*six[:3]), maximum(*six[3:]), end)


def total_of(row: list[Pair], before: Float32) -> Float32:
    """`before` and the sum of a multiple of 4 pairs."""
    chains = row[:CHAINS]
    for i in range(CHAINS, len(row)):
        chains[i % CHAINS] = add(chains[i % CHAINS], row[i])
    low, high = halves(add(add(chains[0], chains[2]), add(chains[1], chains[3])))
    return before + (low + high)


class Moments:
    """Sums of probabilities times their logarithms of base 2, of a tile of one row."""

    def __init__(self) -> None:
        zero = pair(Float32(0.0), Float32(0.0))
        self.chains = [zero, zero]

    def add(self, place: int, probabilities: Pair, logs: Pair) -> None:
        low, high = (cute.arch.fmax(x, Float32(FAR)) for x in halves(logs))
        at = place % len(self.chains)
        self.chains[at] = nvvm.fma_packed_f32x2(
            probabilities, pair(low, high), self.chains[at], rnd=nvvm.FPRoundingMode.RN
        )

    @property
    def total(self) -> Float32:
        low, high = halves(add(*self.chains))
        return low + high


def exponentiate(
    row: list[Float32],
    factor: Float32,
    shift: Float32,
    how: Exponential,
    fragment: int,
    moments: Moments | None = None,
) -> list[Pair]:
    """2^(factor y - shift) of this fragment of a row, which is taken into the moments, if there are some."""
    found = []
    factors, shifts = pair(factor, factor), pair(-shift, -shift)
    for i in range(0, len(row), 2):
        x = nvvm.fma_packed_f32x2(pair(*row[i : i + 2]), factors, shifts, rnd=nvvm.FPRoundingMode.RN)
        if emulated((fragment * len(row) + i) // 2, how.every, how.count, how.skip):
            found.append(pair(*exp2_pair(*halves(x), how.degree)))
        else:
            found.append(math.exp2(x, fastmath=arith.FastMathFlags.fast))
        if moments is not None:
            moments.add(i // 2, found[-1], x)
    return found


def softpicked(softmax: Softpick, row: list[Float32]) -> tuple[list[Pair], list[Pair]]:
    """Terms of the total of a row of numbers, and their weights."""
    u = softmax.signed(row)
    return paired([cute.math.abs(x) for x in u]), paired([rectified(x) for x in u])


def paired(row: list[Float32]) -> list[Pair]:
    """Numbers two by two."""
    return [pair(*row[i : i + 2]) for i in range(0, len(row), 2)]


def narrowed(row: list[Pair], kind: Any) -> cute.Tensor:
    """Registers, float32 (pairs,), each with two of the numbers rounded to 16 bits."""
    words = [packed(*halves(two), kind).ir_value() for two in row]
    whole = vector.from_elements(ir.VectorType.get([len(row)], T.i32()), words)
    registers = cute.make_rmem_tensor((len(row),), Float32)
    bits = vector.bitcast(ir.VectorType.get([len(row)], T.f32()), whole)
    registers.store(cute.TensorSSA(bits, (len(row),), Float32))
    return registers


def multiply(row: cute.Tensor, scale: Float32) -> None:
    x, scales = numbers(row), pair(scale, scale)
    rounding = nvvm.FPRoundingMode.RN
    products: list[Float32] = []
    for i in range(0, len(x), 2):
        products += halves(nvvm.mul_packed_f32x2(pair(*x[i : i + 2]), scales, rnd=rounding))
    put(row, products)


def put(row: cute.Tensor, values: list[Float32]) -> None:
    """All elements, stored at once."""
    whole = vector.from_elements(ir.VectorType.get([len(values)], T.f32()), [y.ir_value() for y in values])
    row.store(cute.TensorSSA(whole, row.shape, Float32))
