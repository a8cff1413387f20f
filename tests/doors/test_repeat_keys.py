"""What is known of the last call, of lengths and of the order of tiles, each condition changed alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from launch_changes import (
    HEADS,
    LOOKS,
    Change,
    S,
    field,
    mod,
    recording,
    with_length,
)
from test_gpu_calls import Recorder, call_of, inputs
from torch import Tensor

import fa4flex
from fa4flex.errors import InputError
from fa4flex.runtime.cuda import tile_order as order_module
from fa4flex.runtime.cuda.call import Call, SequenceLengths
from fa4flex.runtime.cuda.engine import Engine
from fa4flex.runtime.cuda.fast_path import FastPath
from fa4flex.runtime.cuda.lengths import check_lengths
from fa4flex.runtime.cuda.tile_order import TileOrder
from fa4flex.variants import causal, document


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return recording(monkeypatch)


# --- the launch of the last call ------------------------------------------------------------------------


ids = torch.arange(S) // 50


def repeated(recorder: Recorder, attn: fa4flex.Attention | None = None) -> tuple[FastPath, Call]:
    attn = attn or fa4flex.compile(mod, document(ids), sinks=torch.randn(HEADS))
    now = attn._calling()
    engine, call = call_of(attn, operands=tuple(x.clone() for x in now.bound.bases))
    return made(engine, call, now.bound.trace.read), call


def made(engine: Engine, call: Call, read: Any) -> FastPath:
    engine.run(call)
    ready = engine.find(call)
    assert ready is not None
    again = FastPath.of(call, ready, read, call.statistics)
    assert again is not None
    return again


AGAIN = {
    f"{name}: {look}": field(name, {**LOOKS, "shape": lambda x: x[:, :, :200]}[look])
    for name in ("q", "k", "v")
    for look in ("strides", "dtype", "alignment", "shape")
}


@pytest.mark.parametrize("name", AGAIN)
def test_each_look_is_no_repetition(recorder: Recorder, name: str) -> None:
    again, call = repeated(recorder)
    assert again.fits(call.q, call.k, call.v)
    assert again.fits(call.q.clone(), call.k.clone(), call.v.clone())
    changed = AGAIN[name](call)
    assert not again.fits(changed.q, changed.k, changed.v)


SERVED: dict[str, Any] = {
    "a tensor": {"table": torch.randn(HEADS, S)},
    "another tensor": {"documents": ids.clone()},
    "a number": {"window": 71},
    "a type": {"window": 70.0},
    "the sign of zero": {"shift": -0.0},
    "sinks": {"sinks": torch.randn(HEADS)},
    "no sinks": {"sinks": None},
    "a scale": {"scale": 0.5},
    "other code": {"other": True},
}
CAPTURED: dict[str, Any] = {
    "table": torch.randn(HEADS, S), "documents": ids, "window": 70, "shift": 0.0, "scale": None,
    "sinks": torch.randn(HEADS),
}  # fmt: skip


def composed(
    table: Tensor, documents: Tensor, window: float, shift: float, other: bool = False, **options: Any
) -> fa4flex.Attention:
    def score(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + table[h, kv_idx] + shift

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (documents[q_idx] == documents[kv_idx]) & (q_idx - kv_idx < window)

    return fa4flex.compile(score, ~fa4flex.as_mask(mask) if other else mask, **options)


@pytest.mark.parametrize("name", SERVED)
def test_only_what_was_captured_before_is_served(recorder: Recorder, name: str) -> None:
    attn = composed(**CAPTURED)
    engine, call = call_of(attn)
    again = made(engine, call, attn._calling().bound.trace.read)
    assert again.serves(attn.variant)
    assert again.serves(composed(**CAPTURED).variant), "the functions may be others of the same code"
    scale = 1 / call.q.shape[-1] ** 0.5
    assert again.serves(composed(**{**CAPTURED, "scale": scale}).variant)
    assert not again.serves(composed(**{**CAPTURED, **SERVED[name]}).variant)


@pytest.mark.parametrize("change", ("contents", "memory"))
def test_a_repetition_has_tables_of_what_is_there_now(recorder: Recorder, change: str) -> None:
    again, call = repeated(recorder)
    _, documents = call.operands
    before = len(recorder.tables)
    again(call.q, call.k, call.v)
    assert len(recorder.tables) == before
    if change == "contents":
        documents.add_(0)
    else:
        documents.data = documents.clone()
    assert again.fits(call.q, call.k, call.v)
    again(call.q, call.k, call.v)
    assert len(recorder.tables) == before + 1
    read, written = recorder.launches[-1][10], recorder.tables[-1][-1]
    assert read.partial_ptr.data_ptr() == written.partial_ptr.data_ptr()


@pytest.mark.parametrize("change", ("a gradient", "the layout"))
def test_a_captured_tensor_that_looks_otherwise_is_no_repetition(recorder: Recorder, change: str) -> None:
    again, call = repeated(recorder)
    table, _ = call.operands
    if change == "a gradient":
        table.requires_grad_()
    else:
        table.data = table.t().contiguous().t()
    assert not again.fits(call.q, call.k, call.v)


def test_the_contents_of_what_decides_nothing_may_change(recorder: Recorder) -> None:
    again, call = repeated(recorder)
    call.operands[0].add_(0)
    assert again.fits(call.q, call.k, call.v)


def test_a_repetition_has_the_statistics_of_its_call(recorder: Recorder) -> None:
    """Which of them are wanted is compared by the caller."""
    again, _ = repeated(recorder)
    assert again.statistics == ("lse",)


# --- lengths --------------------------------------------------------------------------------------------


def test_lengths_that_fit_some_extents_are_looked_at_for_others() -> None:
    used = torch.tensor([S, 7], dtype=torch.int32)
    q, k, v = inputs()
    call = Call(q, k, v, (), None, SequenceLengths(seqused_k=used), (), 1.0, True, ())
    check_lengths(call)
    with pytest.raises(InputError, match="seqused_k up to 300"):
        check_lengths(call._replace(k=k[:, :, :200], v=v[:, :, :200]))
    check_lengths(call._replace(lengths=SequenceLengths(seqused_q=used)))
    used.data = torch.tensor([S, S + 1], dtype=torch.int32)
    with pytest.raises(InputError, match="seqused_k up to 301"):
        check_lengths(call)


# --- the order of tiles ---------------------------------------------------------------------------------

ORDERED: dict[str, Change] = {
    "contents of lengths": with_length(1, lambda x: x.copy_(torch.tensor([0, 10, 290, S]))),
    "lengths of keys": with_length(1, lambda x: torch.tensor([0, 10, 290, S], dtype=torch.int32)),
    "lengths of queries": with_length(0, lambda x: torch.tensor([0, 10, 290, S], dtype=torch.int32)),
    "queries": field("q", lambda x: torch.cat((x, x))),
    "keys": field("k", lambda x: torch.cat((x, x))),
}


def ragged_order() -> tuple[TileOrder, Call]:
    cu = [torch.tensor([0, n, 200, S], dtype=torch.int32) for n in (100, 150)]
    qkv = tuple(torch.randn(S, heads, 64, dtype=torch.bfloat16) for heads in (HEADS, 2, 2))
    engine, call = call_of(fa4flex.compile(mask=causal), qkv, (*cu, None, None))  # type: ignore[arg-type]
    return TileOrder(engine.facts, 64, ()), call


@pytest.mark.parametrize("name", ORDERED)
def test_each_component_leads_to_another_order(name: str) -> None:
    order, call = ragged_order()
    first = order(call)
    assert order(call) is first
    changed = ORDERED[name](call)
    found = order(changed)
    assert found is not first and torch.equal(found, TileOrder(order.facts, 64, ()).compute(changed))
    assert name == "keys" or not torch.equal(found, first)


def test_each_stream_has_an_order_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    order, call = ragged_order()
    first = order(call)
    monkeypatch.setattr(order_module, "stream_of", lambda q: 7)
    other = order(call)
    assert other is not first and torch.equal(other, first) and order(call) is other


def test_an_order_of_a_captured_graph_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    order, call = ragged_order()
    first = order(call)
    monkeypatch.setattr(order_module, "capturing", lambda q: True)
    assert order(call) is not first and order(call) is not order(call)
