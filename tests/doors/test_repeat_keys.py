"""What is known of the last call, of lengths and of the order of tiles, each condition changed alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from launch_changes import (
    HEADS,
    LOOKS,
    TABLE,
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
from fa4flex.codegen.build import Bound
from fa4flex.errors import InputError
from fa4flex.runtime.cuda import order as order_module
from fa4flex.runtime.cuda.again import Again
from fa4flex.runtime.cuda.call import Call
from fa4flex.runtime.cuda.lengths import check_lengths
from fa4flex.runtime.cuda.order import TileOrder
from fa4flex.variants import causal, document


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return recording(monkeypatch)


# --- the launch of the last call ------------------------------------------------------------------------


ids = torch.arange(S) // 50


def repeated(recorder: Recorder) -> tuple[Again, Call]:
    engine, call = call_of(
        fa4flex.compile(mod, document(ids), sinks=torch.randn(HEADS)), operands=(TABLE.clone(), ids.clone())
    )
    engine.run(call)
    ready = engine.find(call)
    assert ready is not None
    again = Again.of(call, ready, tuple(engine.watched_tensors(call)))
    assert again is not None
    return again, call


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


def test_only_what_was_captured_before_is_served(recorder: Recorder) -> None:
    again, call = repeated(recorder)
    trace: Any = None
    table, documents = call.operands
    bound = Bound(trace, call.operands, call.scalars)
    assert again.serves(bound, call.sinks) and again.serves(
        bound._replace(bases=(table, documents)), call.sinks
    )
    others: dict[str, tuple[Bound, Tensor | None]] = {
        "a tensor": (bound._replace(bases=(table.clone(), documents)), call.sinks),
        "another tensor": (bound._replace(bases=(table, documents.clone())), call.sinks),
        "an exchange": (bound._replace(bases=(documents, table)), call.sinks),
        "one less": (bound._replace(bases=(table,)), call.sinks),
        "one more": (bound._replace(bases=(table, documents, table)), call.sinks),
        "a number": (bound._replace(scalars=(call.scalars[0] + 1,)), call.sinks),
        "a type": (bound._replace(scalars=(int(call.scalars[0]),)), call.sinks),
        "sinks": (bound, torch.randn(HEADS)),
        "no sinks": (bound, None),
    }
    assert [name for name, (bound, sinks) in others.items() if again.serves(bound, sinks)] == []
    again, call = repeated(recorder)
    again.scalars = repr((0.0,))
    zero = Bound(trace, call.operands, (0.0,))
    assert again.serves(zero, call.sinks) and not again.serves(zero._replace(scalars=(-0.0,)), call.sinks)


@pytest.mark.parametrize("change", ("contents", "memory", "a gradient", "the layout"))
def test_a_captured_tensor_that_changed_is_no_repetition(recorder: Recorder, change: str) -> None:
    again, call = repeated(recorder)
    table, documents = call.operands
    if change == "contents":
        documents.add_(0)
    elif change == "memory":
        documents.data = documents.clone()
    elif change == "a gradient":
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
    call = Call(q, k, v, (), None, (None, None, None, used), (), 1.0, True, ())
    check_lengths(call)
    with pytest.raises(InputError, match="seqused_k up to 300"):
        check_lengths(call._replace(k=k[:, :, :200], v=v[:, :, :200]))
    check_lengths(call._replace(lengths=(None, None, used, None)))
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
    monkeypatch.setattr(order_module, "_stream", lambda q: 7)
    other = order(call)
    assert other is not first and torch.equal(other, first) and order(call) is other


def test_an_order_of_a_captured_graph_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    order, call = ragged_order()
    first = order(call)
    monkeypatch.setattr(order_module, "_capturing", lambda q: True)
    assert order(call) is not first and order(call) is not order(call)
