"""Keys of the last call, and of lengths, each condition changed alone."""

from __future__ import annotations

from dataclasses import dataclass
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
    shifted,
    with_length,
)
from test_gpu_calls import WRITTEN, Recorder, call_of, inputs
from torch import Tensor

import fa4flex
from fa4flex.errors import InputError
from fa4flex.runtime.call import Call, SequenceLengths
from fa4flex.runtime.cuda.engine import Engine
from fa4flex.runtime.cuda.repeats.fast_path import FastPath
from fa4flex.runtime.cuda.tables import block_tables
from fa4flex.runtime.cuda.tables import lengths as lengths_module
from fa4flex.runtime.cuda.tables.lengths import LengthsKernel, check_lengths
from fa4flex.runtime.key_sources import Contiguous
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
    return made(engine, call, now.bound.trace.reader), call


def made(engine: Engine, call: Call, reader: Any) -> FastPath:
    engine.run(call)
    ready = engine.find(call)
    assert ready is not None
    again = FastPath.of(call, ready, reader, call.statistics)
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
    assert again.fits(call.q, call.kv.k, call.kv.v)
    assert again.fits(call.q.clone(), call.kv.k.clone(), call.kv.v.clone())
    changed = AGAIN[name](call)
    assert not again.fits(changed.q, changed.kv.k, changed.kv.v)


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
    again = made(engine, call, attn._calling().bound.trace.reader)
    assert again.serves(attn.variant)
    assert again.serves(composed(**CAPTURED).variant), "the functions may be others of the same code"
    scale = 1 / call.q.shape[-1] ** 0.5
    assert again.serves(composed(**{**CAPTURED, "scale": scale}).variant)
    assert not again.serves(composed(**{**CAPTURED, **SERVED[name]}).variant)


@pytest.mark.parametrize("change", ("nothing", "contents", "memory"))
def test_a_repetition_has_tables_of_what_is_there_now(recorder: Recorder, change: str) -> None:
    again, call = repeated(recorder)
    _, documents = call.operands
    before = len(recorder.tables)
    if change == "contents":
        documents.add_(0)
    elif change == "memory":
        documents.data = documents.clone()
    assert again.fits(call.q, call.kv.k, call.kv.v)
    again(call.q, call.kv.k, call.kv.v)
    assert len(recorder.tables) == before + 1
    read, written = recorder.launches[-1][10], recorder.tables[-1][WRITTEN]
    assert read.partial_ptr.data_ptr() == written.partial_ptr.data_ptr()


@pytest.mark.parametrize("change", ("a gradient", "the layout", "the alignment"))
def test_a_captured_tensor_that_looks_otherwise_is_no_repetition(recorder: Recorder, change: str) -> None:
    again, call = repeated(recorder)
    table, _ = call.operands
    if change == "a gradient":
        table.requires_grad_()
    elif change == "the alignment":  # as where parameters become parts of one flat buffer
        table.data = shifted(table)
    else:
        table.data = table.t().contiguous().t()
    assert not again.fits(call.q, call.kv.k, call.kv.v)


def test_the_contents_of_what_decides_nothing_may_change(recorder: Recorder) -> None:
    again, call = repeated(recorder)
    call.operands[0].add_(0)
    assert again.fits(call.q, call.kv.k, call.kv.v)


def test_a_repetition_has_the_statistics_of_its_call(recorder: Recorder) -> None:
    """Statistics that are wanted are compared by the caller."""
    again, _ = repeated(recorder)
    assert again.statistics == ("lse",)


# --- lengths --------------------------------------------------------------------------------------------


def test_lengths_that_fit_some_extents_are_looked_at_for_others() -> None:
    used = torch.tensor([S, 7], dtype=torch.int32)
    q, k, v = inputs()
    call = Call(q, Contiguous(k, v), (), None, SequenceLengths(seqused_k=used), (), 1.0, True, ())
    check_lengths(call)
    with pytest.raises(InputError, match="seqused_k up to 300"):
        check_lengths(call._replace(kv=Contiguous(k[:, :, :200], v[:, :, :200])))
    check_lengths(call._replace(lengths=SequenceLengths(seqused_q=used)))
    used.data = torch.tensor([S, S + 1], dtype=torch.int32)
    with pytest.raises(InputError, match="seqused_k up to 301"):
        check_lengths(call)


# --- corrected lengths ------------------------------------------------------------------------------------

CORRECTED: dict[str, Change] = {
    "contents of lengths": with_length(1, lambda x: x.copy_(torch.tensor([0, 10, 290, S]))),
    "lengths of keys": with_length(1, lambda x: torch.tensor([0, 10, 290, S], dtype=torch.int32)),
    "lengths of queries": with_length(0, lambda x: torch.tensor([0, 10, 290, S], dtype=torch.int32)),
    "queries": field("q", lambda x: torch.cat((x, x))),
    "keys": field("k", lambda x: torch.cat((x, x))),
    "heads": field("q", lambda x: torch.cat((x, x), 1)),
}


@dataclass
class Counting:
    """Stand-in for the compiled kernel of lengths: it counts its launches."""

    launches: int = 0

    def __call__(self, *given: Any) -> None:
        self.launches += 1


def correcting(tile_m: int = 64) -> tuple[LengthsKernel, Counting, Call]:
    cu = [torch.tensor([0, n, 200, S], dtype=torch.int32) for n in (100, 150)]
    qkv = tuple(torch.randn(S, heads, 64, dtype=torch.bfloat16) for heads in (HEADS, 2, 2))
    _, call = call_of(fa4flex.compile(mask=causal), qkv, (*cu, None, None))  # type: ignore[arg-type]
    counting = Counting()
    return LengthsKernel(counting, tile_m, None), counting, call


@pytest.mark.parametrize("tile_m", (0, 64))
@pytest.mark.parametrize("name", CORRECTED)
def test_each_component_leads_to_other_lengths(name: str, tile_m: int) -> None:
    kernel, counting, call = correcting(tile_m)
    first = kernel(call)
    assert kernel(call)[0] is first[0] and counting.launches == 2
    assert (first[1] is None) == (tile_m == 0)
    found = kernel(CORRECTED[name](call))
    assert (found[0] is first[0]) == (name == "contents of lengths") and counting.launches == 3


def test_few_sets_of_lengths_are_kept() -> None:
    kernel, _, call = correcting()
    others = [call.lengths[0].clone() for _ in range(2 * lengths_module.MOST_KEPT)]  # type: ignore[union-attr]
    for other in others:
        kernel(call._replace(lengths=SequenceLengths(other, other)))
    assert len(kernel._kept) == lengths_module.MOST_KEPT


@pytest.mark.parametrize("place", ((7, 0), (7, 1), None))
def test_each_stream_and_each_captured_launch_has_lengths_of_its_own(
    monkeypatch: pytest.MonkeyPatch, place: tuple[int, int] | None
) -> None:
    kernel, counting, call = correcting()
    first = kernel(call)
    monkeypatch.setattr(lengths_module, "capture_of", lambda q: place)
    other = kernel(call)
    assert other[0] is not first[0]
    assert (kernel(call)[0] is other[0]) == (place == (7, 0)) and counting.launches == 3


# --- block tables ---------------------------------------------------------------------------------------


def test_each_stream_has_tables_of_its_own_and_each_captured_launch(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = torch.arange(S) // 50
    engine, call = call_of(fa4flex.compile(mask=lambda b, h, q, kv: ids[q] == ids[kv]))
    # (stream, number of the capture), and which of the memories with tables is written
    written: list[int] = []
    for place, which in (
        ((0, 0), 0), ((0, 0), 0), ((7, 0), 1), ((0, 0), 0), ((7, 0), 1), ((7, 3), None), ((7, 3), None),
        (None, None),
    ):  # fmt: skip
        monkeypatch.setattr(block_tables, "capture_of", lambda q, place=place: place)
        engine.run(call)
        at = recorder.tables[-1][WRITTEN].partial_ptr.data_ptr()
        assert (at not in written) if which is None else written[which : which + 1] in ([at], []), place
        if at not in written:
            written.append(at)
