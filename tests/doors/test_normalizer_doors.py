"""Normalisers at every door: composition, words, torch.compile, export, modules, other backends, devices."""

from __future__ import annotations

import copy
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import agree, close
from normalizer_cases import ELEMENTWISE, NORMALIZERS
from output_cases import KINDS, Sizes, dense, leaves, sizes_of
from torch import Tensor, nn

import fa4flex
from fa4flex import reference
from fa4flex.codegen.build import bind
from fa4flex.errors import InputError, TraceError, UnsupportedError
from fa4flex.integrations.layers import assign
from fa4flex.primitives.normalizer import Normalizer, as_normalizer
from fa4flex.runtime.programs import publish, read
from fa4flex.variants import (
    alibi,
    causal,
    head_scale,
    sigmoid_attention,
    silu_attention,
    softmax_plus,
    softpick,
)

UNSUMMED = [name for name in NORMALIZERS if name != "softmax_plus"]


def three(heads: int = 2, length: int = 5, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [torch.randn(1, heads, length, 4, dtype=dtype, requires_grad=True) for _ in range(3)]


# --- composition --------------------------------------------------------------------------------------------


def test_repr_evaluates_back() -> None:
    names = {"Normalizer": Normalizer, "sigmoid_attention": sigmoid_attention, "softpick": softpick}
    for normalizer in (
        Normalizer.softmax(2.0),
        Normalizer.softpick(1e-3),
        sigmoid_attention(-1.0),
        softpick(0.5),
    ):
        again = eval(repr(normalizer), names)
        assert repr(again) == repr(normalizer) and again.weights == normalizer.weights
        assert f"normalizer={normalizer!r}" in repr(fa4flex.compile(normalizer=normalizer).variant)
    assert as_normalizer(softpick).weights == Normalizer.softpick().weights  # a family: its defaults
    assert repr(fa4flex.compile().variant) == "Variant()"


@pytest.mark.parametrize(
    "normalizer", [softmax_plus(2.0), softpick(), sigmoid_attention(), silu_attention(3.0)]
)
def test_copies_and_pickles_keep_it(normalizer: Any, seed: int) -> None:
    attn, (q, k, v) = fa4flex.compile(normalizer=normalizer), three()
    for other in (copy.deepcopy(attn), pickle.loads(pickle.dumps(attn))):
        torch.testing.assert_close(other(q, k, v), attn(q, k, v))


def test_copies_capture_tensors_of_their_own(seed: int) -> None:
    scale, (q, k, v) = torch.tensor(2.0), three()
    attn = fa4flex.compile(normalizer=Normalizer.elementwise(lambda s, b, h, q, kv: s * scale))
    other, before = copy.deepcopy(attn), attn(q, k, v)
    scale.fill_(3.0)
    torch.testing.assert_close(other(q, k, v), before)
    torch.testing.assert_close(attn(q, k, v), before * 1.5)


def elementwise(function: Any, **more: Any) -> Any:
    return fa4flex.compile(normalizer=Normalizer.elementwise(function), **more)


def picked(**more: Any) -> Any:
    return fa4flex.compile(normalizer=softpick, **more)


def torch_sigmoid(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return torch.sigmoid(score)


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda: fa4flex.compile(normalizer=causal), InputError, "given as a normaliser"),
        (lambda: fa4flex.compile(normalizer=lambda s, b, h, q, kv: s), InputError, "Normalizer.elementwise"),
        (lambda: fa4flex.compile(normalizer="entmax"), UnsupportedError, "sort of each row"),
        (lambda: fa4flex.compile(normalizer="softmax"), InputError, "given as a normaliser"),
        (lambda: fa4flex.compile(softpick), InputError, "pass it as normalizer="),
        (lambda: fa4flex.compile(mask=softpick()), InputError, "pass it as normalizer="),
        (lambda: fa4flex.compile(output_mod=softpick()), InputError, "pass it as normalizer="),
        (lambda: elementwise(causal), InputError, "pass it as mask="),
        (lambda: elementwise(head_scale(torch.ones(2))), InputError, "pass it as output_mod="),
        (lambda: elementwise(lambda s, b, h, q, kv: s > 0), TraceError, "returned a bool"),
        (lambda: elementwise(lambda b, h, q, kv: b), TraceError, "takes 4 positional"),
        (lambda: Normalizer.softmax(-1.0), InputError, "0 or more"),
        (lambda: Normalizer.softmax(torch.tensor(1.0)), InputError, "a learned one is a sink"),
        (lambda: Normalizer.softmax(math.inf), InputError, "a finite number"),
        (lambda: Normalizer.softpick(0.0), InputError, "above 0"),
        (lambda: picked(sinks=torch.zeros(2)), UnsupportedError, "sinks with"),
        (lambda: elementwise(torch_sigmoid, backend="flex"), UnsupportedError, "softmax alone"),
        (lambda: picked(backend="flex"), UnsupportedError, "softmax alone"),
        (lambda: picked().parallel(None), UnsupportedError, "several ranks"),
    ],
)  # fmt: skip
def test_refusals(make: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        make()


@pytest.mark.parametrize("name", UNSUMMED)
def test_what_a_call_may_not_ask_for(name: str, seed: int) -> None:
    normalizer, _ = NORMALIZERS[name](Sizes(heads=2), leaves(torch.float64))
    attn, (q, k, v) = fa4flex.compile(normalizer=normalizer), three()
    module = fa4flex.nn.Attention(normalizer=normalizer)
    for call in (attn, module, lambda *x, **o: fa4flex.attention(*x, normalizer=normalizer, **o)):
        with pytest.raises(UnsupportedError, match="sums no exponentials"):
            call(q, k, v, return_lse=True)
    with pytest.raises(UnsupportedError, match="sinks with"):
        attn(q, k, v, sinks=torch.zeros(2))
    with pytest.raises(UnsupportedError, match="sinks with"):
        fa4flex.nn.Attention(normalizer=normalizer, sinks=2)(q, k, v)


def test_a_call_that_does_not_add_the_constant_is_refused() -> None:
    variant = fa4flex.compile(normalizer=softmax_plus(2.0)).variant
    with pytest.raises(UnsupportedError, match="does not add it"):
        variant.logits()


def test_layers_of_engines_refuse_it(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="normaliser"):
        assign("softpick")


def test_a_table_of_other_heads_is_refused() -> None:
    normalizer = Normalizer.elementwise(alibi(torch.ones(3)))
    with pytest.raises(InputError, match="a table of 3 heads"):
        fa4flex.attention(*three(), normalizer=normalizer)


def test_explanations_and_listings() -> None:
    said = str(fa4flex.compile(alibi, causal, normalizer=sigmoid_attention(-2.0)).explain(16))
    for words in ("weights(score) v", "normalizer  sigmoid_attention(-2.0)", "no LSE", "score' = sigmoid("):
        assert words in said, said
    said = str(fa4flex.compile(normalizer=softpick()).explain(16))
    assert "max(exp(score) - 1, 0) / (sum |exp(score) - 1| + 1e-06); no LSE" in said
    said = " ".join(fa4flex.compile(normalizer=softpick()).explain(16, arch="sm_90a").split())
    assert "softpick weights" in said and "tile by tile in PyTorch operations on the device" not in said
    said = str(fa4flex.compile(normalizer=softmax_plus(2.0)).explain(16))
    assert "(sum exp(score) + 2), by sinks of log 2" in said
    assert "normalizer" not in str(fa4flex.compile(mask=causal).explain(16))
    attn = fa4flex.compile(normalizer=sigmoid_attention(-2.0))
    assert "sigmoid" in attn.source("trace") and "sigmoid" in attn.source("gradient")
    with pytest.raises(UnsupportedError, match="softmax alone"):
        attn.source("flex")


@pytest.mark.parametrize("name", NORMALIZERS)
def test_checks_against_the_formula(name: str, seed: int) -> None:
    from fa4flex.check import check

    normalizer, _ = NORMALIZERS[name](Sizes(heads=2), leaves(torch.float32))
    report = check(fa4flex.compile(mask=causal, normalizer=normalizer), 40)
    assert report.passed, str(report)


# --- programs -----------------------------------------------------------------------------------------------


def test_programs_of_other_weights_are_others() -> None:
    """The text that stands for a program brings back its weights; equal functions do not make equal ones."""
    function = lambda s, b, h, q, kv: s * 2.0  # noqa: E731
    variants = [
        fa4flex.compile(function).variant,
        fa4flex.compile(normalizer=Normalizer.elementwise(function)).variant,
        fa4flex.compile(function, normalizer=Normalizer.softpick()).variant,
        fa4flex.compile(function, normalizer=Normalizer.softpick(0.5)).variant,
    ]
    programs = [publish(bind(v).trace.facts, v.schedule, v.precision) for v in variants]
    assert len({p.text for p in programs}) == len({p.facts.key for p in programs}) == 4
    for program in programs:
        assert read(program.text).facts == program.facts


def test_one_caller_of_changing_normalisers(seed: int) -> None:
    """Launches and traces of one call are not found by one of other weights."""
    caller, (q, k, v) = fa4flex.compile()._caller, three()
    function = lambda s, b, h, q, kv: s * 2.0  # noqa: E731
    made = [
        {"score_mod": function},
        {"normalizer": Normalizer.elementwise(function)},
        {"score_mod": function, "normalizer": softpick(0.5)},
        {"score_mod": function, "normalizer": softpick(0.1)},
        {"score_mod": function, "normalizer": softmax_plus(3.0)},
        {"score_mod": function, "normalizer": softmax_plus(5.0)},
    ]
    with torch.no_grad():
        for which in (0, 1, 0, 1, 1, 2, 3, 3, 2, 0, 4, 5, 4, 4, 0, 0, 4):
            out = fa4flex.Attention(fa4flex.compile(**made[which]).variant, caller)(q, k, v)
            given = made[which].get("score_mod"), None
            assert close(
                out, reference.attention(q, k, v, *given, normalizer=made[which].get("normalizer"))[0]
            )


# --- derivatives --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", UNSUMMED)
def test_other_derivatives_are_refused(name: str, seed: int) -> None:
    normalizer, _ = NORMALIZERS[name](Sizes(heads=2), leaves(torch.float64))
    attn, (q, k, v) = fa4flex.compile(normalizer=normalizer), three()
    (first,) = torch.autograd.grad(attn(q, k, v).square().sum(), q, create_graph=True)
    with pytest.raises(UnsupportedError, match="second derivatives"):
        first.sum().backward()
    with pytest.raises(UnsupportedError, match="forward-mode"):
        torch.func.jvp(attn, (q, k, v), (q, k, v))


def test_other_derivatives_of_softmax_plus(seed: int) -> None:
    q, k, v = three()
    attn = fa4flex.compile(normalizer=softmax_plus(2.0))
    exact = lambda *x: reference.attention(*x, normalizer=softmax_plus(2.0))[0]  # noqa: E731
    mine, theirs = (torch.func.jvp(f, (q, k, v), (k, v, q))[1] for f in (attn, exact))
    assert close(mine, theirs)


def test_batches_of_upstream_gradients(seed: int) -> None:
    q, k, v = three(length=3)
    mine, theirs = (
        torch.autograd.functional.jacobian(f, q, vectorize=True)
        for f in (
            lambda x: fa4flex.attention(x, k, v, normalizer=sigmoid_attention),
            lambda x: reference.attention(x, k, v, normalizer=sigmoid_attention())[0],
        )
    )
    assert close(mine, theirs)


# --- modules ------------------------------------------------------------------------------------------------


def test_modules(seed: int) -> None:
    def open_bias(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, bias: Any) -> Any:
        return torch.sigmoid(score + bias[h])

    normalizer = Normalizer.elementwise(open_bias)
    module = fa4flex.nn.Attention(mask=causal, normalizer=normalizer, parameters={"bias": torch.ones(2)})
    q, k, v = three(dtype=torch.float32)
    with torch.no_grad():
        module.bias.copy_(torch.tensor([0.5, -2.0]))
    out = module(q, k, v)

    def closed(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return torch.sigmoid(score + module.bias[h])

    exact, _ = reference.attention(q, k, v, None, causal, normalizer=Normalizer.elementwise(closed))
    assert close(out.double(), exact, 1e-6)
    for mine, theirs in zip(
        *(torch.autograd.grad(x.sum(), (q, module.bias)) for x in (out, exact)), strict=True
    ):
        assert close(mine.double(), theirs.double(), 1e-5)
    plus = fa4flex.nn.Attention(normalizer=softmax_plus(2.0), sinks=2)
    exact, _ = reference.attention(q, k, v, sinks=torch.zeros(2), normalizer=softmax_plus(2.0))
    assert close(plus(q, k, v).double(), exact, 1e-6)
    assert "softmax_plus(2.0)" in repr(plus)


# --- torch.compile and export -------------------------------------------------------------------------------


def compiled(function: Any, backend: str = "aot_eager") -> Any:
    torch.compiler.reset()  # else cases count as recompilations of one function
    return torch.compile(function, fullgraph=True, backend=backend)


@pytest.mark.parametrize("name", ["softmax_plus", "softpick", "sigmoid", "biased"])
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_calls_of_every_kind(kind: str, name: str, seed: int) -> None:
    leaf, sizes = leaves(torch.float64), sizes_of(kind, Sizes())
    normalizer, learned = NORMALIZERS[name](sizes, leaf)
    made = KINDS[kind](sizes, leaf, {"mask": causal, "normalizer": normalizer})
    agree(made.attend(*made.qkv, wrap=compiled), made.oracle(made.qkv), [*made.qkv, *learned])


@pytest.mark.parametrize("name", ["softmax_plus", "softpick", "biased"])
def test_compiled_by_inductor(name: str, seed: int) -> None:
    leaf, sizes = leaves(torch.float32), Sizes()
    normalizer, learned = NORMALIZERS[name](sizes, leaf)
    made = dense(sizes, leaf, {"mask": causal, "normalizer": normalizer})
    own = made.attend(*made.qkv)
    other = made.attend(*made.qkv, wrap=lambda f: compiled(f, backend="inductor"))
    assert close(other[0], own[0], 1e-6)
    found, wanted = (torch.autograd.grad(x[0].sum(), [*made.qkv, *learned]) for x in (other, own))
    for mine, theirs in zip(found, wanted, strict=True):
        assert close(mine, theirs, 1e-5)


class Weighed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.tensor([0.5, 2.0]))
        self.attn = fa4flex.compile(mask=causal, normalizer=Normalizer.elementwise(self.weight))

    def weight(self, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return torch.sigmoid(score + self.bias[h])

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        result: Tensor = self.attn(q, k, v)
        return result


def test_exported(tmp_path: Path, seed: int) -> None:
    module = Weighed()
    qkv = tuple(torch.randn(1, 2, 6, 4) for _ in range(3))
    exported = torch.export.export(module, qkv, strict=True)
    torch.export.save(exported, tmp_path / "weighed.pt2")
    loaded = torch.export.load(tmp_path / "weighed.pt2")
    torch.testing.assert_close(loaded.module()(*qkv), module(*qkv))


# --- backends -----------------------------------------------------------------------------------------------


def test_softmax_plus_through_flex_attention(seed: int) -> None:
    leaf, sizes = leaves(torch.float32), Sizes(dim=16, dim_v=16)
    made = dense(sizes, leaf, {"mask": causal, "normalizer": softmax_plus(2.0)})
    attn = fa4flex.compile(mask=causal, normalizer=softmax_plus(2.0), backend="flex")
    out, lse = attn(*made.qkv, return_lse=True)
    exact = made.oracle(made.qkv)
    assert close(out.double(), exact[0], 1e-5) and close(lse.double(), exact[1], 1e-5)


def test_elementwise_outputs_over_parts_are_added(seed: int) -> None:
    q, k, v = three(length=9)
    attn = fa4flex.compile(normalizer=silu_attention(9.0))
    parts = [attn(q, k[:, :, part], v[:, :, part]) for part in (slice(4), slice(4, 9))]
    assert close(parts[0] + parts[1], attn(q, k, v))


def test_autocast_and_default_devices(seed: int) -> None:
    for normalizer in (softmax_plus(2.0), softpick(), sigmoid_attention()):
        attn, (q, k, v) = fa4flex.compile(normalizer=normalizer), three(dtype=torch.float32)
        with torch.autocast("cpu", torch.bfloat16):
            out = attn(q, k, v)
        assert out.dtype == torch.bfloat16
        out.float().sum().backward()
        assert q.grad is not None
        wanted = attn(q, k, v)
        with torch.device("meta"):
            torch.testing.assert_close(attn(q, k, v), wanted)


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_jagged(name: str, seed: int) -> None:
    sizes = Sizes(heads=2)
    normalizer, _ = NORMALIZERS[name](sizes, leaves(torch.float64))
    parts = [[torch.randn(2, n, 4, dtype=torch.float64) for n in (3, 6)] for _ in range(3)]
    nested = [
        torch.nested.nested_tensor([x.transpose(0, 1) for x in part], layout=torch.jagged).transpose(1, 2)
        for part in parts
    ]
    out = fa4flex.compile(normalizer=normalizer)(*nested)
    for n, own in enumerate(out.transpose(1, 2).unbind()):
        q, k, v = (part[n][None] for part in parts)
        function = reference.normalizer_of_sequence(normalizer, n)
        assert close(own.transpose(0, 1)[None], reference.attention(q, k, v, normalizer=function)[0])
