"""Sums of 8-bit products on Hopper: against rationals, element by element, and against what an H200 wrote."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from ptxsim.errors import UnsupportedError
from ptxsim.units.aligned import multiply_add
from ptxsim.units.numbers import SMALL, decode

LOWEST = {"e4m3": -6, "e5m2": -14, "f32": -126}


def some(type: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Finite numbers of a type, of all exponents; a quarter of them zeros."""
    codes = np.random.randint(0, SMALL[type].largest + 1, shape) + 128 * np.random.randint(0, 2, shape)
    codes[np.random.rand(*shape) < 0.25] = 0
    return decode(type, codes.astype(np.uint8))


def exponent(value: Fraction, type: str) -> int:
    found = math.frexp(float(value))[1] - 1
    return max(found, LOWEST[type])


def truncated(value: Fraction, quantum: Fraction) -> Fraction:
    return math.trunc(value / quantum) * quantum


def expected(a: NDArray[np.float32], b: NDArray[np.float32], c: float, types: tuple[str, str]) -> float:
    """Sum of one element by the rule: every term in units of 2^-13 of the largest, then the result."""
    terms = [(Fraction(c), exponent(Fraction(c), "f32"))] if c else []
    for x, y in ((Fraction(float(x)), Fraction(float(y))) for x, y in zip(a, b) if x and y):
        terms.append((x * y, exponent(x, types[0]) + exponent(y, types[1])))
    if not terms:
        return 0.0
    quantum = Fraction(2) ** (max(e for _, e in terms) - 13)
    total = sum((truncated(value, quantum) for value, _ in terms), Fraction(0))
    return float(truncated(total, Fraction(2) ** (exponent(total, "f32") - 13))) if total else 0.0


@pytest.mark.parametrize("types", [("e4m3", "e4m3"), ("e4m3", "e5m2"), ("e5m2", "e5m2")])
@pytest.mark.parametrize("scale", [None, 1.0, 1e4, 1e-30])
def test_every_element_follows_the_rule(types: tuple[str, str], scale: float | None) -> None:
    a, b = some(types[0], (16, 32)), some(types[1], (8, 32))
    a[0] = 0
    c = None if scale is None else (np.random.randn(16, 8) * scale).astype(np.float32)
    found = multiply_add(a, b, c, types, "f32")
    old = np.zeros((16, 8)) if c is None else c
    want = [[expected(a[m], b[n], float(old[m, n]), types) for n in range(8)] for m in range(16)]
    assert found.dtype == np.float32 and found.tolist() == want


def test_long_sums_lose_what_float32_would_keep() -> None:
    """A term no longer counts once the sum is 2^14 times as large: 32,768 ones are 16,384."""
    a = np.ones((1, 32), np.float32)
    total = np.zeros((1, 1), np.float32)
    for _ in range(1024):
        total = multiply_add(a, a, total, ("e4m3", "e4m3"), "f32")
    assert total == 2**14  # where terms are multiples of 2^(14 - 13), ones are zeros
    small = np.full((1, 32), 0.25, np.float32)
    before = np.full((1, 1), 2.0**10, np.float32)
    assert multiply_add(a, small, before, ("e4m3", "e4m3"), "f32") == 2**10 + 8
    before = np.full((1, 1), 2.0**12, np.float32)
    assert multiply_add(a, small, before, ("e4m3", "e4m3"), "f32") == before


def test_what_is_no_number_stays_none() -> None:
    a, b = some("e5m2", (4, 32)), np.abs(some("e5m2", (4, 32))) + 1
    a[1, 3], a[2, 0], a[3, :2] = np.inf, np.nan, (np.inf, -np.inf)
    plain = multiply_add(a[:1], b, None, ("e5m2", "e5m2"), "f32")
    found = multiply_add(a, b, None, ("e5m2", "e5m2"), "f32")
    assert np.array_equal(found[:1], plain) and np.all(found[1] == np.inf)
    assert (found[2:].view(np.uint32) == 0x7FFFFFFF).all()


def test_half_sums_are_rounded_once() -> None:
    a, b = np.full((1, 32), 1.125, np.float32), np.full((1, 32), 1.0, np.float32)
    c = np.array([[2048.0]], np.float16)
    assert multiply_add(a, b, c, ("e4m3", "e4m3"), "f16") == np.float16(2048 + 32)  # 1.125 is 1 beside 2^11
    with pytest.raises(UnsupportedError, match="s32"):
        multiply_add(a, b, None, ("e4m3", "e4m3"), "s32")


@pytest.mark.parametrize(
    "name",
    [
        "product_float8_e4m3fn_n8_k32_0",
        "product_float8_e4m3fn_n16_k128_2",
        "product_float8_e5m2_n8_k32_4",
        "gemm_sm90_e4m3",
        "gemm_sm90_e5m2_64b",
    ],
)
def test_an_h200_wrote_these_bits(name: str) -> None:
    pytest.importorskip("cutlass", reason="CuTe DSL exists for Linux only")
    from test_silicon import CASES, recorded, simulated

    inputs, silicon = recorded()[name]
    ours = simulated(CASES[name], inputs, 0)
    pairs = ([x.contiguous().view(torch.uint8) for x in pair] for pair in zip(silicon, ours))
    assert all(torch.equal(*pair) for pair in pairs)
