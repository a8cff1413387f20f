"""Clocks of the Blackwell kernel for latent rows: counted, and by the model of time."""

from __future__ import annotations

import pytest
import torch
from decoding import split_in

import fa4flex
import ptxsim
from fa4flex import Latent
from ptxsim import model
from ptxsim.run.counts import cycles, shared_memory

TILES = 12


def attend() -> None:
    """64 heads of one query, whose keys one block has."""
    q, rows = torch.randn(1, 64, 1, 576).bfloat16(), torch.randn(1, 64 * TILES, 1, 576).bfloat16()
    with torch.no_grad():
        fa4flex.compile(scale=192**-0.5)(q, Latent(rows))


@pytest.mark.slow
def test_clocks_of_a_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Per tile of 64 keys. Operands in shared memory, by 128 bytes: 9 pieces of keys and 2 of queries, 8 KB
    each, for scores; 8 pieces as values and probabilities twice, for the output."""
    split_in(monkeypatch, 1)
    with ptxsim.device("sm_100a", timing="eager") as gpu:
        attend()
    (result,) = gpu.results
    assert not gpu.findings
    assert cycles(result)["mma"] == 64 * 64 * (576 + 512) / 4096 * TILES
    assert shared_memory(result)["operands of MMAs"] == (9 + 2 + 8 + 2) * 64 * TILES
    assert cycles(result)["shared memory"] <= 2_050 * TILES
    assert 256 * TILES <= cycles(result)["special functions"] <= 272 * TILES


@pytest.mark.slow
def test_a_step_takes_as_long_as_memory_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """A B200's 8 TB/s bring a tile to each of 148 multiprocessors in 2,524 clocks of 1.85 GHz."""
    split_in(monkeypatch, 1)
    torch.manual_seed(0)  # which rows raise their maxima shifts some warps by some clocks
    with model.recording("sm_100a") as recorder:
        attend()
    found = model.predict(recorder.traces[0])
    assert found.cycles_per_step <= 2_524
    assert found.overhead <= 4_700
