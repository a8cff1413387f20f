"""The Blackwell forward kernel of codes on the simulated GPU: right against the oracle over what the codes
stand for, from the codes that Hopper's kernel reads."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from blackwell import TIMINGS, planned
from code_calls import (
    BLACKWELL,
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
from fa4flex import quantize, quantized_kernels
from fa4flex.variants import causal


def a_form() -> dict[str, Any]:
    return random.choice(list(FORMATS.values()))


@pytest.mark.parametrize("form", FORMATS)
def test_formats(form: str) -> None:
    check(drawn(Size(), **FORMATS[form]), mask=random.choice([None, causal]), chip=BLACKWELL)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("mod", MODS)
def test_mods(form: str, mod: str) -> None:
    codes = drawn(Size(q_len=90, kv_len=200), **FORMATS[form])
    check(codes, MODS[mod], random.choice([None, causal]), chip=BLACKWELL)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("masked", [False, True], ids=["pair", "alone"])
def test_heads_of_128(form: str, masked: bool) -> None:
    """A pair of CTAs, or one; and several tiles of queries for each."""
    size, workers = Size(d=128, dv=128, q_len=300, kv_len=300), random.choice([2, 148])
    with planned(workers):
        check(drawn(size, **FORMATS[form]), mask=causal if masked else None, chip=BLACKWELL)


SIZES = {
    "d 96": Size(d=96, dv=96),
    "192 and 128": Size(d=192, dv=128, q_len=70, kv_len=140),
    "64 and 32": Size(d=64, dv=32),
    "groups of 4, one query": Size(heads=8, kv_heads=2, q_len=1, kv_len=200),
    "groups of 8": Size(heads=8, q_len=100, kv_len=140),
    "one key": Size(kv_len=1, q_len=3),
    "a batch": Size(batch=3, q_len=70, kv_len=129),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SIZES)
def test_sizes(name: str) -> None:
    check(drawn(SIZES[name], **a_form()), mask=random.choice([None, causal]), chip=BLACKWELL)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS)
def test_sinks_and_rows_without_keys(form: str) -> None:
    check_sinks(form, BLACKWELL)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS)
def test_padded(form: str) -> None:
    check_padded(form, BLACKWELL)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS)
def test_packed(form: str) -> None:
    check_packed(form, BLACKWELL)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS)
def test_nan_is_nan(form: str) -> None:
    check_nan(form, BLACKWELL)


@pytest.mark.slow
@pytest.mark.parametrize("qk", ["int8", "float8_e4m3"])
def test_rows_without_keys_are_zero_beside_nan(qk: Any) -> None:
    check_empty_rows_beside_nan(qk, BLACKWELL)


@pytest.mark.slow
@pytest.mark.parametrize("masked", [False, True], ids=["full", "causal"])
def test_bits_depend_on_no_timing(masked: bool) -> None:
    """Two tiles of queries of several heads by one block, or one pair: nothing is found under any timing, and
    results are the same to the last bit."""
    codes = drawn(Size(heads=2, q_len=260, kv_len=400, d=128, dv=128), **a_form())
    attn, found = fa4flex.compile(mask=causal if masked else None), []
    for timing, seed in TIMINGS:
        with torch.no_grad(), planned(2), ptxsim.device("sm_100a", seed, timing) as gpu:
            results = quantized_kernels.attend(attn.variant, codes, ("lse",))
        assert results is not None and not gpu.findings, f"{timing} {seed}: {gpu.report()}"
        found.append(results)
    Exact.of(codes, None, causal if masked else None, chip=BLACKWELL).check(*found[0][:2])
    for out, lse, *_ in found[1:]:
        assert torch.equal(out, found[0][0]) and torch.equal(lse, found[0][1])


@pytest.mark.slow
@pytest.mark.parametrize("form", ["int8", "e4m3"])
def test_maxima_that_rise(form: str) -> None:
    """Scores that grow with the keys, by less or more than what maxima in use may lag behind: probabilities
    stay below what e4m3 holds."""
    growth = random.choice([0.02, 0.05, 0.3])
    codes = drawn(Size(q_len=70, kv_len=400), **FORMATS[form])

    def rising(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + growth * kv_idx

    check(codes, rising, chip=BLACKWELL)


@pytest.mark.slow
def test_calls_take_the_kernel() -> None:
    """attn(quantized) does, for any length with one kernel; formats of blocks are dequantised."""
    attn = fa4flex.compile(mask=causal)
    several = [drawn(Size(q_len=70, kv_len=kv_len)) for kv_len in (150, 201)]
    with torch.no_grad(), ptxsim.device("sm_100a") as gpu:
        for codes in several:
            out, lse = attn(codes, return_lse=True)
            Exact.of(codes, None, causal, chip=BLACKWELL).check(out, lse)
    assert len({result.kernel for result in gpu.results}) == 1 and not gpu.findings
    assert all(EIGHT_BIT in result.kernel for result in gpu.results)


@pytest.mark.slow
@pytest.mark.parametrize("why", ["blocks", "wide heads"])
def test_others_are_dequantised(why: str) -> None:
    """Kernels of 16 bits compute them, with the same meaning."""
    given: dict[str, Any] = {"blocks": {"qk": "mxfp8"}}.get(why, {})
    d = 160 if why == "wide heads" else 64
    codes = drawn(Size(heads=1, q_len=70, kv_len=70, d=d, dv=d), **given)
    with torch.no_grad(), ptxsim.device("sm_100a") as gpu:
        out = fa4flex.compile()(codes)
    assert not any(EIGHT_BIT in result.kernel for result in gpu.results)
    stand = codes.dequantize()
    scores = stand.q.double() @ stand.k.double().transpose(2, 3) * d**-0.5
    exact = scores.softmax(-1) @ stand.v.double()
    assert float((out.double() - exact).norm() / exact.norm()) < 0.01


def test_layout_bshd() -> None:
    q, k, v = (torch.randn(2, n, h, 64).bfloat16() for n, h in ((70, 4), (150, 2), (150, 2)))
    heads_first = quantize(*(x.transpose(1, 2) for x in (q, k, v)))
    attn = fa4flex.compile(mask=causal, layout="bshd")
    out, lse = attend(attn, quantize(q, k, v, layout="bshd"), chip=BLACKWELL)
    Exact.of(heads_first, None, causal, chip=BLACKWELL).check(out.transpose(1, 2), lse)
