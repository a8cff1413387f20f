"""Multiply-accumulate against exact sums, element by element."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from ptxsim.errors import UnsupportedError
from ptxsim.units.matmul import accumulate, multiply_add
from ptxsim.units.numbers import decode, encode


def bf16(*shape: int) -> np.ndarray:
    return decode("bf16", encode("bf16", np.random.randn(*shape).astype(np.float32)))


def exact(a: np.ndarray, b: np.ndarray, c: np.ndarray, m: int, n: int) -> tuple[Fraction, Fraction]:
    """The sum, and the sum of the magnitudes, in rationals."""
    terms = [Fraction(float(x)) * Fraction(float(y)) for x, y in zip(a[m], b[n])] + [Fraction(float(c[m, n]))]
    return sum(terms, Fraction(0)), sum(map(abs, terms), Fraction(0))


def test_f32_keeps_the_documented_bound() -> None:
    a, b, c = bf16(8, 16), bf16(12, 16), np.random.randn(8, 12).astype(np.float32)
    for halvings in (0, 3):
        d = multiply_add(a, b, c.copy(), "f32", halvings=halvings)
        for m in range(8):
            for n in range(12):
                value, magnitude = exact(a, b, c / 2**halvings, m, n)
                assert abs(Fraction(float(d[m, n])) - value) <= 17 * Fraction(2) ** -23 * magnitude
    fresh = multiply_add(a, b, None, "f32")
    assert fresh.dtype == np.float32 and np.array_equal(fresh, multiply_add(a, b, np.zeros_like(c), "f32"))


def test_accumulating_in_place_is_the_same() -> None:
    a, b = bf16(8, 16), bf16(12, 16)
    cells = np.random.randn(8, 40).astype(np.float32)
    for keep, halvings in ((True, 0), (True, 3), (False, 0)):
        d, old = cells[:, 5:17], cells.copy()
        accumulate(d, a, b, keep, halvings)
        expected = multiply_add(a, b, old[:, 5:17] if keep else None, "f32", halvings=halvings)
        assert np.allclose(d, expected, rtol=0, atol=1e-5)
        assert np.array_equal(np.delete(cells, np.s_[5:17], 1), np.delete(old, np.s_[5:17], 1))


def test_f16_is_rounded_once() -> None:
    a, b = (np.random.randint(-40, 41, shape).astype(np.float32) for shape in ((8, 16), (8, 16)))
    c = np.random.randint(-900, 900, (8, 8)).astype(np.float16)
    d = multiply_add(a, b, c, "f16")
    expected = [[np.float16(float(exact(a, b, c, m, n)[0])) for n in range(8)] for m in range(8)]
    assert d.dtype == np.float16 and np.array_equal(d, expected)


def test_integers_are_exact_wrap_and_saturate() -> None:
    a, b = np.random.randint(0, 256, (8, 32)), np.random.randint(-128, 128, (16, 32))
    c = np.random.randint(-(2**31), 2**31, (8, 16)).astype(np.int32)
    c[:4] = 2**31 - 1 - np.random.randint(0, 1000, (4, 16))
    total = a @ b.T + c.astype(object)
    floats = a.astype(np.float32), b.astype(np.float32)
    wrapped = (total + 2**31) % 2**32 - 2**31
    assert np.array_equal(multiply_add(*floats, c, "s32"), wrapped.astype(np.int64))
    clamped = np.clip(total.astype(np.int64), -(2**31), 2**31 - 1)
    assert np.array_equal(multiply_add(*floats, c, "s32", saturate=True), clamped)
    assert np.array_equal(multiply_add(*floats, None, "s32"), a @ b.T)


def test_what_is_not_modelled() -> None:
    a = np.zeros((8, 512), np.float32)
    with pytest.raises(UnsupportedError, match="bf16"):
        multiply_add(a, a, None, "bf16")
    with pytest.raises(UnsupportedError, match="depth 512"):
        multiply_add(a, a, None, "s32")
