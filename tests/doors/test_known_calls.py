"""Calls that look like an earlier one, of other extents, contents and objects: they are launched as each is
alone; and what they are told apart by, each component changed alone. Kernels are left out, and CPU tensors
stand for those of a GPU."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from known_calls import (
    KINDS,
    TABLE,
    WINDOW,
    Path,
    Step,
    attention,
    dense,
    differing,
    heads,
    launched,
    of_long_queries,
    paged,
    turned,
    used,
    used_both,
)
from launch_changes import HEADS, calls_on_gpu, elsewhere, shifted
from test_gpu_calls import Recorder
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import fa4flex
from fa4flex import BlockMap, InputError, KVScales, Paging, Varlen
from fa4flex.errors import StateError
from fa4flex.kernels.plan.arguments import FORWARD
from fa4flex.runtime import launch, recent
from fa4flex.runtime.call import Call
from fa4flex.runtime.cuda import known
from fa4flex.runtime.cuda.known import LONG_ROW, MOST_OF_ONE
from fa4flex.runtime.key_sources import KeySource
from fa4flex.variants import causal, document


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return calls_on_gpu(monkeypatch)


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Keys of the calls that no path served, whose launch was looked for."""
    keys: list[Any] = []
    run = launch.run

    def counted(now: Any, q: Tensor, kv: KeySource, *given: Any) -> Any:
        keys.append(kv.k)
        return run(now, q, kv, *given)

    monkeypatch.setattr(launch, "run", counted)
    return keys


# --- what is served -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ("bhsd", "bshd"))
@pytest.mark.parametrize("kind", KINDS)
def test_calls_of_other_extents_are_launched_as_each_would_be_alone(
    recorder: Recorder, found: list[Any], kind: str, layout: Any, seed: int
) -> None:
    draw, options = random.Random(seed), {"layout": layout, "sinks": torch.randn(HEADS)}
    attn = attention(**options)
    for n in range(12):
        step = KINDS[kind](draw)
        step = turned(step) if layout == "bshd" else step
        found.clear()
        results = step(attn)
        assert bool(found) == (n < 2), f"call {n}: the first are looked for"
        given = launched(recorder)
        assert results.shape[:-1] == step.qkv[0].shape[:-1] and results is given["out"]
        step(attention(**options))  # engines are published afresh: nothing is ready
        assert differing(given, launched(recorder)) == []


def test_outputs_lie_as_the_queries_of_their_call_do(recorder: Recorder) -> None:
    attn, k, v = fa4flex.compile(), heads(2, 2, 100), heads(2, 2, 100)
    queries = heads(HEADS, 2, 3), heads(3, 2, HEADS).transpose(1, 2), heads(HEADS, 2, 6)[:, :, :3]
    for _ in range(4):
        for q, like in zip(queries[::-1], (queries[0], queries[1], queries[0]), strict=True):
            assert attn(q, k, v).stride() == like.stride()
    assert attn(queries[0][:, :, :2], k, v).shape == (2, HEADS, 2, 64)


def test_a_step_of_decoding_is_served_at_every_length_within_reach(
    recorder: Recorder, found: list[Any]
) -> None:
    attn, q = fa4flex.compile(mask=causal), heads(HEADS, 2, 1)
    k, v = (heads(2, 2, 5000) for _ in "kv")
    for n in range(4080, 4110):
        attn(q, k[:, :, :n], v[:, :, :n])
    assert len(recorder.problems) == 2, "up to 4,096 keys, and beyond"
    assert [k.shape[2] for k in found] == [4080, 4081, 4097, 4098]


def test_prompts_and_single_queries_in_turns_are_served(recorder: Recorder, found: list[Any]) -> None:
    attn, k = fa4flex.compile(mask=causal), heads(2, 1, 4000)
    for n in range(20):
        attn(heads(HEADS, 1, 1 if n % 2 else 100 + n), k[:, :, : 500 + n], k.clone()[:, :, : 500 + n])
    assert len(found) == 4 and len(recorder.problems) == 2


def test_new_captured_tensors_and_sinks_reach_the_launch(recorder: Recorder, found: list[Any]) -> None:
    table, given = [TABLE], random.Random(0)
    sinks = [torch.randn(HEADS)]

    def score(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + table[0][h % 2, kv_idx % 1024]

    attn, step = fa4flex.compile(score, sinks=lambda: sinks[0]), dense(given)
    for n in range(12):
        table[0], sinks[0] = TABLE.clone(), sinks[0].clone()
        step(attn)
        assert launched(recorder)["operands"][0] is table[0] and launched(recorder)["sinks"] is sinks[0]
        assert len(found) == min(n + 1, 2)


def test_documents_in_new_tensors_are_served_with_tables_of_their_own(
    recorder: Recorder, found: list[Any]
) -> None:
    ids = [torch.arange(300) // 50]

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return ids[0][q_idx] == ids[0][kv_idx]

    attn, step = fa4flex.compile(mask=mask), Step((heads(HEADS, 2, 300), *(heads(2, 2, 300) for _ in "kv")))
    for n in range(8):
        ids[0] = ids[0].clone()
        step(attn)
        assert len(recorder.tables) == n + 1 and len(found) == min(n + 1, 2)
        assert recorder.tables[-1][0][0] is ids[0]


def test_gradients_of_other_lengths_are_served(recorder: Recorder, found: list[Any]) -> None:
    attn, draw = fa4flex.compile(mask=causal), random.Random(0)
    for n in range(8):
        step = of_long_queries(draw)
        qkv = tuple(x.requires_grad_() for x in step.qkv)
        out = replace(step, lse=True)(attn)[0] if n % 2 else step(attn)
        assert out.requires_grad and launched(recorder)["lse"] is not None
        gradients = torch.autograd.grad(out, qkv, torch.ones_like(out))
        assert [x.shape for x in gradients] == [x.shape for x in qkv]
    assert len(found) == 3, "the first, and one of each kind of statistics"


def test_a_launch_that_served_one_call_displaces_none_that_served_more(
    recorder: Recorder, found: list[Any]
) -> None:
    attn = fa4flex.compile(mask=document(torch.arange(900) // 50))
    k = heads(2, 1, 300)
    step = Step((heads(HEADS, 1, 300), k, k.clone()))
    for _ in range(4):
        step(attn)
    for n in range(100, 130):  # tables are made for the extents of each
        k = heads(2, 1, n)
        Step((heads(HEADS, 1, 300), k, k.clone()))(attn)
    found.clear()
    step(attn)
    assert found == []


# --- what is not ------------------------------------------------------------------------------------------


def crooked(x: Tensor) -> Tensor:
    """Tensor of these contents, in rows that are no multiple of 16 bytes apart."""
    return torch.nn.functional.pad(x, (0, 1))[..., :-1]


def gapped(x: Tensor) -> Tensor:
    """Tensor of these contents, every other element of memory."""
    return torch.stack((x, x), -1)[..., 0]


OF_ANY: dict[str, Callable[[Tensor], Any]] = {
    "dtype": lambda x: x.half(),
    "device": elsewhere,
    "alignment": shifted,
    "rows": crooked,
    "last stride": gapped,
    "heads": lambda x: torch.cat((x, x), -2),
    "width": lambda x: torch.cat((x, x), -1),
    "gradient": lambda x: x.clone().requires_grad_(),
    "parameter": lambda x: torch.nn.Parameter(x, requires_grad=False),
    "no tensor": lambda x: None,
    "dimensions": lambda x: x[None],
}
"""Changes of q, of k or of v that make another call of it, of heads before the last dimension."""

OF_NARROW: dict[str, Callable[[Tensor], Any]] = {
    "length": lambda x: torch.cat((x, x), -3),
    "strides": lambda x: torch.cat((x, x), -1)[..., : x.shape[-1]],
}
"""The same where all shapes and strides are compared."""


@pytest.mark.parametrize("narrow", (False, True))
@pytest.mark.parametrize("kind", ("dense", "packed", "paged"))
def test_each_component_of_a_tensor_is_told_apart(
    recorder: Recorder, kind: str, narrow: bool, seed: int
) -> None:
    attn = attention(layout="bshd")
    step = KINDS[kind](random.Random(seed))
    step = turned(step) if step.paging is None else step
    if kind == "paged":
        step = replace(step, qkv=(step.qkv[0].transpose(1, 2).contiguous(), *step.qkv[1:]))
    path = Path.of(attn, step, narrow)
    for name in "qkv":
        assert path.serves(step.of(name, torch.clone), attn)
        for look, change in {**OF_ANY, **(OF_NARROW if narrow else {})}.items():
            assert not path.serves(step.of(name, change), attn), f"{name}: {look}"
    assert not path.serves(replace(step, qkv=(step.qkv[0], step.qkv[1], step.qkv[1])), attn), "given twice"


def used_step() -> Step:
    return used(random.Random(1))


OTHERS: dict[str, Callable[[Step], Step]] = {
    "no lengths": lambda x: replace(x, varlen=None),
    "lengths of queries": lambda x: replace(x, varlen=Varlen(seqused_q=x.varlen.seqused_k)),  # type: ignore[union-attr]
    "lengths of both": lambda x: replace(
        x,
        varlen=Varlen(seqused_q=torch.zeros_like(x.varlen.seqused_k), seqused_k=x.varlen.seqused_k),  # type: ignore[union-attr, arg-type]
    ),
    "the same for both": lambda x: replace(
        x,
        varlen=Varlen(seqused_q=x.varlen.seqused_k, seqused_k=x.varlen.seqused_k),  # type: ignore[union-attr]
    ),
    "wide lengths": lambda x: replace(x, varlen=Varlen(seqused_k=x.varlen.seqused_k.long())),  # type: ignore[union-attr]
    "lengths apart": lambda x: replace(
        x,
        varlen=Varlen(seqused_k=x.varlen.seqused_k.repeat_interleave(2)[::2]),  # type: ignore[union-attr]
    ),
    "pages": lambda x: replace(x, varlen=None, paging=Paging(torch.zeros(1, 1).int(), torch.zeros(1).int())),
    "both": lambda x: replace(x, paging=Paging(torch.zeros(1, 1).int(), torch.zeros(1).int())),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_lengths_are_another_kind(recorder: Recorder, name: str) -> None:
    attn, step = attention(), used_step()
    path = Path.of(attn, step)
    assert not path.serves(OTHERS[name](step), attn)


def test_the_same_lengths_of_both_sides_are_a_kind_of_their_own(recorder: Recorder) -> None:
    attn, step = attention(), used_both(random.Random(0))
    path = Path.of(attn, step)
    assert step.varlen is not None and step.varlen.seqused_q is not None
    given = step.varlen.seqused_q
    for other in (Varlen(seqused_q=given), Varlen(seqused_q=given, seqused_k=given.clone())):
        assert not path.serves(replace(step, varlen=other), attn)


def test_pages_of_another_size_or_dtype_are_another_kind(recorder: Recorder) -> None:
    attn, step = attention(), paged(random.Random(0))
    path, (q, k, v) = Path.of(attn, step), step.qkv
    assert step.paging is not None
    table, used = step.paging.page_table, step.paging.seqused_k
    others = {
        "page size": replace(step, qkv=(q, k[:, :8], v[:, :8])),
        "wide table": replace(step, paging=Paging(table.long(), used)),
        "wide lengths": replace(step, paging=Paging(table, used.long())),
        "fewer sequences": replace(step, paging=Paging(table[:1], used[:1])),
        "fewer pages of values": replace(step, qkv=(q, k, v[:-1])),
        "lengths": replace(step, varlen=used_step().varlen),
        "no pages": replace(step, qkv=(q, k[:0], v[:0])),
    }
    assert q.shape[0] > 1
    assert [name for name, other in others.items() if path.serves(other, attn)] == []
    for other in (Paging(table.t().contiguous().t(), used), Paging(table[:, :1].repeat(1, 3), used)):
        assert path.serves(replace(step, paging=other), attn), "a table may lie as it likes"


def test_extents_that_do_not_agree_or_pass_what_was_proved_are_not_served(recorder: Recorder) -> None:
    attn, q, k = attention(), heads(HEADS, 2, 3), heads(2, 2, 100)
    path = Path.of(attn, Step((q, k, k.clone())))
    few = Step((q, k, k.clone()))
    others = {
        "values": few.of("v", lambda x: x[:, :, :99]),
        "batch of keys": few.of("k", lambda x: x[:1]),
        "batch of values": few.of("v", lambda x: x[:1]),
        "batch of queries": few.of("q", lambda x: x[:1]),
        "no queries": few.of("q", lambda x: x[:, :, :0]),
        "no keys": few.of("k", lambda x: x[:, :, :0]).of("v", lambda x: x[:, :, :0]),
        "no batch": Step((q[:0], k[:0], k.clone()[:0])),
        "past what was proved": Step((q, *(heads(2, 2, 5000) for _ in "kv"))),
        "many queries": few.of("q", lambda x: heads(HEADS, 2, 100)),
    }
    assert [name for name, other in others.items() if path.serves(other, attn)] == []


def test_packed_calls_without_keys_are_not_served(recorder: Recorder) -> None:
    attn, q, k = attention(), torch.zeros(9, HEADS, 64).bfloat16(), torch.zeros(9, 2, 64).bfloat16()
    one = Step((q, k, k.clone()), varlen=Varlen(torch.tensor([0, 9]), torch.tensor([0, 9])))
    none = one.of("k", lambda x: x[:0]).of("v", lambda x: x[:0])
    path = Path.of(attn, one)
    assert path.serves(one, attn) and not path.serves(none, attn)


def test_all_that_a_call_brings_is_compared() -> None:
    """Fields added to a call have to be compared here, too, or such calls may not be served."""
    compared = "q", "kv", "operands", "sinks", "lengths", "scalars", "scale", "heads_first", "statistics"
    assert {*compared} == set(Call._fields)
    sources = {"call", "call.lengths", "call.kv", "launch"}
    assert {row.source for row in FORWARD.entry} == sources


def test_other_scales_are_another_kind(recorder: Recorder) -> None:
    attn, step = attention(), KINDS["eight_bit"](random.Random(0))
    path, (q, k, _), scales = Path.of(attn, step), step.qkv, step.scales
    assert scales is not None and scales.k is not None and scales.v is not None and q.shape[0] > 1
    others = {
        "none": None,
        "of k alone": KVScales(scales.k, None),
        "of v alone": KVScales(None, scales.v),
        "of heads": KVScales(scales.v, scales.v.clone()),
        "of tokens": KVScales(torch.ones(k.shape[:3]), scales.v),
        "of other sequences": KVScales(scales.k[:1], scales.v),
        "of more heads": KVScales(scales.k, torch.ones(3)),
        "with gradients": KVScales(scales.k.clone().requires_grad_(), scales.v),
    }
    assert [x for x, other in others.items() if path.serves(replace(step, scales=other), attn)] == []
    apart = KVScales(scales.k.repeat_interleave(2, 1)[:, ::2], scales.v.clone())
    assert path.serves(replace(step, scales=apart), attn), "scales may lie as they like"


def test_scales_of_pages_and_of_tokens_have_to_fit_their_caches(recorder: Recorder) -> None:
    attn, step = attention(), KINDS["eight_bit_pages"](random.Random(0))
    path, scales = Path.of(attn, step), step.scales
    assert scales is not None and scales.k is not None
    assert not path.serves(replace(step, scales=KVScales(scales.k[:39], scales.v)), attn)
    step = KINDS["eight_bit_tokens"](random.Random(0))
    path, scales = Path.of(attn := attention(), step), step.scales
    assert scales is not None and scales.k is not None
    assert not path.serves(replace(step, scales=KVScales(scales.k[:, :, 1:], None)), attn)


CAPTURED: dict[str, dict[str, Any]] = {
    "table: shape": {"table": TABLE[:, :1020].clone()},
    "table: strides": {"table": TABLE.t().contiguous().t()},
    "table: dtype": {"table": TABLE.half()},
    "table: alignment": {"table": shifted(TABLE)},
    "table: gradient": {"table": TABLE.clone().requires_grad_()},
    "table: device": {"table": elsewhere(TABLE)},
    "a number": {"window": WINDOW + 1},
    "a negative scale": {"scale": -0.1},
    "no scale": {"scale": 0.0},
    "no sinks": {"sinks": None},
    "sinks: dtype": {"sinks": torch.randn(HEADS).double()},
    "sinks: shape": {"sinks": torch.randn(HEADS - 1)},
    "sinks: alignment": {"sinks": shifted(torch.randn(HEADS))},
}


@pytest.mark.parametrize("narrow", (False, True))
@pytest.mark.parametrize("name", CAPTURED)
def test_what_was_captured_must_look_as_it_did(recorder: Recorder, name: str, narrow: bool) -> None:
    options = {"sinks": torch.randn(HEADS), "table": TABLE}
    attn, step = attention(**options), dense(random.Random(0))
    path = Path.of(attn, step, narrow)
    for alike in ({"sinks": torch.randn(HEADS)}, {"scale": 0.3}, {"table": TABLE.clone()}):
        assert path.serves(step, attention(**{**options, **alike}))
    assert not path.serves(step, attention(**{**options, **CAPTURED[name]}))


@pytest.mark.parametrize("narrow", (False, True))
def test_a_captured_tensor_whose_memory_moves_is_looked_at_again(recorder: Recorder, narrow: bool) -> None:
    table = TABLE.clone()
    attn, step = attention(table), dense(random.Random(0))
    path = Path.of(attn, step, narrow)
    table.data = shifted(TABLE)
    assert not path.serves(step, attn)


class Seen(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return function(*args, **(kwargs or {}))


class Passed(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return function(*args, **(kwargs or {}))


def modes() -> Iterator[tuple[str, Any]]:
    yield "dispatch mode", Seen()
    yield "inference mode", torch.inference_mode()
    yield "forward mode", forward_ad.dual_level()
    yield "autocast", torch.autocast("cpu")


@pytest.mark.parametrize("narrow", (False, True))
@pytest.mark.parametrize("kind", ("dense", "used", "packed", "paged", "eight_bit"))
def test_what_intercepts_operators_is_not_served(recorder: Recorder, kind: str, narrow: bool) -> None:
    attn, step = attention(), KINDS[kind](random.Random(0))
    path, served = Path.of(attn, step, narrow), []
    for name, mode in modes():
        with mode:
            if path.serves(step, attn):
                served.append(name)

    def inside(x: Tensor) -> Tensor:
        if path.serves(step, attn):
            served.append("transform")
        return x.sum()

    torch.func.grad(inside)(torch.randn(3))
    assert served == [] and path.serves(step, attn)
    with Passed(), torch.device("cpu"):
        assert path.serves(step, attn)


@pytest.mark.parametrize("narrow", (False, True))
def test_modes_of_gradients_are_told_apart(recorder: Recorder, narrow: bool) -> None:
    sinks = torch.randn(HEADS, requires_grad=True)
    attn, step = attention(sinks=sinks), dense(random.Random(0))
    with torch.no_grad():
        path = Path.of(attn, step, narrow)
    assert not path.serves(step, attn)


def test_larger_integers_are_launched_by_others(recorder: Recorder) -> None:
    """Once they were seen, none leads to the launch that takes them for small."""
    attn, step = attention(), dense(random.Random(0))
    for _ in range(5):
        step(attn)
    before, engine, kept = len(recorder.problems), attn.prepared.engine, known_by(attn)
    assert [one.valid is None for one in kept] == [True, False]
    engine.bits = ((0, 40),)
    step(attn)
    assert len(recorder.problems) == before + 1
    step(attn)
    assert known_by(attn)[0].ready is not kept[0].ready


# --- what is told, and what is kept ----------------------------------------------------------------------


@pytest.mark.parametrize("shared", (True, False))
def test_maps_of_other_lengths_are_refused(recorder: Recorder, shared: bool) -> None:
    """Maps are refused even if they have as many blocks, of this very tensor or of another one."""
    classes = torch.ones(1, 1, 3, 3, dtype=torch.uint8)
    attn = fa4flex.compile(mask=causal, blocks=BlockMap(classes, (128, 128), 300, 300))
    step = Step((heads(HEADS, 2, 300), *(heads(2, 2, 300) for _ in "kv")))
    for _ in range(5):
        step(attn)
    other = BlockMap(classes if shared else classes.clone(), (128, 128), 299, 300)
    with pytest.raises(StateError, match="q_len=299"):
        attn(*step.qkv, blocks=other)
    shorter = Step((heads(HEADS, 2, 299), *(heads(2, 2, 299) for _ in "kv")))
    with pytest.raises(StateError, match="q_len=300") as error:
        shorter(attn)
    assert any("in Attention(" in note for note in error.value.__notes__)


def test_what_does_not_fit_is_told_with_its_variant(recorder: Recorder) -> None:
    attn, step = attention(), used_step()
    for _ in range(4):
        step(attn)
    with pytest.raises(InputError, match="sequences for a batch") as wrong:
        replace(step, varlen=Varlen(seqused_k=torch.zeros(77, dtype=torch.int32)))(attn)
    assert any("in Attention(" in note for note in wrong.value.__notes__)


def test_calls_whose_contents_are_checked_are_not_served(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known, "VALIDATE", True)
    for kind in KINDS:
        attn = attention()
        for _ in range(4):
            KINDS[kind](random.Random(0))(attn)
        assert bool(known_by(attn)) == (kind in ("dense", "sliced", "of_long_queries")), kind


@pytest.mark.parametrize("kind", ("dense", "used"))
@pytest.mark.parametrize("narrow", (False, True))
def test_known_calls_keep_no_tensor_alive(recorder: Recorder, narrow: bool, kind: str) -> None:
    table = [TABLE.clone()]

    def score(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + table[0][h % 2, kv_idx % 1024]

    attn = fa4flex.compile(score, sinks=lambda sinks=torch.randn(HEADS): sinks)
    step = KINDS[kind](random.Random(1))
    path = Path.of(attn, step, narrow)
    lengths = () if step.varlen is None else (step.varlen.seqused_k,)
    gone = [weakref.ref(x) for x in (*step.qkv, *lengths, table.pop())]  # type: ignore[arg-type]
    recorder.launches.clear()
    del step, lengths
    gc.collect()
    assert {x() for x in gone} == {None} and path is not None


# --- when one is made -----------------------------------------------------------------------------------


def known_by(attn: fa4flex.Attention) -> tuple[recent.KnownCall, ...]:
    assert attn._caller is not None and attn._caller.recent is not None
    return attn._caller.recent.known.kept


def narrow_of(attn: fa4flex.Attention) -> list[int]:
    """Query lengths of the launches that are known for one length alone."""
    return [one.extents[1] for one in known_by(attn) if one.valid is None]


def test_tensors_that_torch_does_not_compare_are_not_tried_again_and_again(recorder: Recorder) -> None:
    attn, q, k = attention(), heads(HEADS, 2, 3), heads(2, 2, 100)
    for _ in range(30):
        attn(q, k, k)  # one tensor twice
    assert len(known_by(attn)) == MOST_OF_ONE


def test_changing_lengths_are_not_made_known_again_and_again(recorder: Recorder) -> None:
    attn = fa4flex.compile(mask=causal)
    by_length = {n: Step((heads(HEADS, 2, n), *(heads(2, 2, n) for _ in "kv"))) for n in range(200, 240)}
    for n in range(200, 240):
        by_length[n](attn)
    assert narrow_of(attn) == [], "each length came once"
    for _ in range(2):
        by_length[200](attn)
    assert narrow_of(attn) == [200]
    for n in range(201, 240):
        for _ in range(LONG_ROW):
            by_length[n](attn)
    assert narrow_of(attn) == [200]
    by_length[239](attn)
    assert narrow_of(attn) == [239] and len(known_by(attn)) == 2
    for n in (230, 231, 230):
        by_length[n](attn)
    assert narrow_of(attn) == [239], "what is made for one length stays when another comes between"
