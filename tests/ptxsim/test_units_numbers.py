"""Number formats against their definition, code by code, and rounding against a search for the nearest
number."""

from __future__ import annotations

from fractions import Fraction
from functools import cache

import numpy as np
import pytest
import torch

from ptxsim.errors import UnsupportedError
from ptxsim.units.numbers import SMALL, decode, encode, raw_dtype

SHAPES = {
    "f16": (5, 10),
    "bf16": (8, 7),
    "e4m3": (4, 3),
    "e5m2": (5, 2),
    "e2m3": (2, 3),
    "e3m2": (3, 2),
    "e2m1": (2, 1),
}
"""Exponent and mantissa bits."""
IEEE = ("f16", "bf16", "e5m2")


def meaning(type: str, code: int) -> Fraction | str:
    """Value of a code, from the definition of the format."""
    exponent_bits, mantissa_bits = SHAPES[type]
    fraction, exponent = code % (1 << mantissa_bits), (code >> mantissa_bits) % (1 << exponent_bits)
    sign = -1 if (code >> (mantissa_bits + exponent_bits)) & 1 else 1
    if type in IEEE and exponent == (1 << exponent_bits) - 1:
        return "nan" if fraction else ("inf" if sign > 0 else "-inf")
    if type == "e4m3" and code & 0x7F == 0x7F:
        return "nan"
    bias = (1 << (exponent_bits - 1)) - 1
    significand = Fraction(fraction, 1 << mantissa_bits) + (exponent > 0)
    return sign * significand * Fraction(2) ** (max(exponent, 1) - bias)


def same(value: np.float32, meant: Fraction | str) -> bool:
    if isinstance(meant, str):
        return bool(np.isnan(value)) if meant == "nan" else float(value) == float(meant)
    return bool(np.isfinite(value)) and Fraction(float(value)) == meant


@pytest.mark.parametrize("type", SHAPES)
def test_decode_is_exact(type: str) -> None:
    size = sum(SHAPES[type]) + 1
    codes = np.arange(1 << size) if size <= 8 else np.random.randint(0, 1 << 16, 2000)
    values = decode(type, codes.astype(raw_dtype(type)))
    assert all(same(value, meaning(type, int(code))) for value, code in zip(values, codes))


@pytest.mark.parametrize("type", SHAPES)
def test_encode_gives_back_every_number(type: str) -> None:
    codes = np.arange(1 << (sum(SHAPES[type]) + 1)).astype(raw_dtype(type))
    values = decode(type, codes)
    numbers = ~np.isnan(values)
    if type in SMALL and type not in IEEE:
        assert numbers.sum() == len(codes) - (2 if type == "e4m3" else 0)
    assert np.array_equal(encode(type, values)[numbers], codes[numbers])


@cache
def positive(type: str) -> list[Fraction]:
    """The finite numbers from 0 up, by code."""
    meanings = (meaning(type, code) for code in range(1 << sum(SHAPES[type])))
    return [number for number in meanings if not isinstance(number, str)]


def nearest(type: str, value: float, saturate: bool) -> int:
    """The code nearest to a finite value by search, ties to even, with the format's overflow rule."""
    exponent_bits, mantissa_bits = SHAPES[type]
    sign = 1 << (exponent_bits + mantissa_bits)
    numbers, magnitude = positive(type), abs(Fraction(value))
    top = len(numbers) - 1
    best = min(range(top + 1), key=lambda code: (abs(numbers[code] - magnitude), code & 1))
    last_step, beyond = numbers[top] - numbers[top - 1], magnitude - numbers[top]
    over = beyond > last_step / 2 or (beyond == last_step / 2 and top & 1)
    if over and not saturate and type in ("e4m3", "e5m2"):
        best = {"e4m3": 0x7F, "e5m2": 0x7C}[type]
    return best | (sign if np.signbit(value) else 0)


@pytest.mark.parametrize("saturate", (False, True))
@pytest.mark.parametrize("type", SMALL)
def test_encode_rounds_to_nearest_even(type: str, saturate: bool) -> None:
    numbers = np.unique(np.abs(decode(type, np.arange(256).astype(np.uint8))))
    numbers = numbers[np.isfinite(numbers)]
    halves = (numbers[1:] + numbers[:-1]) / 2
    top = numbers[-1]
    candidates = np.concatenate(
        [halves, [top * 1.01, top * 1.0357142857, top + (top - numbers[-2]) / 2, top * 4, 1e-30, 0.0]]
    )
    candidates = np.concatenate(
        [candidates, np.nextafter(candidates, np.float32(np.inf)), np.nextafter(candidates, 0)]
    )
    values = np.concatenate([candidates, -candidates, top * np.random.randn(50)]).astype(np.float32)
    codes = encode(type, values, saturate)
    assert [int(code) for code in codes] == [nearest(type, float(v), saturate) for v in values]


def test_encode_of_16_bits_agrees_with_torch() -> None:
    bits = np.random.randint(0, 1 << 32, 20_000, dtype=np.uint64).astype(np.uint32)
    ties = (np.random.randint(0, 1 << 16, 2000).astype(np.uint32) << 16) | np.uint32(0x8000)
    values = np.concatenate([bits, ties]).view(np.float32)
    values = values[~np.isnan(values)]
    for type, dtype in (("bf16", torch.bfloat16), ("f16", torch.float16)):
        expected = torch.from_numpy(values).to(dtype).view(torch.int16).numpy().view(np.uint16)
        assert np.array_equal(encode(type, values), expected)


def test_what_is_not_finite() -> None:
    values = np.array([np.nan, -np.nan, np.inf, -np.inf], np.float32)
    expected = {
        ("bf16", False): [0x7FFF, 0x7FFF, 0x7F80, 0xFF80],
        ("bf16", True): [0x7FFF, 0x7FFF, 0x7F7F, 0xFF7F],
        ("f16", False): [0x7FFF, 0x7FFF, 0x7C00, 0xFC00],
        ("f16", True): [0x7FFF, 0x7FFF, 0x7BFF, 0xFBFF],
        ("e4m3", False): [0x7F, 0x7F, 0x7F, 0xFF],
        ("e4m3", True): [0x7F, 0x7F, 0x7E, 0xFE],
        ("e5m2", False): [0x7F, 0x7F, 0x7C, 0xFC],
        ("e5m2", True): [0x7F, 0x7F, 0x7B, 0xFB],
        ("e2m1", False): [0x07, 0x07, 0x07, 0x0F],
        ("e3m2", True): [0x1F, 0x1F, 0x1F, 0x3F],
    }
    for (type, saturate), codes in expected.items():
        assert list(encode(type, values, saturate)) == codes, (type, saturate)


def test_tf32_drops_thirteen_bits_and_integers_are_read_with_their_sign() -> None:
    raw = np.array([0x3F801FFF, 0xC0490FDB], np.uint32)
    assert list(decode("tf32", raw).view(np.uint32)) == [0x3F800000, 0xC0490000]
    assert list(decode("s8", np.array([0xFF, 0x7F], np.uint8))) == [-1, 127]
    assert list(decode("u8", np.array([0xFF, 0x7F], np.uint8))) == [255, 127]


def test_an_unknown_type_is_refused() -> None:
    for call in (
        lambda: decode("ue5m3", np.zeros(1, np.uint8)),
        lambda: encode("ue8m0", np.zeros(1, np.float32)),
    ):
        with pytest.raises(UnsupportedError):
            call()


def test_scale_factors() -> None:
    codes = np.arange(256).astype(np.uint8)
    powers = decode("ue8m0", codes)
    assert all(float(powers[code]) == 2.0 ** (code - 127) for code in range(255)) and np.isnan(powers[255])
    unsigned = decode("ue4m3", codes)
    assert np.array_equal(unsigned[:128], decode("e4m3", codes[:128]), equal_nan=True)
    assert np.array_equal(unsigned[128:], unsigned[:128], equal_nan=True), "there is no sign"
