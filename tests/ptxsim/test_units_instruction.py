"""Instruction descriptors of tcgen05.mma: known ones, every field, and what the ISA forbids."""

from __future__ import annotations

import numpy as np
import pytest

from ptxsim.errors import InputError, UnsupportedError
from ptxsim.units.instruction import Scaling, decode

F16 = 1 << 4 | 1 << 7 | 1 << 10  # D f32, A and B bf16


def shape(m: int, n: int) -> int:
    return (m >> 4) << 24 | (n >> 3) << 17


@pytest.mark.parametrize(
    ("bits", "cta_group", "m", "n", "b_major"),
    ((0x08200490, 1, 128, 128, "K"), (0x08210490, 1, 128, 128, "MN"), (0x10200490, 2, 256, 128, "K")),
)
def test_descriptors_that_kernels_use(bits: int, cta_group: int, m: int, n: int, b_major: str) -> None:
    d = decode(bits, "f16", cta_group)
    assert (d.m, d.n, d.k, d.b_major, d.a_major) == (m, n, 16, b_major, "K")
    assert (d.a_type, d.b_type, d.d_type) == ("bf16", "bf16", "f32")


def test_every_field_reaches_its_place() -> None:
    m, n = [(64, 1), (128, 1)][np.random.randint(2)], int(np.random.randint(1, 33)) * 8
    d = decode(shape(m[0], n) | F16 | 1 << 13 | 1 << 16, "f16", m[1])
    assert (d.m, d.n, d.negate_a, d.negate_b, d.a_major, d.b_major) == (m[0], n, True, False, "K", "MN")
    d = decode(shape(128, 64) | 1 << 4 | 1 << 10 | 1 << 14, "f8f6f4", 1)
    assert (d.a_type, d.b_type, d.d_type, d.k, d.negate_b) == ("e4m3", "e5m2", "f32", 32, True)
    d = decode(shape(256, 64) | 2 << 4 | 1 << 10 | 1 << 3 | 1 << 15, "i8", 2)
    assert (d.a_type, d.b_type, d.d_type, d.k, d.saturate, d.a_major) == ("u8", "s8", "s32", 32, True, "MN")
    d = decode(shape(64, 8) | 1 << 4 | 2 << 7 | 2 << 10, "tf32", 1)
    assert (d.a_type, d.k) == ("tf32", 8)
    assert decode(shape(64, 8), "f16", 1).d_type == "f16"


@pytest.mark.parametrize(
    ("bits", "kind", "cta_group", "error", "named"),
    (
        (shape(128, 128) | F16 | 4, "f16", 1, UnsupportedError, "sparse"),
        (shape(128, 128) | F16 | 1 << 30, "f16", 1, InputError, "maximum shift"),
        (shape(128, 128), "mxf4nvf4", 1, InputError, "blocks of 0"),
        (shape(128, 128), "f64", 1, UnsupportedError, "f64"),
        (shape(128, 128) | F16 | 1 << 6, "f16", 1, InputError, "reserved"),
        (shape(128, 128) | F16 | 1 << 3, "f16", 1, InputError, "saturate"),
        (shape(128, 128) | 2 << 4 | 1 << 13, "i8", 1, InputError, "negate_a"),
        (shape(128, 128) | F16 | 2 << 7, "f16", 1, InputError, "type 3"),
        (shape(96, 128) | F16, "f16", 1, InputError, "M=96"),
        (shape(256, 128) | F16, "f16", 1, InputError, "M=256"),
        (shape(64, 128) | F16, "f16", 2, InputError, "M=64"),
        (shape(128, 24) | F16, "f16", 2, InputError, "N=24"),
        (shape(128, 0) | F16, "f16", 1, InputError, "N=0"),
        (shape(128, 40) | 2 << 4, "i8", 1, InputError, "N=40"),
        (shape(128, 128) | 1 << 7, "f16", 1, InputError, "D of f16"),
        (shape(128, 128) | 1 << 4 | 3 << 7 | 1 << 15, "f8f6f4", 1, InputError, "A of e2m3 in MN-major"),
        (shape(128, 128) | 1 << 4 | 2 << 10, "f8f6f4", 1, InputError, "type 2"),
    ),
)
def test_what_is_refused(bits: int, kind: str, cta_group: int, error: type[Exception], named: str) -> None:
    with pytest.raises(error, match=named):
        decode(bits, kind, cta_group)


NVFP4 = 1 << 7 | 1 << 10
"""A and B of e2m1, scale factors of ue4m3."""


@pytest.mark.parametrize(
    ("kind", "block", "bits", "k", "scaling"),
    (
        ("mxf4nvf4", 16, NVFP4, 64, Scaling(16, "ue4m3", 0, 0)),
        ("mxf4nvf4", 32, NVFP4 | 1 << 23 | 2 << 29, 64, Scaling(32, "ue8m0", 2, 0)),
        ("mxf4", 32, NVFP4 | 1 << 23 | 2 << 4, 64, Scaling(32, "ue8m0", 0, 2)),
        ("mxf8f6f4", 32, 4 << 7 | 5 << 10 | 1 << 23 | 3 << 29 | 1 << 4, 32, Scaling(32, "ue8m0", 3, 1)),
    ),
)
def test_block_scaling(kind: str, block: int, bits: int, k: int, scaling: Scaling) -> None:
    d = decode(shape(128, 96) | bits, kind, 1, block=block)
    assert (d.m, d.n, d.k, d.d_type, d.scaling) == (128, 96, k, "f32", scaling)


@pytest.mark.parametrize(
    ("kind", "block", "bits", "error", "named"),
    (
        ("mxf4nvf4", 16, NVFP4 | 1 << 31, UnsupportedError, "K of 96"),
        ("mxf4nvf4", 32, NVFP4, InputError, "ue4m3"),
        ("mxf4nvf4", 16, NVFP4 | 1 << 29, InputError, "scale factor IDs 1 and 0"),
        ("mxf4", 32, NVFP4 | 1 << 23 | 3 << 4, InputError, "scale factor IDs 0 and 3"),
        ("mxf4", 32, NVFP4 | 1 << 23 | 1 << 3, InputError, "reserved bits 3 and 6"),
        ("mxf4", 32, NVFP4 | 1 << 23 | 1 << 15, InputError, "MN-major"),
        ("mxf4", 16, NVFP4 | 1 << 23, InputError, "blocks of 16"),
        ("mxf8f6f4", 32, 1 << 23 | 4 << 24, InputError, "M=192"),
    ),
)
def test_block_scaling_that_is_refused(
    kind: str, block: int, bits: int, error: type[Exception], named: str
) -> None:
    with pytest.raises(error, match=named):
        decode(shape(128, 96) | bits, kind, 1, block=block)


def test_weight_stationary_shapes() -> None:
    for m in (32, 64, 128):
        assert decode(shape(m, 64) | F16, "f16", 1, ws=True).ws
    for m, n in ((256, 64), (64, 96)):
        with pytest.raises(InputError, match=f"ws.*M={m}, N={n}"):
            decode(shape(m, n) | F16, "f16", 1, ws=True)
    with pytest.raises(UnsupportedError, match="maximum shift"):
        decode(shape(64, 64) | F16 | 2 << 30, "f16", 1, ws=True)
