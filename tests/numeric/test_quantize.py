"""Codes of 8 and 4 bits against the definitions of their formats, and attention over what they stand for."""

from __future__ import annotations

import itertools
import math
import random
from statistics import median
from typing import Any

import pytest
import torch
from torch import Tensor

import fa4flex
from fa4flex import InputError, Quantized, UnsupportedError, Varlen, quantize, reference
from fa4flex.quantization.formats import E4M3, FORMATS, INT8, NVFP4, in_blocks, of_blocks
from fa4flex.quantization.rotation import Rotation
from fa4flex.variants import alibi, causal, softcap

ORDER = (0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15)
"""Key of each column within 16, by the PTX ISA's layouts of 8-bit operands (m64nNk32) and accumulators."""


def made(tokens: int = 300, dtype: torch.dtype = torch.bfloat16, group: int = 2, width: int = 64) -> Any:
    q = torch.randn(2, 2 * group, 70, width).to(dtype)
    k = (torch.randn(2, 2, tokens, width) + 2).to(dtype)
    return q, k, torch.randn(2, 2, tokens, 32).to(dtype)


def relative(found: Tensor, expected: Tensor) -> float:
    """Root mean square error over root mean square."""
    error = (found.double() - expected.double()).square().mean().sqrt()
    return float(error / expected.double().square().mean().sqrt())


# --- formats ------------------------------------------------------------------------------------------------


def grid(name: str) -> Tensor:
    """All finite numbers of a format, by its definition: sign, exponent, mantissa."""
    if name == "int8":
        return torch.arange(-127, 128).double()
    bits, bias, mantissa = (4, 7, 3) if name != "nvfp4" else (2, 1, 1)
    sizes = []
    for e, m in itertools.product(range(2**bits), range(2**mantissa)):
        if name != "nvfp4" and (e, m) == (15, 7):  # NaN
            continue
        part = m / 2**mantissa
        sizes.append(2.0 ** (1 - bias) * part if e == 0 else 2.0 ** (e - bias) * (1 + part))
    return torch.tensor(sorted({x * sign for x in sizes for sign in (1, -1)})).double()


@pytest.mark.parametrize("name", FORMATS)
def test_codes_are_the_nearest_numbers(name: str, seed: int) -> None:
    form, numbers = FORMATS[name], grid(name)
    x = (torch.rand(64, 2, 32) * 2 - 1) * form.largest
    found = form.numbers(form.codes(x)).double()
    assert torch.isin(found, numbers).all()
    distance = (x.double()[..., None] - numbers).abs().amin(-1)
    assert torch.equal((found - x.double()).abs(), distance)


@pytest.mark.parametrize("name", FORMATS)
def test_halves_go_to_the_even_code(name: str) -> None:
    """Between neighbours, the one whose last bit is 0: each other number of the grid, seen from 0."""
    form, numbers = FORMATS[name], grid(name)
    rising = numbers[numbers >= 0]
    middles = ((rising[1:] + rising[:-1]) / 2).float()
    middles = torch.cat([middles, middles[: len(middles) % 2]])
    count = len(rising) - 1
    expected = torch.tensor([rising[n if n % 2 == 0 else n + 1] for n in range(count)])
    assert torch.equal(form.numbers(form.codes(middles))[:count].double(), expected.double())


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_blocks_use_their_range(name: str, seed: int) -> None:
    """No number of a block passes the format; a scale half as large would let one pass, or was rounded."""
    form = FORMATS[name]
    x = torch.randn(50, 3, 64) * torch.exp(3 * torch.randn(50, 3, 1))
    codes, scales, whole = in_blocks(x, form)
    found = of_blocks(codes, scales, whole, form)
    greatest = x.unflatten(-1, (-1, form.block)).abs().amax(-1)
    reach = scales.float() * whole[:, None] * form.largest
    if name == "mxfp8":
        assert (reach >= greatest).all() and (reach < 2 * greatest).all()
        assert torch.equal(scales.float().log2(), scales.float().log2().round())
    half_a_step = scales.float() * whole[:, None] * (1.0 if name == "nvfp4" else 16.0)
    beyond = greatest - reach  # a scale of e4m3 may be rounded down
    error = (found - x).unflatten(-1, (-1, form.block)).abs().amax(-1)
    assert (error <= torch.maximum(half_a_step, beyond) * (1 + 1e-5)).all()


def test_rotation(seed: int) -> None:
    """Orthogonal, its own kind of inverse, other signs for other seeds; widths that are no powers of two."""
    for width in (32, 64, 96, 128, 192, 256):
        rotation, x = Rotation(width, seed), torch.randn(5, width)
        torch.testing.assert_close(rotation.undone(rotation.of(x)), x)
        torch.testing.assert_close(rotation.of(x).norm(dim=-1), x.norm(dim=-1))
        one = torch.zeros(width)
        one[3] = 1
        assert (rotation.of(one) != 0).sum() == (width & -width)
    assert not torch.equal(Rotation(64, 0).of(torch.ones(64)), Rotation(64, 1).of(torch.ones(64)))


# --- places -------------------------------------------------------------------------------------------------


def test_values_are_transposed_in_the_order_of_operands(seed: int) -> None:
    q, k, v = made(130)
    codes = quantize(q, k, v)
    assert codes.v.shape == (2, 2, 32, 256) and codes.v_scale is not None and codes.v_offset is not None
    numbers = codes.v.float() * codes.v_scale[..., None] + codes.v_offset[..., None]
    natural = torch.empty(2, 2, 256, 32)
    for column in range(256):
        natural[:, :, column // 16 * 16 + ORDER[column % 16]] = numbers[..., column]
    assert relative(natural[:, :, :130], v) < 0.04
    assert (codes.v.float().abs().sum((0, 1, 2)) == 0).sum() >= 256 - 130  # tiles are filled up with zeros


def test_scales_are_those_of_tokens_tiles_and_channels(seed: int) -> None:
    q, k, v = made(300, torch.float32)
    codes = quantize(q, k, v, rotate=False, center_k=False, center_v=False)
    torch.testing.assert_close(codes.q_scale, q.abs().amax(-1) / 127)
    tiles = torch.stack([k[:, :, t : t + 128].abs().amax((2, 3)) for t in (0, 128, 256)], -1)
    torch.testing.assert_close(codes.k_scale, tiles / 127)
    torch.testing.assert_close(codes.v_scale, v.abs().amax(2) / 448)
    assert codes.q_bias is None and codes.v_offset is None


@pytest.mark.parametrize("qk", FORMATS)
def test_packed_sequences_are_quantised_each_for_itself(qk: Any, seed: int) -> None:
    cu = torch.tensor([0, 5, 5, 200, 300], dtype=torch.int32)
    q, k, v = torch.randn(300, 4, 64), torch.randn(300, 2, 64) + 2, torch.randn(300, 2, 32)
    if qk == "nvfp4":  # a scale for all tokens of a head: as large in each sequence
        q[:], k[:] = q.clamp(-2, 2), k.clamp(0, 4)
        for x in (q, k):
            x[cu[:-1].clamp(max=299), :, 0] = 4
    options: Any = {"qk": qk, "rotate": qk != "nvfp4", "center_k": qk != "nvfp4"}
    whole = quantize(q, k, v, varlen=Varlen(cu), **options).dequantize()
    for a, b in itertools.pairwise(cu.tolist()):
        if a == b:
            continue
        own = quantize(*(x[a:b].transpose(0, 1)[None] for x in (q, k, v)), **options).dequantize()
        for mine, theirs in zip(own[:3], whole[:3]):
            torch.testing.assert_close(mine[0].transpose(0, 1), theirs[a:b])


def test_padding_takes_no_part(seed: int) -> None:
    q, k, v = made()
    used = torch.tensor([300, 77], dtype=torch.int32)
    k[1, :, 77:], v[1, :, 77:] = math.nan, math.inf
    padded = quantize(q, k, v, varlen=Varlen(seqused_k=used))
    alone = quantize(q[1:], k[1:, :, :77], v[1:, :, :77])
    torch.testing.assert_close(padded.dequantize().k[1:, :, :77], alone.dequantize().k)
    torch.testing.assert_close(padded.dequantize().v[1:, :, :77], alone.dequantize().v)
    found, expected = fa4flex.attention(padded), fa4flex.attention(alone)
    torch.testing.assert_close(found[1:], expected)
    assert found.isfinite().all()


# --- what codes stand for -----------------------------------------------------------------------------------


@pytest.mark.parametrize("qk", FORMATS)
@pytest.mark.parametrize("mod", [None, alibi, softcap(2.0)], ids=str)
def test_attention_over_codes(qk: Any, mod: Any, seed: int) -> None:
    """Against the oracle over what the codes stand for: log-sum-exp, sinks and mods see the keys' mean."""
    layout: Any = random.choice(["bhsd", "bshd"])
    q, k, v = made(group=random.choice([1, 4]))
    sinks = torch.randn(q.shape[1])
    given = (q, k, v) if layout == "bhsd" else tuple(x.transpose(1, 2) for x in (q, k, v))
    codes = quantize(*given, qk=qk, pv=random.choice(["float8_e4m3", "bfloat16"]), layout=layout)
    attn = fa4flex.compile(score_mod=mod, mask=causal, sinks=sinks, layout=layout)
    out, lse = attn(codes, return_lse=True)
    assert out.dtype == q.dtype and out.shape == (*given[0].shape[:-1], 32)
    exact = codes.dequantize()
    of_q, of_k, of_v = exact[:3] if layout == "bhsd" else (x.transpose(1, 2) for x in exact[:3])
    assert exact.bias is not None
    bias = exact.bias.double()

    def shifted(score: Any, b: Any, h: Any, i: Any, j: Any, **context: Any) -> Any:
        score = score + bias[b, h, i] / 8
        return score if mod is None else fa4flex.as_score(mod)(score, b, h, i, j, **context)

    shifted.context = () if mod is None else fa4flex.as_score(mod).context  # type: ignore[attr-defined]
    expected, of_rows = reference.attention(of_q, of_k, of_v, shifted, causal, sinks=sinks)
    expected = expected if layout == "bhsd" else expected.transpose(1, 2)
    torch.testing.assert_close(out.double(), expected, atol=2**-8, rtol=2**-7)
    torch.testing.assert_close(lse.double(), of_rows, atol=1e-4, rtol=1e-5)


LIMITS = {"int8": 0.02, "float8_e4m3": 0.06, "mxfp8": 0.06, "nvfp4": 0.2}
"""Relative errors of the output of normal tensors with 16-bit values; twice as much as was measured."""


@pytest.mark.parametrize("qk", FORMATS)
def test_errors_are_those_of_the_format(qk: Any, seed: int) -> None:
    q, k, v = made(2000, width=128)
    exact = reference.attention(q, k, v)[0]
    error = relative(fa4flex.attention(quantize(q, k, v, qk=qk, pv="bfloat16")), exact)
    assert LIMITS[qk] / 6 < error < LIMITS[qk]


def test_rotation_and_tiles_are_worth_it(seed: int) -> None:
    """Outliers: half as large an error, and worst rows a third, of int8 behind e4m3 with a scale per head.

    The worst row of one draw is luck, in one of 20 less than 2.5 times as good: the middle of seven counts.
    """
    gains = []
    for _ in range(7):
        q, k, v = (torch.randn(1, 3, n, 128) for n in (128, 4096, 4096))
        for x in (q, k, v):
            x += torch.randn_like(x) * 10 * (torch.rand_like(x) < 0.001)
        q, k, v = (x.bfloat16() for x in (q, k, v))
        exact = reference.attention(q, k, v)[0]
        scales = [x.abs().amax((2, 3), True).float() / 448 for x in (q, k, v)]
        plain = [(x / s).to(torch.float8_e4m3fn).float() * s for x, s in zip((q, k, v), scales, strict=True)]
        by_head = (reference.attention(*plain)[0] - exact).square().mean(-1)
        ours = (fa4flex.attention(quantize(q, k, v)).double() - exact).square().mean(-1)
        gains.append(
            [(by_head.mean() / ours.mean()).sqrt().item(), (by_head.max() / ours.max()).sqrt().item()]
        )
    of_all, of_worst_rows = (median(gain) for gain in zip(*gains, strict=True))
    assert of_all > 1.8 and of_worst_rows > 2.5, gains


def test_offset_removes_the_bias_of_rounding(seed: int) -> None:
    """Values of one sign: the mean of the codes is that of the values."""
    q, k, v = made(4000)
    found = quantize(q, k, v.abs()).dequantize().v
    torch.testing.assert_close(found.mean(2), v.abs().float().mean(2), atol=1e-6, rtol=1e-5)


def test_special_rows(seed: int) -> None:
    """Zeros are exact; a NaN or an infinity is NaN in its row, tile or channel, and nowhere else."""
    q, k, v = made(300, torch.float32)
    q[0, 0, 3] = 0
    q[0, 1, 4, 5] = math.nan
    k[1, 0, 130, 7] = math.inf
    v[1, 1, 9, 2] = math.nan
    exact = quantize(q, k, v, center_k=False, rotate=False).dequantize()
    assert (exact.q[0, 0, 3] == 0).all() and exact.q[0, 1, 4].isnan().all()
    assert exact.k[1, 0, 128:256].isnan().all() and exact.v[1, 1, :, 2].isnan().all()
    assert exact.q.isnan().sum() == 64 and exact.k.isnan().sum() == 128 * 64
    assert exact.v.isnan().sum() == 300
    zeros = quantize(*(torch.zeros_like(x) for x in (q, k, v))).dequantize()
    assert all((x == 0).all() for x in zeros if x is not None)


@pytest.mark.parametrize("qk", FORMATS)
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_no_format_makes_numbers_of_nan_and_infinity(qk: Any, number: float, seed: int) -> None:
    q, k, v = made(40, torch.float32)
    q[0, 1, 4, 5] = k[1, 0, 30, 7] = number
    exact = quantize(q, k, v, qk=qk, center_k=False).dequantize()
    assert exact.q[0, 1, 4].isnan().all() and exact.q.isnan().sum() == exact.q.shape[-1]
    assert exact.k[1, 0, 30].isnan().all() and exact.k[0].isfinite().all()


@pytest.mark.parametrize("n", range(30))
def test_anything_composed(n: int, seed: int) -> None:
    """Formats, widths, lengths, groups, scales, rows of zeros, against the oracle over the codes."""
    group, width, of_v = random.choice([1, 3, 7]), 32 * random.randint(1, 4), 8 * random.randint(1, 8)
    options: Any = {
        "qk": random.choice(list(FORMATS)), "pv": random.choice(["float8_e4m3", "bfloat16"]), "seed": n,
        **{name: random.random() < 0.7 for name in ("rotate", "center_k", "center_v")},
    }  # fmt: skip
    lengths = [random.choice([0, 1, 5, 16, 127, 128, 129, 260]) for _ in range(3)]
    scale = 10 ** random.uniform(-6, 3)
    q, k, v = (
        torch.randn(sum(lengths), heads, x) * s
        for heads, x, s in ((2 * group, width, scale), (2, width, 1 / scale), (2, of_v, 1.0))
    )
    if sum(lengths) > 3:
        k[random.randrange(len(k))] = 0
    varlen = Varlen(torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32))
    codes = quantize(q, k, v, varlen=varlen, **options)
    out = fa4flex.attention(codes, mask=causal)
    exact = codes.dequantize()
    assert isinstance(codes, Quantized) and repr(codes).startswith("Quantized(qk=")
    expected = torch.zeros(len(q), 2 * group, of_v, dtype=torch.float64)
    for a, b in itertools.pairwise(itertools.accumulate(lengths, initial=0)):
        part = [x[a:b].transpose(0, 1)[None] for x in exact[:3]]
        expected[a:b] = reference.attention(*part, mask=causal)[0][0].transpose(
            0, 1
        )  # a bias of rows is none
    torch.testing.assert_close(out.double(), expected, atol=1e-4, rtol=1e-3)


# --- refusals -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"qk": "float8_e5m2"}, UnsupportedError, "twice the error"),
        ({"qk": "mxfp4"}, UnsupportedError, "powers of two"),
        ({"pv": "int8"}, UnsupportedError, "sink"),
        ({"pv": "nvfp4"}, UnsupportedError, "83 %"),
        ({"qk": "int4"}, UnsupportedError, "18 %"),
        ({"qk": "int7"}, InputError, "one of"),
        ({"varlen": Varlen(torch.tensor([0, 70], dtype=torch.int32))}, InputError, "four|packed|tokens"),
    ],
)
def test_refused(options: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        quantize(*made(), **options)


def test_shapes_are_checked() -> None:
    q, k, v = made()
    three = torch.cat([v, v[:, :1]], 1)
    for bad in (
        (q[..., :40], k[..., :40], v), (q, k, v[:, :, 1:]), (q[:, :3], k, v), (q.double(), k, v),
        (q, k, three),
    ):  # fmt: skip
        with pytest.raises((InputError, UnsupportedError)):
            quantize(*bad)


def test_codes_beside_other_arguments() -> None:
    codes = quantize(*made())
    for name in ("k", "v"):
        with pytest.raises(InputError, match="codes alone"):
            fa4flex.attention(codes, **{name: codes.k})
    with pytest.raises(UnsupportedError, match="kv_scales"):
        fa4flex.compile()(codes, kv_scales=fa4flex.KVScales())
    with pytest.raises(InputError, match="layout"):
        fa4flex.compile(layout="bshd")(codes)


def test_compiled_and_eager_agree(seed: int) -> None:
    q, k, v = made()

    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return fa4flex.attention(quantize(q, k, v), mask=causal)

    torch.testing.assert_close(compiled(q, k, v), fa4flex.attention(quantize(q, k, v), mask=causal))


def test_formats_have_their_greatest_numbers() -> None:
    for form in (INT8, E4M3, NVFP4):
        assert (
            form.numbers(form.codes(torch.full((2,), form.largest)))[0]
            == form.largest
            == grid(form.name).max()
        )
