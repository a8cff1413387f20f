"""State kept between calls on a GPU, without one: counters, and the launch of the last call."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from test_gpu_calls import WRITTEN, Recorder, call_of

import fa4flex
from fa4flex import lower as lower_module
from fa4flex.codegen.analyze.extents import extents_of
from fa4flex.kernels.plan.arguments import COUNTERS, FORWARD
from fa4flex.kernels.plan.target import SM90A
from fa4flex.runtime.cuda import engine as engine_module
from fa4flex.runtime.cuda.device import counters as counters_module
from fa4flex.runtime.cuda.launches import ready as ready_module
from fa4flex.variants import causal, document, sliding_window


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    recorder, zeros = Recorder(), torch.zeros(COUNTERS, dtype=torch.int32)
    monkeypatch.setattr(lower_module, "compile_kernel", recorder.compile)
    monkeypatch.setattr(lower_module, "compile_ahead", lambda *given: None)
    monkeypatch.setattr(engine_module, "target_of", lambda device: SM90A)
    monkeypatch.setattr(ready_module, "counters", lambda device: zeros)
    yield recorder


# --- counters -----------------------------------------------------------------------------------------


def test_a_stream_has_a_counter_and_a_captured_launch_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, capturing = [0], [False]
    monkeypatch.setattr(counters_module, "_counters", {})
    monkeypatch.setattr(counters_module, "current_stream", lambda device: stream[0])
    monkeypatch.setattr(counters_module, "_capturing", lambda device: capturing[0])
    monkeypatch.setattr(counters_module, "_zeros", lambda device: torch.zeros(COUNTERS, dtype=torch.int32))
    default = counters_module.counters(0)
    assert counters_module.counters(0) is default and counters_module.counters(1) is not default
    stream[0] = 77
    other = counters_module.counters(0)
    assert other is not default and counters_module.counters(0) is other
    capturing[0] = True
    captured = [counters_module.counters(0) for _ in range(2)]
    assert len({id(x) for x in (default, other, *captured)}) == 4
    capturing[0] = False
    assert counters_module.counters(0) is other


def test_graphs_of_torch_compile_keep_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch gives memory of its graphs back, but for outputs."""
    stream, manager = [0], SimpleNamespace(stream=SimpleNamespace(cuda_stream=77))

    def get_manager(device: int, create_if_none_exists: bool) -> SimpleNamespace | None:
        assert device < 2, "a thread without managers"
        return None if device else manager

    trees = SimpleNamespace(get_manager=get_manager)
    monkeypatch.setitem(sys.modules, "torch._inductor.cudagraph_trees", trees)
    monkeypatch.setattr(counters_module, "_counters", {})
    monkeypatch.setattr(counters_module, "current_stream", lambda device: stream[0])
    monkeypatch.setattr(counters_module, "_capturing", lambda device: False)
    monkeypatch.setattr(counters_module, "_zeros", lambda device: torch.zeros(COUNTERS, dtype=torch.int32))
    q = mock.Mock(is_cuda=True, get_device=lambda: 0)
    for handle, kept in ((0, True), (76, True), (77, False)):
        stream[0] = handle
        assert (counters_module.counters(0) is counters_module.counters(0)) == kept
        assert counters_module.capture_of(q) == ((handle, 0) if kept else None)
    for device in (1, 2):
        assert counters_module.counters(device) is counters_module.counters(device)


def test_only_kernels_that_count_get_a_counter(recorder: Recorder) -> None:
    for mask, counts in ((None, False), (sliding_window(64), True)):
        engine, call = call_of(fa4flex.compile(mask=mask))
        engine.run(call)
        ready = engine.find(call)
        assert ready is not None
        launched = dict(zip(FORWARD.names, recorder.launches[-1], strict=True))
        assert (launched["counters"] is not None) == ready.counted
        assert ready.counted or not counts


# --- launches whose sizes are known ------------------------------------------------------------------


def repeated(attn: fa4flex.Attention, *given: Any, direct: bool, **options: Any) -> Callable[[], Any]:
    """A launch of a call, with what follows from its sizes made before; `direct`: without a Call."""
    engine, call = call_of(attn, *given, **options)
    engine.run(call)
    ready, extents = engine.find(call), extents_of(call.extents())
    sized = ready.sized_again(call, extents)
    if not direct:
        return lambda: ready(call, extents, sized)
    launch, (k, v) = ready.direct(sized), call.kv
    assert launch is not None
    return lambda: launch(call.q, k, v, call.operands, call.sinks, call.scale)


@pytest.mark.parametrize("direct", (False, True))
@pytest.mark.parametrize("statistics", [(), ("lse",), ("lse", "max_scores")])
def test_a_repeated_launch_has_the_same_arguments(
    recorder: Recorder, statistics: tuple[str, ...], direct: bool
) -> None:
    attn = fa4flex.compile(mask=causal, sinks=torch.randn(4))
    again = repeated(attn, statistics=statistics, direct=direct)
    first = recorder.launches[-1]
    out, lse, largest = again()
    second = recorder.launches[-1]
    assert second is not first and len(second) == len(first)
    assert [x is None for x in (lse, largest)] == [name not in statistics for name in ("lse", "max_scores")]
    for i, (a, b) in enumerate(zip(first, second, strict=True)):
        same = (
            a.shape == b.shape and a.stride() == b.stride()
            if 3 <= i <= 5 and a is not None
            else a is b or a == b
        )
        assert same, f"argument {i}"
    assert out is second[3] and out.data_ptr() != first[3].data_ptr()


@pytest.mark.parametrize("direct", (False, True))
@pytest.mark.parametrize(
    "mask, keys, splits", [(causal, 100, 1), (causal, 9000, 33), (causal & sliding_window(64), 9000, 1)]
)
def test_parts_of_few_queries_have_memory_at_each_call(
    recorder: Recorder, mask: Any, keys: int, splits: int, direct: bool
) -> None:
    """It is float32, one after the other, and none where nothing is split."""
    q, k, v = (torch.randn(2, h, n, 64).bfloat16() for h, n in ((4, 3), (2, keys), (2, keys)))
    again = repeated(fa4flex.compile(mask=mask), (q, k, v), direct=direct)
    again()
    again()
    launched = [dict(zip(FORWARD.names, given, strict=True)) for given in recorder.launches]
    assert {given["splits"] for given in launched} == {splits}
    for given in launched:
        parts = given["workspace"]
        assert parts.dtype == torch.float32 and parts.stride() == (1,)
        assert parts.numel() == (splits * 2 * 4 * 3 * 65 if splits > 1 else 0)
    assert splits == 1 or len({given["workspace"].data_ptr() for given in launched}) == len(launched)


def test_a_repetition_makes_tables_of_changed_contents(recorder: Recorder) -> None:
    ids = torch.arange(300) // 50
    again = repeated(fa4flex.compile(mask=document(ids)), direct=False)
    before = len(recorder.tables)
    for made, change in ((1, lambda: None), (2, lambda: ids.add_(1)), (3, lambda: None)):
        change()
        again()
        assert len(recorder.tables) == before + made
        read, written = recorder.launches[-1][10], recorder.tables[-1][WRITTEN]
        assert read.partial_ptr.data_ptr() == written.partial_ptr.data_ptr()


# --- rows without a sequence, numbers by kind ---------------------------------------------------------


def test_rows_that_no_sequence_uses_are_filled(recorder: Recorder) -> None:
    used = torch.tensor([300, 7], dtype=torch.int32)
    engine, call = call_of(fa4flex.compile(mask=causal), lengths=(None, None, used, None))
    out, lse, _ = engine.run(call)
    assert lse is not None
    assert bool((out == 0).all()) and bool((lse == -torch.inf).all()), "kernels write used rows only"


def test_captured_numbers_reach_the_kernel_by_kind(recorder: Recorder) -> None:
    window, slope = 70, 0.5
    mod = lambda score, b, h, q_idx, kv_idx: score + slope * (q_idx - kv_idx)  # noqa: E731
    mask = lambda b, h, q_idx, kv_idx: q_idx - kv_idx < window  # noqa: E731
    engine, call = call_of(fa4flex.compile(score_mod=mod, mask=mask))
    engine.run(call._replace(scalars=tuple(map(float, call.scalars))))
    given = dict(zip(recorder.signatures[-1].scalars, recorder.launches[-1][13], strict=True))
    assert given == {"float": 0.5, "int": 70}
    assert {kind: type(x).__name__ for kind, x in given.items()} == {"float": "float", "int": "int"}
