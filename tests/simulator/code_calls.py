"""Calls of quantised queries, keys and values on a simulated GPU, beside the oracle over what the codes stand
for."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

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
class Chip:
    """arch; what a tile's sums of P v lose for sure; what a row's largest probability may be before it is
    rounded: a power of 2 is exact."""

    arch: str
    lost: float
    largest: tuple[float, ...]


HOPPER = Chip("sm_90a", 4 * LOST, (256.0,))
BLACKWELL = Chip("sm_100a", 0.0, (16.0, 19.0, 23.0, 27.0))  # the maximum in use may lag behind


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
    off with probabilities of their dtype, and by what sums of the chip's fraction bits lose for sure."""

    out: Tensor
    lse: Tensor
    most: Tensor
    usual: float
    of_lse: float

    @classmethod
    def of(
        cls,
        codes: Quantized,
        mod: Any = None,
        mask: Any = None,
        sinks: Tensor | None = None,
        chip: Chip = HOPPER,
    ) -> Exact:
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
        lost = chip.lost if codes.v_scale is not None else 0.0
        errors = torch.stack([(_rounded(p, codes, largest) - p) @ v for largest in chip.largest])
        ulp = torch.finfo(codes.dtype).eps * out.abs()
        most = 2 * errors.abs().amax(0).amax((2, 3), True) + lost * (p @ v.abs()) + ulp + 1e-6
        usual = 2 * float((errors.square() + ulp.square() / 4).flatten(1).mean(1).max().sqrt()) + 1e-6
        of_lse = 1e-4 if codes.qk == "int8" or not chip.lost else 1e-2
        return cls(out, lse, most, usual, of_lse)

    def check(self, out: Tensor, lse: Tensor) -> None:
        error = out.double() - self.out
        assert (error.abs() <= self.most).all(), float((error.abs() / self.most).max())
        assert float(error.square().mean().sqrt()) <= self.usual, (error.square().mean().sqrt(), self.usual)
        empty = self.lse == -torch.inf
        assert torch.equal(lse == -torch.inf, empty) and not out[empty].any()
        torch.testing.assert_close(lse.double()[~empty], self.lse[~empty], atol=self.of_lse, rtol=1e-5)


def _rounded(p: Tensor, codes: Quantized, largest: float) -> Tensor:
    """Probabilities as they are multiplied: of e4m3, where a row's largest one is this."""
    if codes.v_scale is None:
        return p.to(codes.dtype).double()
    own = p.amax(-1, True).clamp(min=1e-300)
    return (p / own * largest).to(E4M3).double() / largest * own


def attend(
    attn: fa4flex.Attention, codes: Quantized, promote: bool = True, chip: Chip = HOPPER
) -> tuple[Tensor, Tensor]:
    """Results from the simulated GPU, under a random timing; nothing may be found."""
    timing, seed = drawn_timing()
    variant = attn.variant if promote else changed(attn.variant, precision=ONE_LEVEL)
    with torch.no_grad(), ptxsim.device(chip.arch, seed, timing) as gpu:
        results = quantized_kernels.attend(variant, codes, ("lse",))
    assert results is not None, "no kernel takes it"
    assert not gpu.findings, f"{timing} {seed}: {gpu.report()}"
    assert any(EIGHT_BIT in result.kernel for result in gpu.results)
    return results[0], results[1]


FORMATS = {
    "e4m3": {"qk": "float8_e4m3"},
    "int8": {"qk": "int8"},
    "int8, 16-bit values": {"qk": "int8", "pv": "bfloat16"},
    "e4m3, 16-bit values": {"qk": "float8_e4m3", "pv": "bfloat16"},
}
MODS = {"none": None, "alibi": alibi, "soft cap": softcap(3.0)}


def check(
    codes: Quantized, mod: Any = None, mask: Any = None, promote: bool = True, chip: Chip = HOPPER
) -> None:
    attn = fa4flex.compile(score_mod=mod, mask=mask)
    Exact.of(codes, mod, mask, chip=chip).check(*attend(attn, codes, promote, chip))


def check_sinks(form: str, chip: Chip = HOPPER) -> None:
    """A sink has a part of the weights, and no value, whatever values were centred by."""
    codes, sinks = drawn(Size(q_len=90, kv_len=60), **FORMATS[form]), torch.tensor([3.0, -1.0])
    for given in (sinks, None):
        attn = fa4flex.compile(mask=causal, sinks=given)
        Exact.of(codes, None, causal, given, chip).check(*attend(attn, codes, chip=chip))


def check_padded(form: str, chip: Chip = HOPPER) -> None:
    """Codes past the end of a sequence take no part: those of 16-bit values may be NaN."""
    used = torch.tensor([300, 129, 1, 0], dtype=torch.int32)
    whole = drawn(Size(batch=4, q_len=40), varlen=Varlen(seqused_k=used), **FORMATS[form])
    if whole.v_scale is None:
        for b, n in enumerate(used):
            whole.v[b, :, n:] = torch.nan
    out, lse = attend(fa4flex.compile(mask=causal), whole, chip=chip)
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
            Exact.of(one, None, causal, chip=chip).check(out[b : b + 1], lse[b : b + 1])
        else:
            assert not out[b].any() and (lse[b] == -torch.inf).all()


def check_packed(form: str, chip: Chip = HOPPER) -> None:
    """Tiles of scales, and of transposed values, begin with each sequence."""
    ends = torch.tensor([0, 70, 70, 271, 300], dtype=torch.int32)
    q, k, v = torch.randn(300, 4, 64), torch.randn(300, 2, 64) + 1, torch.randn(300, 2, 64) + 1
    given = [x.bfloat16() for x in (q, k, v)]
    codes = quantize(*given, varlen=Varlen(ends), **FORMATS[form])
    out, lse = attend(fa4flex.compile(mask=causal), codes, chip=chip)
    for a, b in itertools.pairwise(ends.tolist()):
        if a < b:
            own = quantize(*(x[a:b].transpose(0, 1)[None] for x in given), **FORMATS[form])
            mine = out[a:b].transpose(0, 1)[None], lse[:, a:b][None]
            Exact.of(own, None, causal, chip=chip).check(*mine)


def check_nan(form: str, chip: Chip = HOPPER) -> None:
    """A query's in its row; a key's in all rows that see its tile of scales, and in no other."""
    size = Size(q_len=200, kv_len=200)
    q, k, v = (torch.randn(1, h, 200, 64).bfloat16() for h in (2, 1, 1))
    q[0, 1, 20, 3] = torch.nan
    k[0, 0, 150, 5] = torch.nan
    codes = quantize(q, k, v, center_k=False, **FORMATS[form])
    out, _ = attend(fa4flex.compile(mask=causal), codes, chip=chip)
    wrong = torch.zeros(1, 2, size.q_len, dtype=torch.bool)
    wrong[0, 1, 20] = True
    wrong[:, :, 128:] = True
    assert torch.equal(out.isnan().all(-1), wrong) and torch.equal(out.isnan().any(-1), wrong)


def check_empty_rows_beside_nan(qk: Any, chip: Chip = HOPPER) -> None:
    """Whatever their query, and a channel of values, hold."""
    q, k, v = (torch.randn(1, h, n, 64).bfloat16() for h, n in ((2, 150), (1, 60), (1, 60)))
    q[0, 1, 20, 5] = v[0, 0, 5, 3] = torch.nan
    out, lse = attend(fa4flex.compile(mask=causal), quantize(q, k, v, qk=qk), chip=chip)
    assert not out[:, :, :90].any() and (lse[:, :, :90] == -torch.inf).all()
    assert out[:, :, 90:, 3].isnan().all() and out[:, :, 90:].isnan().sum() == 2 * 60
    assert lse[:, :, 90:].isfinite().all()
