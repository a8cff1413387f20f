"""Things that a call brings or leaves out, changed between calls of one attention: each field of a variant
and each parameter of a call, at every door. A field or parameter without a case fails."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import pytest
import torch
from known_calls import differing
from launch_changes import by_name, calls_on_gpu
from test_gpu_calls import Recorder
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask

import fa4flex
from fa4flex import BlockMap, KVScales, Lists, Paging, Precision, Schedule, Varlen, reference
from fa4flex.runtime.launch import Caller
from fa4flex.variant import Variant, at_call, changed, compose
from fa4flex.variants import softmax_plus

S, HEADS, WIDTH, BLOCK = 64, 2, 16, 16
ORDER = 0, 1, 0, 0, 1, 1, 1, 0, 1
"""Calls without (0) and with (1) the change: each follows the other, and itself often enough to be found by
every way that there is."""

Tensors = tuple[Tensor, Tensor, Tensor]


# --- cases ------------------------------------------------------------------------------------------------


def louder(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + (h + 1) * 0.25 * (q_idx - kv_idx)


def near(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx - kv_idx < 20) & (kv_idx - q_idx < 9)


def gained(out: Any, b: Any, h: Any, q_idx: Any, d_idx: Any) -> Any:
    return out * (h + 2) + 0.125 * d_idx


def striped(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx + kv_idx) % 3 > 0


def block_map(seed: int, heads: int = 1) -> BlockMap:
    classes = torch.randint(0, 3, (1, heads, 4, 4), generator=torch.Generator().manual_seed(seed))
    classes[..., 0] = 2  # each query sees a key
    return BlockMap.from_dense(classes.to(torch.uint8), BLOCK)


def lists(seed: int, heads: int = 1, **beside: int) -> Lists:
    made = torch.Generator().manual_seed(seed)
    ids = torch.randint(-1, 8, (1, heads, 4, 3), generator=made)
    ids[..., 0] = 0  # each query sees a key
    return Lists(ids, kv_len=S, unit=8, queries=BLOCK, **beside)


def torch_mask(mod: Callable[..., Any] = striped) -> BlockMask:
    return create_block_mask(mod, 1, 1, S, S, "cpu", BLOCK)


SINKS = torch.tensor([0.5, 2.0])
DROPOUT = fa4flex.Dropout(0.4, torch.tensor(7))
FIELDS: dict[str, Any] = {
    "score_mod": louder,
    "mask": near,
    "blocks": block_map(1),
    "sinks": SINKS,
    "scale": 0.75,
    "layout": "bshd",
    "precision": Precision(output=torch.bfloat16),
    "schedule": Schedule(tile=(32, 16)),
    "backend": "flex",
    "output_mod": fa4flex.as_output(gained),
    "dropout": DROPOUT,
    "normalizer": softmax_plus(1.5),
}
"""A value other than the default, for each field of a variant that is given."""

COMPOSED: dict[str, dict[str, Any]] = {
    "plain": {},
    "a score mod": {"score_mod": louder},
    "a mask": {"mask": near},
    "an output function": {"output_mod": lambda out, b, h, q_idx, d_idx: out - 0.5 * h},
    "a map of its own": {"blocks": block_map(2)},
    "all of them": {"score_mod": louder, "mask": near, "sinks": -SINKS, "scale": 0.3},
}
"""Other fields of the variants."""


@dataclass(frozen=True)
class Step:
    """A call: its tensors, its keyword arguments, and q, k, v of the dense call that it is."""

    qkv: Tensors
    options: dict[str, Any] = field(default_factory=dict)
    dense: Tensors | None = None


def tensors(seed: int = 0, length: int = S, dtype: torch.dtype = torch.float64) -> Tensors:
    made = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, HEADS, length, WIDTH, generator=made).to(dtype) for _ in range(3))
    return q, k, v


QKV = tensors()
Q, K, V = QKV
PLAIN = Step(QKV)


def padded() -> Step:
    """All queries, and the first 40 keys."""
    return Step(QKV, {"varlen": Varlen(seqused_k=torch.tensor([40]))}, (Q, K[:, :, :40], V[:, :, :40]))


def paged() -> Step:
    """The same in pages of 8 keys."""
    table = torch.tensor([[3, 1, 6, 0, 5]])
    caches = [torch.zeros(7, 8, HEADS, WIDTH, dtype=x.dtype) for x in (K, V)]
    for cache, x in zip(caches, (K, V), strict=True):
        cache[table[0]] = x[0, :, :40].transpose(0, 1).unflatten(0, (5, 8))
    return Step((Q, *caches), {"paging": Paging(table, torch.tensor([40]))}, (Q, K[:, :, :40], V[:, :, :40]))


def of_eight_bits() -> Step:
    k, v = (x.to(torch.float8_e4m3fn) for x in (K, V))
    scales = KVScales(torch.tensor([0.5, 3.0]), torch.tensor([2.0, 0.25]))
    by_head = scales.k.double().view(1, -1, 1, 1), scales.v.double().view(1, -1, 1, 1)
    return Step((Q, k, v), {"kv_scales": scales}, (Q, k.double() * by_head[0], v.double() * by_head[1]))


def latent() -> Step:
    """Rows whose first 12 columns are the values, one head for all queries."""
    rows = K[:, :1]
    given = fa4flex.Latent(rows.transpose(1, 2), 12, 4)
    return Step((Q, given, None), {"scale": 0.3}, (Q, rows, rows[..., :12]))  # type: ignore[arg-type]


CALLS: dict[str, Callable[[], list[Step]]] = {
    "q": lambda: [Step((2 * Q, K, V)), Step((Q.float(), K.float(), V.float()))],
    "k": lambda: [Step((Q, -K, V)), Step((Q, K[:, :1], V[:, :1])), latent()],
    "v": lambda: [Step((Q, K, 3 * V)), Step((Q, K, V[..., :8]))],
    "varlen": lambda: [padded()],
    "paging": lambda: [paged()],
    "kv_scales": lambda: [of_eight_bits()],
    "blocks": lambda: [
        Step(QKV, {"blocks": x})
        for x in (
            block_map(3),
            block_map(4, HEADS),
            torch_mask(),
            torch_mask(near),
            lists(6, HEADS, window=9, sinks=3, tail=1),
        )
    ],
    "scale": lambda: [Step(QKV, {"scale": 0.75})],
    "sinks": lambda: [Step(QKV, {"sinks": SINKS})],
    "dropout": lambda: [Step(QKV, {"dropout": x}) for x in (DROPOUT, fa4flex.Dropout(0.7, -1), 0.0)],
    "return_lse": lambda: [Step(QKV, {"return_lse": True})],
    "return_aux": lambda: [Step(QKV, {"return_aux": x}) for x in (("lse",), ("lse", "max_logit"))],
}
"""For each parameter of a call, calls that bring it."""


def exact(variant: Variant, step: Step, statistics: dict[str, Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """out and lse of the formula, [B, H, S, D], and others put into `statistics`."""
    given = {name: x for name, x in step.options.items() if name in ("blocks", "scale", "sinks", "dropout")}
    if isinstance(given.get("blocks"), BlockMask):
        own, mod = BlockMap.from_torch(given["blocks"])
        given, variant = given | {"blocks": own}, changed(variant, mask=fa4flex.as_mask(mod))
    variant = at_call(variant, **given)
    q, k, v = step.qkv if step.dense is None else step.dense
    sinks = None if variant.sinks is None else variant.sinks.now()
    given = {"scale": variant.scale, "sinks": sinks, "output_mod": variant.output_mod}
    given["dropout"] = variant.dropout
    given["normalizer"] = variant.normalizer
    given["statistics"] = statistics
    return reference.attention(q, k, v, variant.score_mod, variant.allowed, **given)


TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}


@dataclass
class Case:
    """A variant and a call of it, and their exact results, which are computed once."""

    variant: Variant
    step: Step

    @cached_property
    def exact(self) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        statistics: dict[str, Tensor] = {}
        return *exact(self.variant, self.step, statistics), statistics

    def by(self, attn: Any) -> None:
        """Check what `attn` gives for this call."""
        self.check(attn(*turned(self.variant, self.step), **self.step.options))

    def check(self, found: Any) -> None:
        (out, lse, statistics), options = self.exact, self.step.options
        aux = options.get("return_aux")
        found, found_lse = found if options.get("return_lse") or aux else (found, None)
        found = found.transpose(1, 2) if self.variant.layout == "bshd" else found
        assert found.dtype == self.variant.precision.output_dtype(self.step.qkv[0].dtype)
        close = TOLERANCES[found.dtype]
        if aux:
            of_heads, found_lse = found_lse.max_logit, found_lse.lse
            assert (of_heads is None) == ("max_logit" not in aux)
            if of_heads is not None:
                torch.testing.assert_close(of_heads.double(), statistics["max_logit"], atol=close, rtol=close)
        torch.testing.assert_close(found.double(), out, atol=close, rtol=close)
        if found_lse is not None:
            torch.testing.assert_close(found_lse.double(), lse, atol=close, rtol=close)


def plain(backend: str, others: dict[str, Any]) -> Step:
    """A call that brings nothing. Torch compiles kernels for CPUs in float32, which takes seconds each."""
    compiled = backend == "flex" and not others
    return Step((Q.float(), K.float(), V.float())) if compiled else PLAIN


def turned(variant: Variant, step: Step) -> Tensors:
    q, k, v = step.qkv
    turn = (lambda x: x.transpose(1, 2) if isinstance(x, Tensor) else x) if variant.layout == "bshd" else None
    return (q, k, v) if turn is None else tuple(map(turn, step.qkv))  # type: ignore[return-value]


# --- every field, every parameter -------------------------------------------------------------------------


def test_each_field_and_parameter_has_a_case() -> None:
    """A new one needs a case here, and a place in what recognises calls."""
    assert {f.name for f in fields(Variant) if f.init} == set(FIELDS)
    parameters = set(inspect.signature(fa4flex.Attention.__call__).parameters) - {"self"}
    assert parameters == set(CALLS)
    of_modules = set(inspect.signature(fa4flex.nn.Attention.forward).parameters) - {"self"}
    assert of_modules <= set(CALLS)
    options = set(inspect.signature(fa4flex.attention).parameters) - {"composition"}
    assert options <= set(CALLS)
    own = set(inspect.signature(fa4flex.flex_attention).parameters) - {"query", "key", "value"}
    assert own == set(BY_FLEX_ATTENTION) | {"enable_gqa"}


def other_fields(name: str) -> Iterator[dict[str, Any]]:
    for others in COMPOSED.values():
        yield {key: x for key, x in others.items() if key != name}


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("backend", ("auto", "flex"))
def test_fields_of_one_attention_change(name: str, backend: Any) -> None:
    if (name, backend) == ("dropout", "flex"):
        pytest.skip("torch's flex_attention has no dropout, which test_dropout_doors.py sees refused")
    for others in other_fields(name) if (name, backend) != ("backend", "flex") else ():
        base = compose(**others, **({} if name == "backend" else {"backend": backend}))
        value = getattr(compose(**{name: FIELDS[name]}), name)
        caller, step = Caller(), plain(backend, others)
        pair = [Case(variant, step) for variant in (base, changed(base, **{name: value}))]
        for which in ORDER:
            pair[which].by(fa4flex.Attention(pair[which].variant, caller))


PRECISIONS: dict[str, Precision] = {
    "compute": Precision(compute="float64"),
    "output": Precision(output=torch.bfloat16),
    "skip": Precision(skip=0.3),
    "qk": Precision(qk="nvfp4"),
    "pv": Precision(qk="int8", pv="float8_e4m3"),
    "promote": Precision(qk="int8", pv="float8_e4m3", promote=False),
    "tolerance": Precision(tolerance=0.2),
}
"""A value other than the default, for each field of a precision that has one."""


def rounded(precision: Precision, qkv: Tensors, variant: Variant) -> tuple[Tensor, Tensor]:
    """out and lse of the formula over what a precision makes of the tensors."""
    if not precision.coded:
        return exact(variant, Step(qkv))
    if precision.tolerance:
        choice = fa4flex.Attention(variant).choose(*qkv, tolerance=precision.tolerance)
        q, k, v, bias = choice.dequantize()
    else:
        codes = fa4flex.quantize(*qkv, qk=precision.qk, pv=precision.pv)  # type: ignore[arg-type]
        q, k, v, bias = codes.dequantize()
    assert bias is not None
    scale = q.shape[-1] ** -0.5 if variant.scale is None else variant.scale
    shift = fa4flex.as_score(lambda s, b, h, i, j: s + scale * bias[b, h, i])
    mod = shift if variant.score_mod is None else shift >> variant.score_mod
    return exact(changed(variant, score_mod=mod), Step((q, k, v)))


@pytest.mark.parametrize("name", PRECISIONS)
def test_fields_of_a_precision_change(name: str) -> None:
    """Between each two precisions, calls and modules give what each alone gives."""
    assert set(PRECISIONS) == {f.name for f in fields(Precision)} - {"backward"}
    made = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, HEADS, S, 32, generator=made) for _ in range(3))
    for other in (Precision(), PRECISIONS["pv"]):
        for others in other_fields("precision"):
            pair, caller = [compose(**others, precision=x) for x in (other, PRECISIONS[name])], Caller()
            for which in ORDER:
                variant = pair[which]
                found, of_rows = fa4flex.Attention(variant, caller)(q, k, v, return_lse=True)
                out, lse = rounded(variant.precision, (q, k, v), variant)
                assert found.dtype == variant.precision.output_dtype(q.dtype)
                close = TOLERANCES[found.dtype] if not variant.precision.skip else 0.3 * 8
                torch.testing.assert_close(found.double(), out, atol=close, rtol=close)
                if not variant.precision.skip:
                    torch.testing.assert_close(of_rows.double(), lse, atol=1e-5, rtol=1e-5)


Door = Callable[[Variant], Callable[..., Any]]


def in_a_module(variant: Variant) -> Callable[..., Any]:
    sinks = None if variant.sinks is None else variant.sinks.now()
    given = {f.name: getattr(variant, f.name) for f in fields(Variant) if f.init}
    return fa4flex.nn.Attention(given.pop("score_mod"), given.pop("mask"), **given | {"sinks": sinks})


def at_once(variant: Variant) -> Callable[..., Any]:
    given = {f.name: getattr(variant, f.name) for f in fields(Variant) if f.init}

    def attend(*qkv: Tensor, **options: Any) -> Any:
        blocks = options.get("blocks")
        mask = {"mask": None} if isinstance(blocks, BlockMask) and blocks.mask_mod is not None else {}
        return fa4flex.attention(*qkv, **given | mask | options)

    return attend


DOORS: dict[str, Door] = {
    "compile": lambda variant: fa4flex.Attention(variant, Caller()),
    "nn": in_a_module,
    "attention": at_once,
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("backend", ("auto", "flex"))
@pytest.mark.parametrize("door", DOORS)
def test_what_a_call_brings_changes(door: str, backend: Any, name: str) -> None:
    taken = inspect.signature(fa4flex.nn.Attention.forward).parameters
    if (door == "nn" and name not in taken) or (name in ("kv_scales", "dropout") and backend == "flex"):
        pytest.skip("this door has no such parameter")
    for others in other_fields(name):
        variant = compose(**others, backend=backend)
        for step in CALLS[name]():
            attn, pair = DOORS[door](variant), (Case(variant, PLAIN), Case(variant, step))
            for which in ORDER:
                pair[which].by(attn)


BY_FLEX_ATTENTION: dict[str, Any] = {
    "score_mod": louder,
    "block_mask": torch_mask(),
    "scale": 0.75,
    "return_lse": True,
    "kernel_options": {"BLOCK_M": 32, "BLOCK_N": 16},
    "return_aux": AuxRequest(lse=True),
}


@pytest.mark.filterwarnings("ignore:return_lse is deprecated")
@pytest.mark.parametrize("name", BY_FLEX_ATTENTION)
def test_what_flex_attention_is_given_changes(name: str) -> None:
    for other in ({}, {"score_mod": louder}, {"block_mask": torch_mask(near)}):
        for which in ORDER:
            given = {**other, name: BY_FLEX_ATTENTION[name]} if which else other
            found = fa4flex.flex_attention(Q.contiguous(), K, V, **given)
            found = found[0] if isinstance(found, tuple) else found
            mask = given.get("block_mask")
            variant = compose(given.get("score_mod"), mask, scale=given.get("scale"))
            Case(variant, PLAIN).check(found)


@pytest.mark.parametrize("backend", ("auto", "flex"))
def test_gradients_follow_what_each_call_brought(backend: Any) -> None:
    attn = fa4flex.compile(backend=backend)
    steps = [PLAIN, *(Step(QKV, {"blocks": block_map(n)}) for n in (1, 2))]
    for which in (0, 1, 0, 1, 1, 2, 2, 0, 0, 1):
        step = steps[which]
        qkv = [x.clone().requires_grad_() for x in QKV]
        got = torch.autograd.grad(attn(*qkv, **step.options).sin().sum(), qkv)
        want = torch.autograd.grad(exact(attn.variant, replace(step, qkv=tuple(qkv)))[0].sin().sum(), qkv)
        torch.testing.assert_close(got, want, atol=1e-12, rtol=1e-12)


# --- as on a GPU ------------------------------------------------------------------------------------------


class Named(Recorder):
    """Recorder that also tells which kernel each launch was of."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[str] = []

    def compile(self, source: Any, *given: Any, **more: Any) -> Any:
        kernel = super().compile(source, *given, **more)
        if source.name in ("sequences", "block tables"):
            return kernel
        inner, key = kernel.launch, f"{source.key} {given}"

        def launch(*arguments: Any) -> None:
            self.kernels.append(key)
            inner(*arguments)

        return type("Kernel", (), {"launch": staticmethod(launch)})


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Named:
    named = Named()
    monkeypatch.setattr("launch_changes.Recorder", lambda: named)
    calls_on_gpu(monkeypatch)
    return named


def launched_as_alone(recorder: Named, now: Callable[[], Any], alone: Callable[[], Any]) -> None:
    """`now` launches what a call without anything kept, `alone`, does."""
    launched = []
    for call in (now, alone):
        call()
        arguments = by_name(recorder.launches[-1])
        scalars = arguments["scalars"]
        arguments["scalars"] = None if scalars is None else list(scalars)
        launched.append((recorder.kernels[-1], arguments))
    (kernel, given), (expected_kernel, expected) = launched
    assert kernel == expected_kernel
    assert differing(given, expected) == []


BF16 = tuple(x.bfloat16() for x in tensors(5, 192))


def larger(x: Any) -> Any:
    """The same for the tensors of a GPU's calls."""
    if isinstance(x, BlockMap):
        return replace(x, block_size=(48, 48), q_len=192, kv_len=192)
    return Precision(output=torch.float32) if isinstance(x, Precision) else x


ON_GPU: dict[str, list[dict[str, Any]]] = {
    "varlen": [{"varlen": Varlen(seqused_k=torch.tensor([40], dtype=torch.int32))}],
    "blocks": [{"blocks": larger(block_map(3))}, {"blocks": larger(block_map(4, HEADS))}],
    "scale": [{"scale": 0.75}, {"scale": -0.75}],
    "sinks": [{"sinks": SINKS}],
    "return_lse": [{"return_lse": True}],
    "return_aux": [{"return_aux": ("lse",)}, {"return_aux": ("lse", "max_logit")}],
}


@pytest.mark.parametrize("trains", (False, True))
@pytest.mark.parametrize("name", [x for x in FIELDS if x != "backend"])
def test_fields_change_on_a_gpu(recorder: Named, name: str, trains: bool) -> None:
    schedule = Schedule(deterministic=True), Schedule(order="row_major")
    value = schedule[not trains] if name == "schedule" else larger(FIELDS[name])
    qkv = [x.clone().requires_grad_(trains) for x in BF16]
    for others in other_fields(name):
        base = compose(**{key: larger(x) for key, x in others.items()})
        pair = base, changed(base, **{name: getattr(compose(**{name: value}), name)})
        caller = Caller()
        for which in ORDER:
            variant = pair[which]
            now = [x.transpose(1, 2).contiguous() if variant.layout == "bshd" else x for x in qkv]
            launched_as_alone(
                recorder,
                lambda v=variant, x=now, caller=caller: fa4flex.Attention(v, caller)(*x),
                lambda v=variant, x=now: fa4flex.Attention(v, Caller())(*x),
            )


@pytest.mark.parametrize("trains", (False, True))
@pytest.mark.parametrize("name", ("qk", "pv"))
def test_rounding_changes_on_a_gpu(recorder: Named, name: str, trains: bool) -> None:
    made = torch.Generator().manual_seed(3)
    qkv = [torch.randn(1, HEADS, 192, 32, generator=made).bfloat16().requires_grad_(trains) for _ in range(3)]
    for others in other_fields("blocks"):
        given = {key: larger(x) for key, x in others.items() if key != "blocks"}
        pair = [compose(**given, precision=x) for x in (Precision(qk="int8"), PRECISIONS[name])]
        caller = Caller()
        for which in ORDER:
            launched_as_alone(
                recorder,
                lambda v=pair[which], caller=caller: fa4flex.Attention(v, caller)(*qkv),
                lambda v=pair[which]: fa4flex.Attention(v, Caller())(*qkv),
            )


@pytest.mark.parametrize("trains", (False, True))
@pytest.mark.parametrize("name", ON_GPU)
def test_what_a_call_brings_changes_on_a_gpu(recorder: Named, name: str, trains: bool) -> None:
    qkv = [x.clone().requires_grad_(trains) for x in BF16]
    for others in other_fields("blocks" if name in ("varlen", "blocks") else ""):
        variant = compose(**{key: larger(x) for key, x in others.items()})
        for options in ON_GPU[name]:
            attn = fa4flex.Attention(variant, Caller())
            for which in ORDER:
                given = options if which else {}
                launched_as_alone(
                    recorder,
                    lambda given=given, attn=attn: attn(*qkv, **given),
                    lambda given=given, v=variant: fa4flex.Attention(v, Caller())(*qkv, **given),
                )


@pytest.mark.parametrize("name", [x for x in FIELDS if x not in ("score_mod", "mask", "sinks")])
def test_modules_with_parameters_keep_every_field(name: str) -> None:
    def score(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, bias: Any) -> Any:
        return s + bias[h]

    module = fa4flex.nn.Attention(score, near, parameters={"bias": HEADS}, **{name: FIELDS[name]})
    assert getattr(module.variant, name) == getattr(compose(**{name: FIELDS[name]}), name)
