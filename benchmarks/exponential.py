"""Accuracy of the software exponential of kernels, beside FlashAttention-4's table 2, and its coefficients.

    python benchmarks/exponential.py            # the table, in half a minute
    python benchmarks/exponential.py --derive   # the coefficients, in a minute

The device's arithmetic is reproduced bit by bit in numpy, so neither a GPU nor the simulator is needed:
`exp2` is what `exponential.exp2_pair` computes for x < 128, and tests hold the compiled kernel to it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fa4flex.kernels.common.exponential import LOWEST, POLYNOMIALS, WHOLE

Array = NDArray[Any]
CHUNK = 1 << 20

PAPER = {
    "correctly rounded": (None, None, 3.89e-3, 1.41e-3),
    "ex2.approx": (1.41e-7, 3.04e-8, 3.89e-3, 1.41e-3),
    "degree 3": (8.77e-5, 5.43e-5, 3.90e-3, 1.41e-3),
    "degree 4": (3.05e-6, 1.84e-6, 3.89e-3, 1.41e-3),
    "degree 5": (1.44e-7, 5.48e-8, 3.89e-3, 1.41e-3),
}
"""arXiv 2603.05451, table 2: largest and mean relative error over [0, 1) in fp32, then rounded to bf16; 4
million random inputs on a B200, and polynomials of the same degrees with other coefficients."""

NOTES = """
softmax: x from -24 to 8, and exponentially distributed below 0.
as nearest: how many results in bf16 are those of the correctly rounded exponential.
ex2.approx: 2 units in the last place, by the PTX ISA; the paper measured it on a B200."""

# --- arithmetic of the device -------------------------------------------------------------------------------


def fma(a: Array, b: Array, c: Array) -> Array:
    """fp32 a b + c, rounded once, to nearest.

    The product of two fp32 numbers is exact in fp64. Their sum with c is rounded to odd there, which makes
    rounding it a second time, to fp32, harmless (Boldo and Melquiond 2008): where the sum was inexact, which
    Knuth's TwoSum tells with the sign of the remainder, and its last bit is even, the neighbour towards the
    remainder is taken.
    """
    product, addend = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    total = product + addend
    part = total - product
    remainder = (product - (total - part)) + (addend - part)
    even = (total.view(np.int64) & 1) == 0
    odd = np.nextafter(total, np.copysign(np.inf, remainder))
    return np.where((remainder != 0) & even, odd, total).astype(np.float32)


def exp2(x: Array, coefficients: Sequence[float]) -> Array:
    """Result of `exp2_pair` to the bit, for fp32 x < 128 that are no NaN."""
    x = np.maximum(x, np.float32(LOWEST))
    # x + WHOLE, rounded down: from 2^23 to 2^24 the fp32 numbers are the integers
    shifted = (np.floor(x.astype(np.float64)) + WHOLE).astype(np.float32)
    fraction = x - (shifted - np.float32(WHOLE))
    value = np.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        value = fma(value, fraction, np.full_like(x, coefficient))
    # the shift drops all but the low 9 bits of the integer, and uint32 wraps as the device's addition does
    return (value.view(np.uint32) + (shifted.view(np.uint32) << np.uint32(23))).view(np.float32)


def to_bfloat16(x: Array) -> Array:
    """The upper halves of fp32 numbers, rounded to nearest, ties to even, as fp32 numbers."""
    bits = x.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> np.uint64(16)) & np.uint64(1))) & np.uint64(0xFFFF0000)
    return rounded.astype(np.uint32).view(np.float32)


# --- coefficients -------------------------------------------------------------------------------------------

_F = (1 - np.cos(np.linspace(0, np.pi, 20_001)[1:])) / 2
"""Points of fits in (0, 1], denser at the ends, where a minimax error turns faster."""


def relative_error(coefficients: Sequence[float], f: Array) -> Array:
    """Relative errors of the polynomial against 2^f, in exact arithmetic (fp64)."""
    return np.asarray(np.polyval(coefficients[::-1], f) / np.exp2(f) - 1)


def minimax(degree: int, fixed: Sequence[float] = (1.0,)) -> tuple[list[float], float]:
    """Coefficients of least relative error on [0, 1] that begin with `fixed`, and that error.

    Remez's exchange with n free coefficients: solve for errors that are equal, with alternating signs, at
    n + 1 points; move the points to where the errors are largest, one for each run of one sign; repeat.
    f^k 2^-f, k >= 1, are a Chebyshev system on (0, 1], so this converges to the only best polynomial.
    """
    free = range(len(fixed), degree + 1)
    basis = np.stack([_F**k * np.exp2(-_F) for k in free], 1)
    target = -relative_error(list(fixed), _F)
    turns = (1 - np.cos(np.pi * np.arange(1, len(free) + 2) / (len(free) + 1))) / 2
    points = np.searchsorted(_F, turns).clip(max=len(_F) - 1)
    signs = (-1.0) ** np.arange(len(points))
    for _ in range(50):
        *solution, level = np.linalg.solve(np.column_stack([basis[points], signs]), target[points])
        errors = basis @ solution - target
        runs = np.split(np.arange(len(errors)), np.flatnonzero(np.diff(np.sign(errors))) + 1)
        peaks = [run[np.argmax(np.abs(errors[run]))] for run in runs]
        while len(peaks) > len(points):
            peaks.pop(0 if abs(errors[peaks[0]]) < abs(errors[peaks[-1]]) else -1)
        if len(peaks) < len(points) or np.abs(errors).max() <= abs(level) * (1 + 1e-9):
            break
        points = np.array(peaks)
    return [*fixed, *map(float, solution)], float(np.abs(errors).max())


def roundings(degree: int, fixed: tuple[float, ...] = (1.0,)) -> Iterator[tuple[float, ...]]:
    """fp32 polynomials near the best one: each coefficient in turn takes one of the fp32 numbers around its
    best value, and those of higher powers are fitted anew to make up for it."""
    if len(fixed) > degree:
        yield fixed
        return
    best = np.float32(minimax(degree, fixed)[0][len(fixed)])
    for near in (np.nextafter(best, np.float32(0)), best, np.nextafter(best, np.float32(1))):
        yield from roundings(degree, (*fixed, float(near)))


def derive(degree: int) -> tuple[float, ...]:
    """The fp32 polynomial of least error when fp32 evaluates it.

    The few of least error in exact arithmetic are compared in the device's, where roundings add to the error.
    """
    candidates = sorted(roundings(degree), key=lambda c: np.abs(relative_error(c, _F)).max())[:32]
    sample = fractions(1 << 19)
    best = sorted(candidates, key=lambda c: errors_of(exp2(sample, c), np.exp2(sample, dtype=np.float64))[0])
    exact = np.exp2(every := fractions(1 << 24), dtype=np.float64)
    return min(best[:4], key=lambda c: errors_of(exp2(every, c), exact))


def print_derivation() -> None:
    for degree in POLYNOMIALS:
        best, level = minimax(degree)
        found = derive(degree)
        print(f"degree {degree}: least error {level:.4e}, with {', '.join(f'{c:.12f}' for c in best)}")
        print(f"  in fp32 {np.abs(relative_error(found, _F)).max():.4e}, with")
        print(f"  ({', '.join(f'{c:.9g}' for c in found)})")
        print(f"  the module has {'these' if same(found, POLYNOMIALS[degree]) else 'OTHERS'}")


def same(a: Sequence[float], b: Sequence[float]) -> bool:
    return bool(np.array_equal(np.float32(a), np.float32(b)))


# --- the table ----------------------------------------------------------------------------------------------


def fractions(count: int) -> Array:
    """Multiples of 1 / count in [0, 1). Those of 2^-24 are all the fractions that an x < 0 can have."""
    return (np.arange(count) / count).astype(np.float32)


def softmax_inputs(count: int) -> Array:
    """Scores less the maximum in use, in log2 units: to 8 above it, where maxima are raised late."""
    random = np.random.default_rng(1)
    return np.concatenate([random.uniform(-24, 8, count), -random.exponential(1, count)]).astype(np.float32)


def errors_of(values: Array, exact: Array) -> tuple[float, float]:
    """Largest and mean relative error."""
    relative = np.abs(values / exact - 1)
    return float(relative.max()), float(relative.mean())


def row(x: Array, coefficients: Sequence[float] | None) -> tuple[float, float, float, float, float]:
    """Largest and mean error in fp32 and in bf16, and how many bf16 results are the correctly rounded ones.
    Without coefficients: of the exact values, correctly rounded to fp32."""
    parts = []
    for start in range(0, len(x), CHUNK):
        chunk = x[start : start + CHUNK]
        exact = np.exp2(chunk.astype(np.float64))
        nearest = exact.astype(np.float32)
        values = nearest if coefficients is None else exp2(chunk, coefficients)
        narrow = to_bfloat16(values)
        agree = float((narrow == to_bfloat16(nearest)).mean())
        parts.append((*errors_of(values, exact), *errors_of(narrow, exact), agree, len(chunk)))
    table = np.array(parts)
    means = np.average(table[:, :5], axis=0, weights=table[:, 5])
    return float(table[:, 0].max()), means[1], float(table[:, 2].max()), means[3], means[4]


def print_table() -> None:
    domains = {"[0, 1)": fractions(1 << 24), "softmax": softmax_inputs(1 << 22)}
    head = ("fp32 max", "mean", "bf16 max", "mean")
    print(f"{'':20}{'inputs':9}" + "".join(f"{name:>11}" for name in (*head, "as nearest")), end="")
    print("".join(f"{name:>11}" for name in ("| paper max", "mean", "bf16 max", "mean")))
    polynomials = {f"degree {degree}": found for degree, found in POLYNOMIALS.items()}
    for name, coefficients in {"correctly rounded": None, **polynomials}.items():
        for domain, x in domains.items():
            *measured, agree = row(x, coefficients)
            cells = "".join(f"{each:11.2e}" for each in measured) + f"{100 * agree:10.3f}%"
            print(f"{name:20}{domain:9}{cells}{_paper(name) if domain == '[0, 1)' else ''}")
    print(f"{'ex2.approx':20}{'any':9}{2.0**-22:11.2e}" + " " * 44 + _paper("ex2.approx"))
    print(NOTES)


def _paper(name: str) -> str:
    return "".join(f"{'-':>11}" if each is None else f"{each:11.2e}" for each in PAPER[name])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--derive", action="store_true", help="derive the coefficients instead")
    if parser.parse_args().derive:
        print_derivation()
    else:
        print_table()


if __name__ == "__main__":
    main()
