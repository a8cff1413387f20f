"""Precision(qk=..., pv=...) at every door: each rounds as fa4flex.quantize does, or refuses in words."""

from __future__ import annotations

import copy
import itertools
import json
import pickle
from dataclasses import fields
from typing import Any

import pytest
import torch
from helpers import cumulative
from torch import Tensor, nn

import fa4flex
from fa4flex import (
    InputError,
    Paging,
    Precision,
    UnsupportedError,
    Varlen,
    quantize,
    quantized_calls,
    reference,
)
from fa4flex.check import check
from fa4flex.primitives.precision import read, told
from fa4flex.primitives.products import KEYS, VALUES
from fa4flex.quantization.formats import FORMATS
from fa4flex.runtime.key_sources import Contiguous
from fa4flex.runtime.launch import Caller, attend
from fa4flex.variant import compose
from fa4flex.variants import alibi, causal, sigmoid_attention, softcap, softmax_plus

INT8 = Precision(qk="int8", pv="float8_e4m3")


def qkv(batch: int = 2, heads: int = 4, rows: int = 30, keys: int = 70) -> list[Tensor]:
    shapes = (batch, heads, rows, 32), (batch, 2, keys, 32), (batch, 2, keys, 16)
    q, k, v = (torch.randn(*shape) for shape in shapes)
    return [q, k + 2, v.abs()]


def exact(x: Any, precision: Precision, mod: Any = None, mask: Any = causal, **more: Any) -> Any:
    """out and lse of the oracle over what codes of [B, H, S, D] stand for."""
    codes: Any = {"qk": precision.qk, "pv": precision.pv}
    return over(quantize(*(t.detach() for t in x), **codes).dequantize(), mod, mask, **more)


def over(stand: Any, mod: Any = None, mask: Any = causal, **more: Any) -> Any:
    """out and lse of the oracle over what codes stand for: q, k, v and the bias of q."""
    q, k, v, bias = stand
    assert bias is not None
    rows = bias.double() / 32**0.5

    def shifted(score: Any, b: Any, h: Any, i: Any, j: Any, **context: Any) -> Any:
        score = score + rows[b, h, i]
        return score if mod is None else fa4flex.as_score(mod)(score, b, h, i, j, **context)

    shifted.context = () if mod is None else fa4flex.as_score(mod).context  # type: ignore[attr-defined]
    return reference.attention(q, k, v, shifted, mask, **more)


def same(found: Any, expected: Any, tolerance: float = 2e-5) -> None:
    torch.testing.assert_close(found.double(), expected.double(), atol=tolerance, rtol=tolerance)


# --- combinations -------------------------------------------------------------------------------------------


def test_every_right_combination_is_kept() -> None:
    made = [Precision(qk=qk, pv=pv) for qk in KEYS for pv in (*VALUES, "bfloat16")]
    assert all(x.coded for x in made) and len(set(made)) == 8 and tuple(FORMATS) == KEYS
    assert Precision(qk="int8", pv="float8_e4m3", promote=False) != INT8
    assert Precision(qk=torch.int8, pv=torch.float8_e4m3fn) == INT8  # type: ignore[arg-type]
    assert Precision() == Precision(qk="bfloat16", pv="bfloat16") and not Precision().coded


@pytest.mark.parametrize(
    ("given", "kind", "words"),
    [
        ({"qk": "float8_e5m2"}, UnsupportedError, "twice the error"),
        ({"qk": "mxfp4"}, UnsupportedError, "powers of two"),
        ({"qk": "int4"}, UnsupportedError, "18 %"),
        ({"qk": "int8", "pv": "int8"}, UnsupportedError, "sink"),
        ({"qk": "nvfp4", "pv": "nvfp4"}, UnsupportedError, "83 %"),
        ({"qk": "mxfp8", "pv": "mxfp8"}, UnsupportedError, "along the keys"),
        ({"qk": "int8", "pv": "float8_e5m2"}, UnsupportedError, "twice the error"),
        ({"pv": "float8_e4m3"}, UnsupportedError, "8-bit values cost an error of 3 %"),
        ({"qk": "int8", "promote": False}, UnsupportedError, "float32 in any case"),
        ({"qk": "int8", "promote": 1}, InputError, "True or False"),
        ({"qk": "int7"}, InputError, "one of"),
        ({"qk": "int8", "pv": "half"}, InputError, "one of"),
        ({"backward": "half"}, InputError, "one of"),
    ],
)
def test_others_are_refused_at_once(given: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        Precision(**given)


CHANGED: dict[str, Precision] = {
    "compute": Precision(compute="float64"), "output": Precision(output=torch.float16),
    "skip": Precision(skip=0.25), "qk": Precision(qk="nvfp4"), "pv": INT8,
    "promote": Precision(qk="int8", pv="float8_e4m3", promote=False), "tolerance": Precision(tolerance=0.1),
}  # fmt: skip


def test_every_field_is_told_and_read_again() -> None:
    """Programs' text, copies and repr hold all fields. `backward` has one value only."""
    assert {x.name for x in fields(Precision)} - {"backward"} == set(CHANGED)
    for name, one in CHANGED.items():
        again = read(json.loads(json.dumps(told(one))))
        assert again == one and getattr(one, name) != getattr(Precision(), name)
        assert eval(repr(one), {"Precision": Precision, "torch": torch}) == one
        assert pickle.loads(pickle.dumps(one)) == copy.deepcopy(one) == one
        assert copy.deepcopy(one).coded == pickle.loads(pickle.dumps(one)).coded == one.coded


# --- doors that honour it -----------------------------------------------------------------------------------

FORMS = [Precision(qk=qk, pv=pv) for qk, pv in itertools.product(KEYS, (*VALUES, "bfloat16"))]


@pytest.mark.parametrize("precision", FORMS, ids=lambda p: f"{p.qk}, {p.pv}")
def test_a_call_rounds_as_quantize_does(precision: Precision, seed: int) -> None:
    x, sinks = qkv(), torch.randn(4)
    out, lse = exact(x, precision, sinks=sinks)
    given: Any = {"mask": causal, "sinks": sinks, "precision": precision}
    doors = (
        fa4flex.compile(**given),
        lambda *x, **how: fa4flex.attention(*x, **given, **how),
        fa4flex.nn.Attention(**given),
    )
    for door in doors:
        mine, of_rows = door(*x, return_lse=True)
        same(mine, out), same(of_rows, lse)
        assert torch.equal(mine, door(*x))
    unrounded = fa4flex.attention(*x, mask=causal, sinks=sinks)
    assert (unrounded - out).abs().max() > 1e-4


def test_what_is_composed_sees_the_score(seed: int) -> None:
    x = qkv()
    table = torch.randn(4)

    def scaled(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score * table[h]

    for mod in (alibi, softcap(1.5), scaled, alibi >> softcap(2.0)):
        out, lse = exact(x, INT8, mod)
        mine, of_rows = fa4flex.attention(*x, score_mod=mod, mask=causal, precision=INT8, return_lse=True)
        same(mine, out), same(of_rows, lse)
    dropout = fa4flex.Dropout(0.3, 5)
    same(
        fa4flex.attention(*x, mask=causal, precision=INT8, dropout=dropout),
        exact(x, INT8, dropout=dropout)[0],
    )
    for normalizer in (softmax_plus(2.0), sigmoid_attention):
        normalizer = fa4flex.compile(normalizer=normalizer).variant.normalizer
        mine = fa4flex.attention(*x, mask=causal, precision=INT8, normalizer=normalizer)
        same(mine, exact(x, INT8, normalizer=normalizer)[0])

    def doubled(out: Any, b: Any, h: Any, q_idx: Any, d_idx: Any) -> Any:
        return 2 * out + table[h]

    mine = fa4flex.attention(*x, mask=causal, precision=INT8, output_mod=doubled)
    same(mine, exact(x, INT8, output_mod=fa4flex.as_output(doubled))[0])
    statistics: dict[str, Tensor] = {}
    exact(x, INT8, statistics=statistics)
    wanted = ("lse", "max_scores", "max_logit", "entropy")
    _, aux = fa4flex.attention(*x, mask=causal, precision=INT8, return_aux=wanted)
    for name in wanted[1:]:
        same(getattr(aux, name), statistics[name])


def test_skipping_keeps_its_bound(seed: int) -> None:
    x, skip = qkv(keys=600), 0.2
    steep = alibi(torch.full((4,), 0.5))
    skipping = Precision(qk="int8", pv="float8_e4m3", skip=skip)
    out = fa4flex.attention(*x, score_mod=steep, mask=causal, precision=skipping)
    full, _ = exact(x, INT8, steep)
    assert (out - full).abs().max() <= skip * (x[2].max() - x[2].min())


def test_layouts_and_lengths(seed: int) -> None:
    x = qkv()
    out, _ = exact(x, INT8)
    turned = [t.transpose(1, 2) for t in x]
    same(fa4flex.attention(*turned, mask=causal, precision=INT8, layout="bshd").transpose(1, 2), out)
    used = torch.tensor([70, 33], dtype=torch.int32)
    padded = fa4flex.attention(*x, mask=None, precision=INT8, varlen=Varlen(seqused_k=used))
    # Its own codes: means of a sequence alone have other last bits, by which a code may be the next one.
    q, k, v, bias = quantize(*x, qk=INT8.qk, pv=INT8.pv, varlen=Varlen(seqused_k=used)).dequantize()
    for b, n in enumerate(used.tolist()):
        one = slice(b, b + 1)
        same(padded[b], over((q[one], k[one, :, :n], v[one, :, :n], bias[one]), mask=None)[0][0])
    lengths = [9, 40, 0, 21]
    packed = [torch.randn(sum(lengths), h, w) for h, w in ((4, 32), (2, 32), (2, 16))]
    attn = fa4flex.compile(mask=causal, precision=INT8)
    made = attn(*packed, varlen=Varlen(cumulative(lengths)))
    offsets = cumulative(lengths).to(torch.int64)
    jagged = [torch.nested.nested_tensor_from_jagged(t, offsets).transpose(1, 2) for t in packed]
    assert torch.equal(attn(*jagged).transpose(1, 2).values(), made)
    for a, b in itertools.pairwise(cumulative(lengths).tolist()):
        if a < b:
            same(made[a:b], exact([t[a:b].transpose(0, 1)[None] for t in packed], INT8)[0][0].transpose(0, 1))


@pytest.mark.parametrize("precision", FORMS[:2] + FORMS[-2:], ids=lambda p: f"{p.qk}, {p.pv}")
def test_nothing_to_attend(precision: Precision) -> None:
    for rows, keys in ((0, 5), (5, 0), (0, 0)):
        x = qkv(rows=rows, keys=keys)
        assert torch.equal(fa4flex.attention(*x, precision=precision), torch.zeros(2, 4, rows, 16))
    assert fa4flex.attention(*qkv(batch=0), precision=precision).shape == (0, 4, 30, 16)


def test_heads_of_k_and_v_may_differ(seed: int) -> None:
    q, k, v = qkv()
    one = v[:, :1]
    out = fa4flex.attention(q, k, one, mask=causal, precision=INT8)
    same(out, exact([q, k, one.expand_as(v)], INT8)[0])


def test_dtypes(seed: int) -> None:
    for dtype, output in itertools.product((torch.bfloat16, torch.float16), (None, torch.float32)):
        x = [t.to(dtype) for t in qkv()]
        precision = Precision(qk="int8", pv="float8_e4m3", output=output)
        mine = fa4flex.attention(*x, mask=causal, precision=precision)
        assert mine.dtype == (output or dtype)
        same(mine, exact(x, INT8)[0], 2e-5 if output else 2**-8 * 4)


def test_autocast_rounds_what_it_casts(seed: int) -> None:
    x = qkv()
    with torch.autocast("cpu", torch.bfloat16):
        mine = fa4flex.attention(*x, mask=causal, precision=INT8)
        codes = quantize(*(t.bfloat16() for t in x))
    assert mine.dtype == torch.bfloat16
    same(mine, exact([t.bfloat16() for t in x], INT8)[0], 2**-6)
    wanted = quantize(*(t.bfloat16() for t in x))
    assert torch.equal(codes.q, wanted.q) and torch.equal(codes.q_scale, wanted.q_scale)


def test_parts_merge_by_their_log_sum_exps(seed: int) -> None:
    """Each part has a mean of its own, which its log-sum-exp knows."""
    q, k, v = qkv()
    attn = fa4flex.compile(precision=Precision(qk="int8"))
    parts = [attn(q, k[:, :, s], v[:, :, s], return_lse=True) for s in (slice(0, 31), slice(31, 70))]
    out, lse = fa4flex.merge(*zip(*parts, strict=True))
    exact_out, exact_lse = reference.attention(q, k, v)
    torch.testing.assert_close(out.double(), exact_out, atol=0.05, rtol=0.05)
    torch.testing.assert_close(lse.double(), exact_lse, atol=0.05, rtol=0.01)


def test_torchs_kernels(seed: int) -> None:
    x = qkv()
    mine, of_rows = fa4flex.attention(*x, mask=causal, precision=INT8, backend="flex", return_lse=True)
    out, lse = exact(x, INT8)
    same(mine, out, 1e-4), same(of_rows, lse, 1e-4)


class Attends(nn.Module):
    def __init__(self, **given: Any) -> None:
        super().__init__()
        self.attn = fa4flex.nn.Attention(alibi, causal, sinks=4, precision=INT8, **given)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        return self.attn(q, k, v, return_lse=True)


def test_in_graphs(seed: int) -> None:
    """Results and gradients of torch.compile and of an exported program are those of eager mode."""
    model = Attends()
    model.attn.sinks.data.normal_()
    x = [t.requires_grad_() for t in qkv()]
    inputs = [*x, model.attn.sinks]
    found = model(*x)
    loss = lambda results: results[0].sin().sum() + results[1].sin().sum()  # noqa: E731
    wanted = torch.autograd.grad(loss(found), inputs)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    mine = compiled(*x)
    same(mine[0], found[0]), same(mine[1], found[1])
    for a, b in zip(torch.autograd.grad(loss(mine), inputs), wanted, strict=True):
        same(a, b, 1e-4)
    exported = torch.export.export(model, tuple(t.detach() for t in x)).module()
    out, lse = exported(*(t.detach() for t in x))
    same(out, found[0]), same(lse, found[1])


def test_explanation() -> None:
    words = str(fa4flex.compile(mask=causal, precision=INT8).explain(64))
    for part in (
        "q.k of int8",
        "float8_e4m3, minus the mean",
        "on Hopper and Blackwell without gradients a kernel multiplies 8-bit codes (int8 not beyond compute",
        "straight through",
    ):
        assert part in " ".join(words.split())
    for precision in (Precision(qk="mxfp8"), Precision(qk="int8", skip=0.01)):
        no_kernel = str(fa4flex.compile(mask=causal, precision=precision).explain(64))
        assert "q.k of" in no_kernel and "a kernel multiplies" not in no_kernel
    assert "products" not in str(fa4flex.compile(mask=causal).explain(64)).split("layout")[0]


@pytest.mark.parametrize(
    ("qk", "arch", "dtype"),
    [
        ("int8", "sm_90a", "int8"),
        ("int8", "sm_100a", "int8"),
        ("int8", "sm_103a", "bfloat16"),
        ("float8_e4m3", "sm_103a", "float8_e4m3fn"),
        ("mxfp8", "sm_90a", "bfloat16"),
    ],
)
def test_the_kernel_that_is_explained_is_the_one_that_runs(qk: Any, arch: str, dtype: str) -> None:
    precision = Precision(qk=qk, pv="float8_e4m3")
    words = fa4flex.compile(mask=causal, precision=precision).explain(4096, 4096, arch=arch)
    assert f"heads of 128, {dtype}, dense lengths" in " ".join(str(words).split())


# --- doors that refuse --------------------------------------------------------------------------------------


def test_refusals(seed: int) -> None:
    q, k, v = qkv()
    attn = fa4flex.compile(mask=causal, precision=INT8)
    lse = torch.zeros(2, 4, 30)
    table, used = torch.zeros(2, 9, dtype=torch.int32), torch.tensor([9, 9], dtype=torch.int32)
    pages = torch.randn(9, 8, 2, 32)
    e4m3 = torch.float8_e4m3fn
    scales = fa4flex.KVScales(torch.ones(2))
    for words, call in (
        ("rounded when it is written", lambda: attn(q, pages, pages, paging=Paging(table, used))),
        ("rounded when it is written", lambda: attn(q, k.to(e4m3), v.to(e4m3), kv_scales=scales)),
        ("Descales", lambda: attn(q, k.to(e4m3), v.to(e4m3))),
        ("Descales", lambda: attn(q.to(torch.int8), k.to(torch.int8), v)),
        ("float64", lambda: attn(q.double(), k.double(), v.double())),
        ("multiple of 32", lambda: attn(q[..., :20], k[..., :20], v)),
        ("several ranks", lambda: attn.parallel(None)),  # type: ignore[arg-type]
        ("qk='int8'", lambda: attn.key_mass(q, k, lse)),
        ("qk='int8'", lambda: attn.probabilities(q, k, lse)),
        ("qk='int8'", lambda: fa4flex.key_mass(q, k, lse, precision=INT8)),
        ("skipped", lambda: attn.skipped(q, k, v)),
        ("exact formula", lambda: check(attn)),
        ("with Precision", lambda: attn(quantize(q, k, v, qk="mxfp8"))),
    ):  # fmt: skip
        with pytest.raises((UnsupportedError, InputError), match=words):
            call()
    same(attn(quantize(q, k, v)), exact([q, k, v], INT8)[0])


def test_parts_of_tensors_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """DTensors: a mean, and a scale, of a part is another one."""
    monkeypatch.setattr(quantized_calls, "is_dtensor", lambda x: True)
    with pytest.raises(UnsupportedError, match="DTensors"):
        fa4flex.attention(*qkv(), precision=INT8)


def test_no_call_below_the_doors_forgets_to_round(seed: int) -> None:
    """Whoever comes by another way is told, and not given what was not rounded."""
    q, k, v = qkv()
    with pytest.raises(UnsupportedError, match="does not round"):
        attend(compose(precision=INT8), q, Contiguous(k, v), None, ())


# --- what is kept between calls -----------------------------------------------------------------------------


def test_contents_are_read_at_each_call(seed: int) -> None:
    x = qkv()
    attn = fa4flex.Attention(compose(softcap(2.0), causal, precision=INT8), Caller())
    codes = quantize(*x)
    for step in range(6):
        out, _ = exact(x, INT8, softcap(2.0))
        same(attn(*x), out)
        codes.q_scale.mul_(1.25), codes.v_scale.mul_(0.5)  # type: ignore[union-attr]
        q, k, v, _ = codes.dequantize()
        codes.q_bias.add_(0.5)  # type: ignore[union-attr]
        moved = codes.dequantize().bias / 32**0.5  # type: ignore[operator]

        def capped(s: Any, b: Any, h: Any, i: Any, j: Any, moved: Tensor = moved) -> Any:
            return 2.0 * torch.tanh((s + moved[b, h, i]) / 2.0)

        same(attn(codes), reference.attention(q, k, v, capped, causal)[0])
        x[step % 3].mul_(-0.75).add_(0.25)
