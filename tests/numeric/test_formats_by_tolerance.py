"""Formats by head: no row is off by more than its certificate, and heads that rounding would harm keep 16
bits."""

from __future__ import annotations

import math
import os
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import cumulative
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import fa4flex
from fa4flex import Choice, InputError, Precision, Quantized, UnsupportedError, Varlen
from fa4flex.codegen.analyze.lipschitz import lipschitz
from fa4flex.codegen.analyze.tables import Tables
from fa4flex.quantization.choice import Scores, chosen
from fa4flex.variants import alibi, causal, sigmoid_attention, softcap

CASES = int(os.environ.get("FA4FLEX_RANDOM_CHOICES", "300"))
BATCH = 20
"""Cases that are computed together."""
BFLOAT16 = ("bfloat16", "bfloat16")
E4M3 = torch.float8_e4m3fn


def drawn(
    heads: int = 4, kv_heads: int = 2, rows: int = 9, keys: int = 40, width: int = 32, batch: int = 1
) -> list[Tensor]:
    return [torch.randn(batch, h, n, width) for h, n in ((heads, rows), (kv_heads, keys), (kv_heads, keys))]


def hard(x: list[Tensor]) -> list[Tensor]:
    """The tensors with sizes, outliers, offsets and signs at random, by head."""
    q, k, v = x
    for t in (q, k, v):
        t *= 10 ** torch.empty(t.shape[:2]).uniform_(-1.5, 0.7)[:, :, None, None]
    if random.random() < 0.4:
        k[::2, ..., random.randrange(k.shape[-1])] += random.uniform(-20, 20)
    if random.random() < 0.4:
        t = random.choice((q, k, v))
        t[::3, random.randrange(t.shape[1]), random.randrange(t.shape[2])] *= 30
    if random.random() < 0.3:
        v[1:].abs_()
    if random.random() < 0.2:
        random.choice((q, k, v))[:, 0] = 0
    return x


def attend(x: Any, mod: Any, scale: float, sinks: Tensor | None, narrow: Tensor | None = None) -> Tensor:
    """Outputs in float64. narrow: heads whose probabilities are of e4m3, the largest 256, as kernels have."""
    q, k, v = (t.double() for t in x[:3])
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    s = q @ k.mT + (0 if x[3] is None else x[3].double().unsqueeze(-1))
    s = mod(s * scale)
    logits = (
        s if sinks is None else torch.cat([s, sinks.view(1, -1, 1, 1).expand(len(s), -1, s.shape[2], 1)], -1)
    )
    p = torch.softmax(logits, -1)[..., : s.shape[-1]]
    if narrow is not None:
        largest = p.amax(-1, True).clamp(min=1e-300)
        rounded = (p / largest * 256).float().to(E4M3).double() / 256 * largest
        p = torch.where(narrow.view(1, -1, 1, 1), rounded, p)
    return p @ v


MODS: tuple[tuple[Any, float], ...] = (
    (lambda s: s, 1.0),
    (lambda s: 2.5 * torch.tanh(s / 2.5), 1.0),
    (lambda s: -1.5 * s, 1.5),
)
"""Score mods, and their Lipschitz constants."""


def test_no_row_is_off_by_more_than_its_certificate(seed: int) -> None:
    """At what codes stand for, and with probabilities of e4m3 as a kernel of codes has."""
    for n in range(CASES // BATCH):
        rows, keys, width = random.choice((1, 9)), random.choice((1, 2, 17, 40, 150)), random.choice((32, 64))
        given = hard(drawn(4, random.choice((1, 2, 4)), rows, keys, width, BATCH))
        (mod, slope), scale = random.choice(MODS), random.choice((width**-0.5, 1.0, -0.3))
        sinks = torch.randn(4, dtype=torch.float64) if random.random() < 0.3 else None
        tolerance, scores = random.choice((0.02, 0.1, 0.3, 1.0)), Scores(scale, slope, sinks is not None)
        codes = fa4flex.quantize(*given, center_k=random.random() < 0.8, center_v=random.random() < 0.8)
        choice = chosen(codes, tuple(given), tolerance, scores)  # type: ignore[arg-type]
        exact = attend((*given, None), mod, scale, sinks)
        stand, each = choice.dequantize(), choice.formats.repeat_interleave(4 // len(choice.formats))
        for narrow in (None, each == 2):
            found = attend(stand, mod, scale, sinks, narrow)
            error = (found - exact).abs().amax(-1)
            floor = 1e-12 * (1 + float(exact.abs().max()))
            assert (error <= choice.certificate + floor).all(), (n, float((error - choice.certificate).max()))
        share = (choice.certificate.amax(2) / _range(given[2], sinks)).nan_to_num(0.0)
        assert (share <= choice.tolerance * (1 + 1e-5)).all(), share


def _range(v: Tensor, sinks: Tensor | None) -> Tensor:
    most, least = v.amax(2), v.amin(2)  # by channel
    if sinks is not None:
        most, least = most.clamp(min=0), least.clamp(max=0)
    span = torch.maximum((most - least).amax(2), v.abs().amax((2, 3)) * 2**-8)
    return span.repeat_interleave(4 // v.shape[1], 1)


def test_the_bound_is_not_far_from_what_some_row_is_off(seed: int) -> None:
    """Two keys whose scores are off with opposite signs come near it."""
    given = drawn(1, 1, 50, 2, 32, BATCH)
    choice = fa4flex.compile().choose(*given, tolerance=0.14)
    codes = replace(choice.codes, v=given[2], v_scale=None, v_offset=None, pv="bfloat16")
    choice = replace(choice, codes=codes, formats=torch.ones_like(choice.formats))
    exact, found = (attend(x, MODS[0][0], 32**-0.5, None) for x in ((*given, None), choice.dequantize()))
    span = (given[2].amax(2) - given[2].amin(2)).amax(-1)[:, :, None]
    nearest = float(((found - exact).abs().amax(-1) / span).max())
    assert nearest > 0.1 * float(choice.bounds[1].max()), (nearest, choice.bounds)


def test_heads_that_rounding_would_harm_have_16_bits(seed: int) -> None:
    q, k, v = drawn(8, 4, 30, 200, 64)
    k[:, 1] *= 8
    k[:, 2, 7, 5] = 300.0
    v[:, 3, 9, 5] = math.nan
    choice = fa4flex.compile(mask=causal).choose(q, k, v, tolerance=0.3)
    assert choice.heads[:2] == (("int8", "float8_e4m3"),) * 2 and choice.heads[2:] == (BFLOAT16,) * 6
    assert "heads 2 to 3: q.k of bfloat16" in choice.explain()
    exact = choice.dequantize()
    assert torch.equal(exact.k[:, 1:], k[:, 1:]) and torch.equal(exact.q[:, 2:], q[:, 2:])
    assert exact.bias is not None and not exact.bias[:, 2:].any()
    v[:, 3] = v[:, 0]
    fine = fa4flex.compile().choose(q[:, :2], k[:, :1], v[:, :1], tolerance=0.12)
    assert fine.heads == (("int8", "bfloat16"),) * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_precisions_and_choices_attend_alike(dtype: torch.dtype, seed: int) -> None:
    """And within the certificate of attention over what was given, packed too."""
    attn = fa4flex.compile(score_mod=alibi >> softcap(20.0), mask=causal)
    at_each_call = fa4flex.compile(
        score_mod=alibi >> softcap(20.0), mask=causal, precision=Precision(tolerance=0.3)
    )
    lengths = [40, 0, 130, 1]
    varlen = Varlen(cumulative(lengths))
    given = [torch.randn(sum(lengths), h, 32) for h in (4, 2, 2)]
    given[1][:, 1] *= 30
    given = [x.to(dtype).requires_grad_() for x in given]
    out = at_each_call(*given, varlen=varlen)
    choice = attn.choose(*given, tolerance=0.3, varlen=varlen)
    assert torch.equal(attn(choice), out) and choice.heads[2:] == (BFLOAT16,) * 2
    assert choice.heads[0] == ("int8", "float8_e4m3")
    doubles = [x.detach().double().requires_grad_() for x in given]
    exact = attn(*doubles, varlen=varlen)
    near = (1e-4 if dtype == torch.float32 else 2**-6) * (1 + exact.abs())
    assert ((out - exact).abs() <= choice.certificate.T[..., None] + near).all()
    of_16, plain, true = (
        torch.autograd.grad(o[:, 2:].sum(), x[1])[0].double()
        for o, x in ((out, given), (attn(*given, varlen=varlen), given), (exact, doubles))
    )
    assert float((of_16 - true).abs().max()) <= 2 * float((plain - true).abs().max())


def test_settled() -> None:
    """Codes alone, where all heads have the same."""
    attn, given = fa4flex.compile(), drawn()
    bounds = attn.choose(*given).bounds
    between = float(bounds[1].max() + bounds[2].min()) / 2
    for tolerance, pv in ((float(bounds[2].max()), "float8_e4m3"), (between, "bfloat16")):
        choice = attn.choose(*given, tolerance=tolerance)
        codes = choice.settled()
        assert isinstance(codes, Quantized) and (codes.qk, codes.pv) == ("int8", pv)
        torch.testing.assert_close(attn(codes), attn(choice))
    assert isinstance(attn.choose(*given, tolerance=0.0).settled(), Choice)


def test_nothing_waits_for_the_device() -> None:
    """No content is read: made of tensors that have none."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        given: Any = tuple(torch.randn(2, h, 130, 32) for h in (4, 2, 2))
        choice = chosen(fa4flex.quantize(*given), given, 0.1, Scores(0.2))
        assert choice.certificate.shape == (2, 4, 130) and choice.dequantize().q.shape == (2, 4, 130, 32)


def test_in_a_graph() -> None:
    """The choice is part of a graph; of score mods no slope is found there, and one graph is refused."""
    given = drawn()
    for mod in (None, alibi):
        attn = fa4flex.compile(score_mod=mod, mask=causal, precision=Precision(tolerance=0.15))
        step = torch.compile(attn, fullgraph=True, backend="eager")
        if mod is None:
            torch.testing.assert_close(step(*given), attn(*given))
            continue
        with pytest.raises(Exception, match="UnsupportedError"):
            step(*given)


@pytest.mark.parametrize(
    ("mod", "expected"),
    [
        (alibi, 1.0),
        (alibi >> softcap(3.0), 1.0),
        (lambda s, b, h, i, j: s * 3.0 - j, 3.0),
        (lambda s, b, h, i, j: torch.where(i > j, s, 2 * s), 2.0),
        (lambda s, b, h, i, j: torch.maximum(s, s * 0.5), 1.0),
        (lambda s, b, h, i, j: torch.where(s > 0, s, 2 * s), None),
        (lambda s, b, h, i, j: torch.floor(s), None),
        (lambda s, b, h, i, j: s * s, None),
        (lambda s, b, h, i, j: s * _TABLE[h], None),
        (lambda s, b, h, i, j: s + _TABLE[h], 1.0),
    ],
)
def test_slopes(mod: Any, expected: float | None) -> None:
    program = fa4flex.compile(score_mod=mod).program
    found = lipschitz(program.facts.score, Tables(program.captured()))
    assert (found is None) == (expected is None)
    assert expected is None or expected <= found <= expected * (1 + 1e-6)  # type: ignore[operator]


_TABLE = torch.randn(64)


def test_no_bound_no_codes() -> None:
    """Heads without a known bound have 16 bits, and say why."""
    given = drawn()
    for how in ({"normalizer": sigmoid_attention}, {"dropout": 0.1}, {"score_mod": lambda s, *_: s * s}):
        choice = fa4flex.compile(**how).choose(*given, tolerance=10.0)
        assert choice.heads == (BFLOAT16,) * 4 and "all heads have 16 bits: " in choice.explain()
        assert not choice.certificate.any()


def test_refused(seed: int) -> None:
    given = drawn()
    with pytest.raises(InputError, match="tolerance=-1"):
        Precision(tolerance=-1)
    with pytest.raises(InputError, match="leave one of them out"):
        Precision(tolerance=0.1, qk="int8")
    choice = fa4flex.compile(scale=0.1).choose(*given)
    for other in ({"scale": 0.2}, {"scale": 0.1, "sinks": torch.zeros(4)}, {"scale": 0.1, "dropout": 0.5}):
        with pytest.raises(InputError, match="choose again"):
            fa4flex.compile(**other)(choice)
    with pytest.raises(InputError, match="within the precision's tolerance"):
        fa4flex.compile(scale=0.1, precision=Precision(tolerance=0.5))(choice)
    assert fa4flex.compile(scale=-0.1, score_mod=softcap(2.0))(choice).isfinite().all()
    with pytest.raises(UnsupportedError, match="kv_scales="):
        fa4flex.compile(precision=Precision(tolerance=0.1))(*given, kv_scales=fa4flex.KVScales())
    assert "Precision(tolerance=0.1)" in str(_of_paged(given))
    assert "attn.choose" in fa4flex.compile(precision=Precision(tolerance=0.1)).explain()


def _of_paged(given: list[Tensor]) -> Exception:
    paging = fa4flex.Paging(torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32))
    with pytest.raises(UnsupportedError) as found:
        fa4flex.compile(precision=Precision(tolerance=0.1))(*given, paging=paging)
    return found.value
