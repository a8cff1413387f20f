"""The Hopper forward kernel of codes on the simulated GPU, whose sums of 8-bit floats have 13 fraction bits:
right against the oracle over what the codes stand for."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import fa4flex
import ptxsim
from fa4flex import Quantized, quantize, quantized_kernels, reference
from fa4flex.kernels.fwd_8bit_sm90.plan import LOST
from fa4flex.variants import alibi, causal, softcap

E4M3 = torch.float8_e4m3fn


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
    timing, seed = random.choice([("eager", 0), ("late", 1), ("random", random.randrange(99))])
    with torch.no_grad(), ptxsim.device("sm_90a", seed, timing) as gpu:
        results = quantized_kernels.attend(attn.variant, codes, ("lse",), promote)
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


@pytest.mark.slow
def test_one_level_of_sums() -> None:
    """Of few keys, sums of 13 fraction bits are still as good as a tile's."""
    check(drawn(Size(), qk="float8_e4m3"), promote=False)
