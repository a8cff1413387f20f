"""What is kept between calls on a GPU, without one: row tables, counters, and the launch of the last call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from test_gpu_calls import Recorder, call_of, inputs
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import fa4flex
from fa4flex import lower as lower_module
from fa4flex.codegen.analyze.facts import SCORE, analyze
from fa4flex.codegen.analyze.tabulate import Tabulated, dependent_reads, tabulate
from fa4flex.codegen.analyze.tiles import Shape
from fa4flex.codegen.evaluate import Captured, evaluate
from fa4flex.codegen.expr import Expr, apply, load, sym, walk
from fa4flex.codegen.plan.arguments import FORWARD
from fa4flex.codegen.plan.target import SM90A
from fa4flex.runtime.cuda import counter as counter_module
from fa4flex.runtime.cuda import engine as engine_module
from fa4flex.runtime.cuda import fast_path as again_module
from fa4flex.runtime.cuda import ready as ready_module
from fa4flex.runtime.cuda.call import SequenceLengths
from fa4flex.runtime.cuda.fast_path import FastPath
from fa4flex.runtime.cuda.interval_tables import interval_tables
from fa4flex.variants import causal, document, sliding_window

B, H, Q, KV = (sym(name) for name in ("b", "h", "q", "kv"))
CPU = torch.device("cpu")


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    recorder, counter = Recorder(), torch.zeros(2, dtype=torch.int32)
    monkeypatch.setattr(lower_module, "compile_kernel", recorder.compile)
    monkeypatch.setattr(engine_module, "target_of", lambda device: SM90A)
    for module in (ready_module, again_module):
        monkeypatch.setattr(module, "counter", lambda device: counter)
    yield recorder


# --- tables of key intervals --------------------------------------------------------------------------


def allowed(
    mask: Expr, spans: Any, shape: Shape, captured: Captured, b: int, h: int
) -> tuple[Tensor, Tensor]:
    """Allowed pairs by the mask itself, and by the key intervals."""
    at: dict[str, Any] = {"b": b, "h": h, "q_len": shape.q_len, "kv_len": shape.kv_len, "num_heads": 4}
    at |= {"q": torch.arange(shape.q_len).view(-1, 1), "kv": torch.arange(shape.kv_len)}
    (pairs,) = evaluate([mask], at, captured)
    inside = torch.zeros(shape.q_len, shape.kv_len, dtype=torch.bool)
    for lo, hi in spans:
        first, last = (torch.as_tensor(x) for x in evaluate([lo, hi], at, captured))
        inside |= (at["kv"] >= first) & (at["kv"] < last)
    return torch.as_tensor(pairs).expand_as(inside), inside


def sorted_ids(*shape: int) -> Tensor:
    return torch.randint(0, 9, shape).sort(-1).values


SAME = apply("eq", load(0, (Q,), "int"), load(0, (KV,), "int"))
PER_BATCH = apply("eq", load(0, (B, Q), "int"), load(0, (B, KV), "int"))
MASKS: dict[str, tuple[Expr, tuple[int, ...], tuple[int, ...]]] = {
    "documents": (SAME, (70,), (50,)),
    "causal documents": (apply("and_", SAME, apply("le", KV, Q)), (70,), (50,)),
    "documents of a batch": (PER_BATCH, (3, 70), (3, 50)),
    "documents, or near by head": (
        apply("and_", SAME, apply("le", apply("sub", Q, KV), apply("mul", H, H))),
        (70,),
        (2, 50),
    ),
}


@pytest.mark.parametrize("name", MASKS)
def test_row_tables_hold_the_same_keys(name: str, seed: int) -> None:
    mask, size, largest = MASKS[name]
    shape, captured = Shape(3, 2, 50, 70), Captured((sorted_ids(*size),))
    facts = analyze(SCORE, mask)
    found = tabulate(facts, shape, 1)
    replaced, tables = found.facts, interval_tables(found.ends, shape, captured, CPU)
    assert replaced.keys is not None and facts.keys is not None
    assert not any(node.op == "search" for span in replaced.keys.spans for end in span for node in walk(end))
    assert all(x.dtype == torch.int32 for x in tables) and largest in {tuple(x.shape) for x in tables}
    with_tables = Captured((*captured.operands, *tables))
    for b in range(3):
        for h in range(2):
            exact, found = allowed(mask, replaced.keys.spans, shape, with_tables, b, h)
            assert torch.equal(exact, found)


def test_what_one_read_gives_stays_in_the_kernel() -> None:
    once = load(0, (Q,), "int")
    assert [dependent_reads(x) for x in (Q, once, load(1, (once,), "int"))] == [0, 1, 2]
    facts = analyze(SCORE, apply("lt", KV, once))
    assert tabulate(facts, Shape(1, 1, 5, 9), 1) == Tabulated(facts)


def test_an_end_that_varies_too_much_stays_in_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fa4flex.codegen.analyze.tabulate.MOST_ENTRIES", 149)
    shape = Shape(3, 2, 50, 70)
    assert tabulate(analyze(SCORE, PER_BATCH), shape, 1).ends == ()
    monkeypatch.setattr("fa4flex.codegen.analyze.tabulate.MOST_ENTRIES", 150)
    assert len(tabulate(analyze(SCORE, PER_BATCH), shape, 1).ends) == 2


def test_row_tables_follow_the_operands_and_their_changes(recorder: Recorder) -> None:
    ids = (torch.arange(300) // 50).to(torch.int32)
    engine, call = call_of(fa4flex.compile(mask=causal & document(ids)))
    engine.run(call)
    assert recorder.problems[-1].operands == (("int32", 1),) * 3
    given, lo, _ = recorder.launches[-1][12]
    assert given is ids and torch.equal(lo, (ids * 50).to(torch.int32))
    ids.copy_(torch.arange(300) // 100)
    engine.run(call)
    assert torch.equal(recorder.launches[-1][12][1], (ids * 100).to(torch.int32))
    used = torch.tensor([300, 200], dtype=torch.int32)
    engine.run(call._replace(lengths=SequenceLengths(seqused_k=used)))
    assert len(recorder.launches[-1][12]) == 1, "lengths that vary have no table"


# --- counters -----------------------------------------------------------------------------------------


def test_a_stream_has_a_counter_and_a_captured_launch_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, capturing = [0], [False]
    monkeypatch.setattr(counter_module, "_counters", {})
    monkeypatch.setattr(counter_module, "_current_stream", lambda device: stream[0])
    monkeypatch.setattr(counter_module, "_capturing", lambda device: capturing[0])
    monkeypatch.setattr(counter_module, "_zeros", lambda device: torch.zeros(2, dtype=torch.int32))
    default = counter_module.counter(0)
    assert counter_module.counter(0) is default and counter_module.counter(1) is not default
    stream[0] = 77
    other = counter_module.counter(0)
    assert other is not default and counter_module.counter(0) is other
    capturing[0] = True
    captured = [counter_module.counter(0) for _ in range(2)]
    assert len({id(x) for x in (default, other, *captured)}) == 4
    capturing[0] = False
    assert counter_module.counter(0) is other


def test_only_kernels_that_count_get_a_counter(recorder: Recorder) -> None:
    for mask, counts in ((None, False), (sliding_window(64), True)):
        engine, call = call_of(fa4flex.compile(mask=mask))
        engine.run(call)
        ready = engine.find(call)
        assert ready is not None
        launched = dict(zip(FORWARD.names, recorder.launches[-1], strict=True))
        assert (launched["counter"] is not None) == ready.counted
        assert ready.counted or not counts


# --- the launch of the last call ----------------------------------------------------------------------


def repeated(recorder: Recorder, **composition: Any) -> tuple[FastPath, tuple[Tensor, Tensor, Tensor]]:
    statistics = composition.pop("statistics", ())
    attn = fa4flex.compile(**composition)
    engine, call = call_of(attn, statistics=statistics)
    engine.run(call)
    ready, read = engine.find(call), attn._calling().bound.trace.read
    assert ready is not None and read is not None
    again = FastPath.of(call, ready, read, tuple(engine.watched_tensors(call)), call.statistics)
    assert again is not None
    return again, (call.q, call.k, call.v)


@pytest.mark.parametrize("statistics", [(), ("lse",), ("lse", "max_scores")])
def test_a_repeated_launch_has_the_same_arguments(recorder: Recorder, statistics: tuple[str, ...]) -> None:
    again, qkv = repeated(recorder, mask=causal, statistics=statistics, sinks=torch.randn(4))
    first = recorder.launches[-1]
    assert again.fits(*qkv)
    out, lse, largest = again(*qkv)
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


class Seen(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return function(*args, **(kwargs or {}))


class Passed(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return function(*args, **(kwargs or {}))


def test_what_looks_otherwise_is_no_repetition(recorder: Recorder) -> None:
    again, (q, k, v) = repeated(recorder, mask=causal)
    assert again.fits(q.clone(), k.clone(), v.clone())
    with torch.no_grad(), Passed(), torch.device("cpu"):
        assert again.fits(q, k, v)
    shifted = torch.empty(q.numel() + 1, dtype=q.dtype)[1:].view_as(q)
    assert shifted.data_ptr() % 16 != 0
    others = {
        "shape": q[:, :, :200].contiguous(),
        "strides": q.transpose(1, 2).contiguous().transpose(1, 2),
        "dtype": q.half(),
        "alignment": shifted,
        "gradient": q.clone().requires_grad_(),
        "parameter": torch.nn.Parameter(q, requires_grad=False),
        "no tensor": None,
        "array": q.float().numpy(),
    }
    assert [name for name, x in others.items() if again.fits(x, k, v)] == []  # type: ignore[arg-type]


def test_what_intercepts_operators_is_no_repetition(recorder: Recorder) -> None:
    again, qkv = repeated(recorder, mask=causal)
    found: dict[str, bool] = {}
    with Seen():
        found["dispatch mode"] = again.fits(*qkv)
    with torch.inference_mode():
        found["inference mode"] = again.fits(*qkv)
    with forward_ad.dual_level():
        found["forward mode"] = again.fits(*qkv)
    with torch.autocast("cpu"):
        found["autocast"] = again.fits(*qkv)

    def inside(x: Tensor) -> Tensor:
        found["transform"] = again.fits(*qkv)
        return x.sum()

    torch.func.grad(inside)(torch.randn(3))
    assert [name for name, fits in found.items() if fits] == [] and len(found) == 5
    assert again.fits(*qkv)


def test_a_repetition_wants_no_gradient(recorder: Recorder) -> None:
    sinks = torch.randn(4, requires_grad=True)
    with torch.no_grad():
        again, qkv = repeated(recorder, sinks=sinks)
        assert again.fits(*qkv)
    assert not again.fits(*qkv)


def test_a_changed_table_is_no_repetition(recorder: Recorder) -> None:
    ids = torch.arange(300) // 50
    again, qkv = repeated(recorder, mask=document(ids))
    assert again.fits(*qkv)
    ids.add_(0)
    assert not again.fits(*qkv)


def test_calls_that_do_more_than_launch_are_not_repeated(recorder: Recorder) -> None:
    q, k, v = inputs()
    crooked = torch.randn(2, 4, 300, 65, dtype=torch.bfloat16)[..., 1:]
    used = torch.tensor([300, 7], dtype=torch.int32)
    for qkv, changes in (
        ((crooked, k, v), {}),
        ((q, k, v), {"lengths": (None, None, used, used)}),
        ((q, k, k), {}),  # torch's guard takes no tensor twice
    ):
        engine, call = call_of(fa4flex.compile(mask=causal), qkv, **changes)
        engine.run(call)
        ready = engine.find(call)
        assert ready is not None and FastPath.of(call, ready, lambda score, mask: ((), ()), (), ()) is None


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
