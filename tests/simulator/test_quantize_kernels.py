"""quantize() by kernels on simulated GPUs: codes and scales by their definition in float64, and bit for bit
those of PyTorch operations where no sum is rounded."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from paged_pools import guarded
from quantize_cases import Draw, How, by_operations, check, normal, same, whole_numbers
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import fa4flex
import ptxsim
from fa4flex import Quantized, quantize
from ptxsim.doors.device import Gpu

ARCHS, TIMINGS = ("sm_90a", "sm_100a"), ("eager", "late", "random")


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Memory that nobody writes is NaN."""
    empty = torch.empty

    def filled(*size: Any, **options: Any) -> Tensor:
        made = empty(*size, **options)
        if made.numel() and made.is_contiguous():
            made.view(torch.uint8).fill_(0xFF)
        return made

    monkeypatch.setattr("fa4flex.runtime.cuda.quantize.torch.empty", filled)
    yield


def rounded(how: How, qkv: Draw, arch: str = "", timing: str = "") -> tuple[Quantized, Gpu]:
    """Codes by kernels; nothing may be found."""
    arch, timing = arch or random.choice(ARCHS), timing or random.choice(TIMINGS)
    held = [guarded(x) if how.memory == "whole" else x for x in qkv]
    with ptxsim.device(arch, random.randrange(99), timing) as gpu:
        found = quantize(*held, **how.options)
    assert gpu.results, "no kernel takes it"
    assert not gpu.findings, f"{timing} {arch}: {gpu.report()}"
    return found, gpu


HOWS = {
    "int8": How(),
    "e4m3": How(qk="float8_e4m3", dv=32, heads=(2, 2, 1)),
    "heads last": How(layout="bshd", memory="fused", dtype=torch.float16),
    "d 96": How(batch=1, heads=(2, 1, 1), d=96, dv=48, kv_len=140),
    "d 128": How(batch=1, heads=(2, 1, 1), d=128, dv=128, kv_len=140),
    "192 and 128": How(batch=1, heads=(1, 1, 1), d=192, dv=128, kv_len=70, q_len=5),
    "d 256": How(batch=1, heads=(1, 1, 1), d=256, dv=256, kv_len=150, q_len=5),
    "wide values": How(batch=1, heads=(1, 1, 1), d=32, dv=240, kv_len=40, q_len=5),
    "values as they are": How(pv="bfloat16", memory="odd"),
    "several chunks": How(batch=1, heads=(1, 1, 1), d=32, dv=16, kv_len=1500, q_len=1),
    "nothing centred": How(center_k=False, center_v=False),
    "values alone centred": How(center_k=False, rotate=False),
}


@pytest.mark.parametrize("name", HOWS)
def test_codes(name: str) -> None:
    qkv = normal(HOWS[name])
    check(HOWS[name], qkv, rounded(HOWS[name], qkv)[0])


@pytest.mark.parametrize("timing", TIMINGS)
@pytest.mark.parametrize("arch", ARCHS)
def test_timings(arch: str, timing: str) -> None:
    how = How(batch=1, heads=(2, 1, 1), q_len=20, kv_len=140)
    qkv = normal(how)
    check(how, qkv, rounded(how, qkv, arch, timing)[0])


@pytest.mark.slow
@pytest.mark.parametrize("n", range(12))
def test_any(n: int) -> None:
    how = How.drawn()
    qkv = normal(how)
    check(how, qkv, rounded(how, qkv)[0])


def test_many_tokens_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of several tiles, as of sequences beyond 16384 keys."""
    monkeypatch.setattr("fa4flex.runtime.cuda.quantize.CHUNKS", 2)
    how = How(batch=1, heads=(1, 1, 1), d=32, dv=16, kv_len=1100, q_len=1)
    qkv = normal(how)
    check(how, qkv, rounded(how, qkv)[0])


# --- bit for bit --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("qk", ["int8", "float8_e4m3"])
def test_exact_sums_make_the_same_bits(qk: str) -> None:
    """Means of 256 whole numbers, and matrices of 64 or 16 channels: no sum is rounded, so all quotients and
    their roundings are those of PyTorch operations. Only sums of codes of values may be rounded."""
    how = How(kv_len=256, qk=qk, d=random.choice([64, 192]), dv=random.choice([16, 64]))
    qkv = whole_numbers(how)
    found = rounded(how, qkv)[0]
    expected = by_operations(how, qkv)
    same(found, expected, but=("v_offset",))
    assert found.v_offset is not None and expected.v_offset is not None
    torch.testing.assert_close(found.v_offset, expected.v_offset, atol=1e-5, rtol=1e-5)


SIZES = (1e-38, 2e-30, 1e-6, 1.0, 1e6, 1e30, 3e38)


@pytest.mark.parametrize("qk", ["int8", "float8_e4m3"])
def test_nothing_summed_makes_the_same_bits(qk: str) -> None:
    """Numbers of any size, each row of another one, and ties: quotients are rounded as a division's are."""
    how = How(rotate=False, center_k=False, center_v=False, qk=qk)
    qkv = normal(how)
    for x in qkv[:2]:
        sizes = torch.tensor(SIZES)[torch.randint(len(SIZES), (*x.shape[:-1], 1))]
        x.copy_((x.float() / x.float().abs().amax() * sizes).to(x.dtype))
        x[:, :, ::7] = (torch.randint(-254, 255, x[:, :, ::7].shape) / 2).to(x.dtype)
        x[:, :, ::7, 0] = 127.0
    qkv[2][..., 1] *= 1e-30
    qkv[2][..., 2] *= 1e30
    qkv[2][..., 3] = -0.0
    qkv[0][:, :, ::5, 1] = -0.0
    same(rounded(how, qkv)[0], by_operations(how, qkv))


@pytest.mark.parametrize("centred", [False, True])
def test_odd_contents(centred: bool) -> None:
    """Zeros, NaN and infinities, by which scales are NaN or infinite, and numbers so small that no scale is
    left. Where a scale is infinite, and codes stand for NaN, zeros have no sign."""
    how = How(rotate=False, center_k=centred, center_v=centred, kv_len=256)
    q, k, v = whole_numbers(how)
    q[0, 0, 3] = 0.0
    q[0, 0, 4] = -0.0
    q[0, 1, 4, 5], q[0, 1, 5, 6], q[0, 1, 6, 7] = math.nan, math.inf, -math.inf
    q[1, 0, 7] = 0.0
    q[1, 0, 7, 3] = 1e-40
    q[1, 0, 8] = 1e-39
    k[0, 0, 130, 7], k[1, 0, 9, 2], k[1, 1, 9, 2] = math.nan, math.inf, -math.inf
    k[0, 1, :128] = 0.0
    v[0, 0, :, 3] = 0.0
    v[0, 0, :, 4] = -0.0
    v[0, 0, 9, 5], v[0, 1, 9, 6], v[1, 1, 9, 7] = math.nan, math.inf, -math.inf
    v[1, 0, 1, 8], v[1, 0, 2, 8] = math.inf, -math.inf
    qkv = (q, k, v)
    for qk in ("int8", "float8_e4m3"):
        each = replace(how, qk=qk)
        found, expected = rounded(each, qkv)[0], by_operations(each, qkv)
        same(found, expected, but=("v_offset",), signs=False)
        if centred:
            torch.testing.assert_close(
                found.v_offset, expected.v_offset, atol=1e-5, rtol=1e-5, equal_nan=True
            )


def test_large_numbers_are_rotated() -> None:
    """Sums near the largest float32 are of numbers that have been divided before."""
    how = How(center_k=False, pv="bfloat16", q_len=40, kv_len=40)
    q, k, v = whole_numbers(how)
    q *= 2.0**123
    check(how, (q, k, v), rounded(how, (q, k, v))[0])


def test_the_same_bits_at_each_run() -> None:
    how = How(kv_len=1100, batch=1, heads=(1, 1, 1), d=32, dv=16)
    qkv = normal(how)
    same(rounded(how, qkv)[0], rounded(how, qkv)[0])


# --- calls --------------------------------------------------------------------------------------------------


def test_launches_and_kernels() -> None:
    """Four launches; other lengths and heads are the same kernels; without sums and values it is one."""
    names = set()
    for heads, length in (((2, 1, 1), 40), ((3, 3, 1), 150)):
        how = How(batch=1, heads=heads, q_len=20, kv_len=length)
        _, gpu = rounded(how, normal(how), "sm_90a")
        names.add(tuple(result.kernel for result in gpu.results))
    assert len(names) == 1 and len(gpu.results) == 4
    how = How(batch=1, pv="bfloat16", center_k=False, q_len=20, kv_len=40)
    assert len(rounded(how, normal(how))[1].results) == 1


def by_no_kernel(how: How, qkv: Any, **options: Any) -> Quantized:
    with ptxsim.device("sm_90a") as gpu:
        found = quantize(*qkv, **{**how.options, **options})
    assert not gpu.results
    return found


def test_what_operations_compute() -> None:
    """Gradients, float32, ragged batches, block scales, wide heads, values 8 n wide, modes, and nothing."""
    how = How(batch=2, heads=(1, 1, 1), q_len=20, kv_len=40)
    qkv = normal(how)
    learned = by_no_kernel(how, [qkv[0].requires_grad_(), *qkv[1:]])
    assert learned.given is not None
    with torch.no_grad():
        assert rounded(replace(how, memory=""), qkv)[0].given is None
    qkv[0].requires_grad_(False)
    by_no_kernel(how, [x.float() for x in qkv])
    by_no_kernel(how, qkv, qk="mxfp8")
    by_no_kernel(how, qkv, varlen=fa4flex.Varlen(seqused_k=torch.tensor([40, 7], dtype=torch.int32)))
    wide = replace(how, d=288)
    by_no_kernel(wide, normal(wide))
    by_no_kernel(how, [qkv[0], *(x[:, :, :0] for x in qkv[1:])])
    with FlopCounterMode(display=False):  # a mode sees operations
        by_no_kernel(how, qkv)
    narrow = replace(how, dv=24)
    by_no_kernel(narrow, normal(narrow))
