"""The Hopper forward kernel of codes on the simulated GPU, whose sums of 8-bit floats have 13 fraction bits:
right against the oracle over what the codes stand for."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from code_calls import (
    EIGHT_BIT,
    FORMATS,
    MODS,
    Exact,
    Size,
    attend,
    check,
    check_empty_rows_beside_nan,
    check_nan,
    check_packed,
    check_padded,
    check_sinks,
    drawn,
)

import fa4flex
import ptxsim
from fa4flex import quantize
from fa4flex.variants import causal


@pytest.mark.parametrize("form", FORMATS)
def test_formats(form: str) -> None:
    check(drawn(Size(), **FORMATS[form]), mask=random.choice([None, causal]))


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("mod", MODS)
def test_mods(form: str, mod: str) -> None:
    check(drawn(Size(q_len=90, kv_len=200), **FORMATS[form]), MODS[mod], random.choice([None, causal]))


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS)
def test_wider_heads(form: str) -> None:
    check(drawn(Size(d=128, dv=128, q_len=100, kv_len=200), **FORMATS[form]), mask=causal)


SIZES = {
    "d 96": Size(d=96, dv=96),
    "192 and 128": Size(d=192, dv=128, q_len=70, kv_len=140),
    "64 and 32": Size(d=64, dv=32),
    "d 160": Size(heads=1, d=160, dv=160, q_len=70, kv_len=140),
    "d 256": Size(heads=1, d=256, dv=256, q_len=70, kv_len=140),
    "groups of 4, one query": Size(heads=8, kv_heads=2, q_len=1, kv_len=200),
    "groups of 8": Size(heads=8, q_len=100, kv_len=140),
    "one key": Size(kv_len=1, q_len=3),
    "a batch": Size(batch=3, q_len=70, kv_len=129),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SIZES)
def test_sizes(name: str) -> None:
    check(drawn(SIZES[name], **random.choice(list(FORMATS.values()))), mask=random.choice([None, causal]))


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS)
def test_sinks_and_rows_without_keys(form: str) -> None:
    check_sinks(form)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS)
def test_padded(form: str) -> None:
    check_padded(form)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS)
def test_packed(form: str) -> None:
    check_packed(form)


@pytest.mark.slow
def test_layout_bshd() -> None:
    q, k, v = (torch.randn(2, n, h, 64).bfloat16() for n, h in ((70, 4), (150, 2), (150, 2)))
    heads_first = quantize(*(x.transpose(1, 2) for x in (q, k, v)))
    out, lse = attend(fa4flex.compile(mask=causal, layout="bshd"), quantize(q, k, v, layout="bshd"))
    Exact.of(heads_first, None, causal).check(out.transpose(1, 2), lse)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS)
def test_nan_is_nan(form: str) -> None:
    check_nan(form)


@pytest.mark.slow
@pytest.mark.parametrize("qk", ["int8", "float8_e4m3"])
def test_rows_without_keys_are_zero_beside_nan(qk: Any) -> None:
    check_empty_rows_beside_nan(qk)


@pytest.mark.slow
def test_one_sign_needs_two_levels_of_sums() -> None:
    """Values of one sign that are not centred: sums of 13 fraction bits lose them with the keys, sums of
    tiles do not."""
    q, k = torch.randn(1, 1, 64, 64), torch.randn(1, 1, 1024, 64)
    v = torch.randn(1, 1, 1024, 64).abs()
    codes = quantize(q, k, v, qk="float8_e4m3", center_v=False)
    exact = Exact.of(codes).out
    errors = []
    for promote in (True, False):
        out, _ = attend(fa4flex.compile(), codes, promote)
        errors.append(float((out.double() - exact).norm() / exact.norm()))
    assert errors[0] < 0.004 < errors[1] / 2, errors


@pytest.mark.slow
def test_calls_take_the_kernel() -> None:
    """attn(quantized) does, for any length with one kernel; with gradients wanted, and for formats of blocks,
    codes are dequantised."""
    attn = fa4flex.compile(mask=causal)
    several = [drawn(Size(q_len=70, kv_len=kv_len)) for kv_len in (150, 201)]
    in_blocks = drawn(Size(q_len=70, kv_len=70), qk="mxfp8")
    with torch.no_grad(), ptxsim.device("sm_90a") as gpu:
        for codes in several:
            out, lse = attn(codes, return_lse=True)
            Exact.of(codes, None, causal).check(out, lse)
    assert len({result.kernel for result in gpu.results}) == 1 and not gpu.findings
    assert all(EIGHT_BIT in result.kernel for result in gpu.results)
    with torch.no_grad(), ptxsim.device("sm_90a") as gpu:
        attn(in_blocks)
    assert not any(EIGHT_BIT in result.kernel for result in gpu.results)


def test_values_of_32_bits() -> None:
    """Values as they are given become bfloat16, and outputs are float32."""
    codes = drawn(Size(q_len=70), torch.float32, pv="bfloat16")
    with torch.no_grad(), ptxsim.device("sm_90a") as gpu:
        out, lse = fa4flex.compile()(codes, return_lse=True)
    assert out.dtype == torch.float32 and not gpu.findings
    assert all(EIGHT_BIT in result.kernel for result in gpu.results) and gpu.results
    Exact.of(replace(codes, v=codes.v.bfloat16(), dtype=torch.bfloat16)).check(out, lse)


@pytest.mark.slow
def test_one_level_of_sums() -> None:
    """Sums of few keys with 13 fraction bits are still as good as a tile's."""
    check(drawn(Size(), qk="float8_e4m3"), promote=False)
