"""The Hopper forward kernel of codes on the simulated GPU, whose sums of 8-bit floats have 13 fraction bits:
right against the oracle over what the codes stand for."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from helpers import drawn_timing
from torch import Tensor

import fa4flex
import ptxsim
from fa4flex import Quantized, Varlen, quantize, quantized_kernels, reference
from fa4flex.kernels.fwd_8bit_sm90.plan import LOST
from fa4flex.variant import changed
from fa4flex.variants import alibi, causal, softcap

E4M3 = torch.float8_e4m3fn
ONE_LEVEL = fa4flex.Precision(qk="float8_e4m3", pv="float8_e4m3", promote=False)
EIGHT_BIT = "8bit"


@dataclass(frozen=True)
class Size:
    """Query heads, KV heads, queries, keys, widths."""

    heads: int = 2
    kv_heads: int = 1
    q_len: int = 150
    kv_len: int = 300
    d: int = 64
    dv: int = 64
    batch: int = 1


def drawn(size: Size, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Quantized:
    s = size
    q = torch.randn(s.batch, s.heads, s.q_len, s.d)
    k = torch.randn(s.batch, s.kv_heads, s.kv_len, s.d) + torch.randn(s.d)
    v = torch.randn(s.batch, s.kv_heads, s.kv_len, s.dv) + torch.randn(s.dv)
    return quantize(*(x.to(dtype) for x in (q, k, v)), **options)


@dataclass(frozen=True)
class Exact:
    """Results over what codes stand for, and how far those of a kernel may be off: by twice what PyTorch is
    off with probabilities of their dtype, and by what sums of 13 fraction bits lose for sure."""

    out: Tensor
    lse: Tensor
    most: Tensor
    usual: float
    of_lse: float

    @classmethod
    def of(cls, codes: Quantized, mod: Any = None, mask: Any = None, sinks: Tensor | None = None) -> Exact:
        stand = codes.dequantize()
        group = stand.q.shape[1] // stand.k.shape[1]
        scale = stand.q.shape[-1] ** -0.5
        shifted = mod
        if stand.bias is not None:
            bias = stand.bias.double() * scale

            def shifted(score: Any, b: Any, h: Any, i: Any, j: Any, **context: Any) -> Any:
                score = score + bias[b, h, i]
                return score if mod is None else fa4flex.as_score(mod)(score, b, h, i, j, **context)

            shifted.context = () if mod is None else fa4flex.as_score(mod).context  # type: ignore[attr-defined]
        out, lse = reference.attention(*stand[:3], shifted, mask, sinks=sinks)
        p = reference.probabilities(stand.q, stand.k, lse, shifted, mask)
        v = stand.v.double()
        if codes.v_offset is not None:
            v = v - codes.v_offset[:, :, None].double()
        v = v.repeat_interleave(group, 1)
        rounded, lost = _rounded(p, codes), 4 * LOST if codes.v_scale is not None else 0.0
        error = (rounded - p) @ v
        ulp = torch.finfo(codes.dtype).eps * out.abs()
        most = 2 * error.abs().amax((2, 3), True) + lost * (p @ v.abs()) + ulp + 1e-6
        usual = 2 * float((error.square() + ulp.square() / 4).mean().sqrt()) + 1e-6
        return cls(out, lse, most, usual, 1e-4 if codes.qk == "int8" else 1e-2)

    def check(self, out: Tensor, lse: Tensor) -> None:
        error = out.double() - self.out
        assert (error.abs() <= self.most).all(), float((error.abs() / self.most).max())
        assert float(error.square().mean().sqrt()) <= self.usual, (error.square().mean().sqrt(), self.usual)
        empty = self.lse == -torch.inf
        assert torch.equal(lse == -torch.inf, empty) and not out[empty].any()
        torch.testing.assert_close(lse.double()[~empty], self.lse[~empty], atol=self.of_lse, rtol=1e-5)


def _rounded(p: Tensor, codes: Quantized) -> Tensor:
    """Probabilities as they are multiplied: of e4m3, a row's largest is 256."""
    if codes.v_scale is None:
        return p.to(codes.dtype).double()
    largest = p.amax(-1, True).clamp(min=1e-300)
    return (p / largest * 256).to(E4M3).double() / 256 * largest


def attend(attn: fa4flex.Attention, codes: Quantized, promote: bool = True) -> tuple[Tensor, Tensor]:
    """Results from the simulated GPU, under a random timing; nothing may be found."""
    timing, seed = drawn_timing()
    variant = attn.variant if promote else changed(attn.variant, precision=ONE_LEVEL)
    with torch.no_grad(), ptxsim.device("sm_90a", seed, timing) as gpu:
        results = quantized_kernels.attend(variant, codes, ("lse",))
    assert results is not None, "no kernel takes it"
    assert not gpu.findings, f"{timing} {seed}: {gpu.report()}"
    return results[0], results[1]


FORMATS = {
    "e4m3": {"qk": "float8_e4m3"},
    "int8": {"qk": "int8"},
    "int8, 16-bit values": {"qk": "int8", "pv": "bfloat16"},
    "e4m3, 16-bit values": {"qk": "float8_e4m3", "pv": "bfloat16"},
}
MODS = {"none": None, "alibi": alibi, "soft cap": softcap(3.0)}


def check(codes: Quantized, mod: Any = None, mask: Any = None, promote: bool = True) -> None:
    attn = fa4flex.compile(score_mod=mod, mask=mask)
    Exact.of(codes, mod, mask).check(*attend(attn, codes, promote))


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
    """A sink has a part of the weights, and no value, whatever values were centred by."""
    codes, sinks = drawn(Size(q_len=90, kv_len=60), **FORMATS[form]), torch.tensor([3.0, -1.0])
    for given in (sinks, None):
        attn = fa4flex.compile(mask=causal, sinks=given)
        Exact.of(codes, None, causal, given).check(*attend(attn, codes))


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS)
def test_padded(form: str) -> None:
    """Codes past the end of a sequence take no part: those of 16-bit values may be NaN."""
    used = torch.tensor([300, 129, 1, 0], dtype=torch.int32)
    whole = drawn(Size(batch=4, q_len=40), varlen=Varlen(seqused_k=used), **FORMATS[form])
    if whole.v_scale is None:
        for b, n in enumerate(used):
            whole.v[b, :, n:] = torch.nan
    out, lse = attend(fa4flex.compile(mask=causal), whole)
    for b, n in enumerate(used.tolist()):
        stand = whole.dequantize()
        assert stand.bias is not None
        one = replace(
            whole, q=whole.q[b : b + 1], k=whole.k[b : b + 1, :, :n], v=whole.v[b : b + 1],
            q_scale=whole.q_scale[b : b + 1], k_scale=whole.k_scale[b : b + 1],
            q_bias=stand.bias[b : b + 1], varlen=None,
            v_scale=None if whole.v_scale is None else whole.v_scale[b : b + 1],
            v_offset=None if whole.v_offset is None else whole.v_offset[b : b + 1],
        )  # fmt: skip
        if whole.v_scale is None:
            one = replace(one, v=one.v[:, :, :n])
        if n:
            Exact.of(one, None, causal).check(out[b : b + 1], lse[b : b + 1])
        else:
            assert not out[b].any() and (lse[b] == -torch.inf).all()


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS)
def test_packed(form: str) -> None:
    """Tiles of scales, and of transposed values, begin with each sequence."""
    ends = torch.tensor([0, 70, 70, 271, 300], dtype=torch.int32)
    q, k, v = torch.randn(300, 4, 64), torch.randn(300, 2, 64) + 1, torch.randn(300, 2, 64) + 1
    given = [x.bfloat16() for x in (q, k, v)]
    codes = quantize(*given, varlen=Varlen(ends), **FORMATS[form])
    out, lse = attend(fa4flex.compile(mask=causal), codes)
    for a, b in itertools.pairwise(ends.tolist()):
        if a < b:
            own = quantize(*(x[a:b].transpose(0, 1)[None] for x in given), **FORMATS[form])
            mine = out[a:b].transpose(0, 1)[None], lse[:, a:b][None]
            Exact.of(own, None, causal).check(*mine)


@pytest.mark.slow
def test_layout_bshd() -> None:
    q, k, v = (torch.randn(2, n, h, 64).bfloat16() for n, h in ((70, 4), (150, 2), (150, 2)))
    heads_first = quantize(*(x.transpose(1, 2) for x in (q, k, v)))
    out, lse = attend(fa4flex.compile(mask=causal, layout="bshd"), quantize(q, k, v, layout="bshd"))
    Exact.of(heads_first, None, causal).check(out.transpose(1, 2), lse)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS)
def test_nan_is_nan(form: str) -> None:
    """A query's in its row; a key's in all rows that see its tile of scales, and in no other."""
    size = Size(q_len=200, kv_len=200)
    q, k, v = (torch.randn(1, h, 200, 64).bfloat16() for h in (2, 1, 1))
    q[0, 1, 20, 3] = torch.nan
    k[0, 0, 150, 5] = torch.nan
    codes = quantize(q, k, v, center_k=False, **FORMATS[form])
    out, _ = attend(fa4flex.compile(mask=causal), codes)
    wrong = torch.zeros(1, 2, size.q_len, dtype=torch.bool)
    wrong[0, 1, 20] = True
    wrong[:, :, 128:] = True
    assert torch.equal(out.isnan().all(-1), wrong) and torch.equal(out.isnan().any(-1), wrong)


@pytest.mark.slow
@pytest.mark.parametrize("qk", ["int8", "float8_e4m3"])
def test_rows_without_keys_are_zero_beside_nan(qk: Any) -> None:
    """Whatever their query, and a channel of values, hold."""
    q, k, v = (torch.randn(1, h, n, 64).bfloat16() for h, n in ((2, 150), (1, 60), (1, 60)))
    q[0, 1, 20, 5] = v[0, 0, 5, 3] = torch.nan
    out, lse = attend(fa4flex.compile(mask=causal), quantize(q, k, v, qk=qk))
    assert not out[:, :, :90].any() and (lse[:, :, :90] == -torch.inf).all()
    assert out[:, :, 90:, 3].isnan().all() and out[:, :, 90:].isnan().sum() == 2 * 60
    assert lse[:, :, 90:].isfinite().all()


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
