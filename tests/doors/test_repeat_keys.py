"""Keys of lengths, and of block tables, each condition changed alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from launch_changes import (
    HEADS,
    Change,
    S,
    field,
    recording,
    with_length,
)
from test_gpu_calls import WRITTEN, Recorder, call_of, inputs

import fa4flex
from fa4flex.errors import InputError
from fa4flex.runtime.call import Call, SequenceLengths
from fa4flex.runtime.cuda.tables import block_tables
from fa4flex.runtime.cuda.tables import lengths as lengths_module
from fa4flex.runtime.cuda.tables.lengths import LengthsKernel, check_lengths
from fa4flex.runtime.key_sources import Contiguous
from fa4flex.variants import causal


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return recording(monkeypatch)


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
