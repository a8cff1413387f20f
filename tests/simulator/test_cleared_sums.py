"""Sums of dQ that blocks of Hopper's backward clear for the next section of heads, which are small here."""

from __future__ import annotations

import random
import weakref
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from cutlass import Int32
from helpers import Width, drawn_timing, widths
from own_backward import Own, captured, kept_arguments
from pairs import few_tiles, long_steps, many_keys
from test_simulated_backward import COMPOSED, judged

import fa4flex
import ptxsim
from fa4flex.kernels.bwd_sm90.clearing import Clearer
from fa4flex.kernels.common.backward import BackwardTileScheduler
from fa4flex.runtime import launch, programs

HEADS, BLOCKS = 4, 3
"""The simulated GPU runs all blocks beside each other: one after the other, nobody would wait."""

NAMES = ("alibi, causal", "sinks", "documents", "empty rows", "unseen keys")
"""Compositions whose blocks are persistent, and whose heads go in sections."""

WIDTHS: tuple[Width, ...] = (40, 64, 96, 128, (192, 128))


@pytest.fixture(autouse=True)
def small_sections(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Sections of one head of dK, or of two, and long steps: short ones clear nothing."""
    monkeypatch.setenv("FA4FLEX_CACHE", "0")  # the key of a kernel knows of files alone
    monkeypatch.setattr("fa4flex.compiler.compile._kernels", {})
    monkeypatch.setattr(launch, "publish", programs.Published)
    monkeypatch.setattr(programs, "_engine", programs._engine.__wrapped__)
    width = random.choice((1, 2))
    monkeypatch.setattr(BackwardTileScheduler, "heads_at_a_time", lambda *_: Int32(width))
    with few_tiles(False), long_steps():
        yield


def cleared(name: str, lengths: tuple[int, int], width: Width, kv_heads: int) -> list[int] | None:
    """Counts of tiles of keys that cleared, by section, if any do, of gradients that are right."""
    q_len, kv_len = lengths
    wide, wide_v = widths(width)
    shapes = ((1, HEADS, q_len, wide), (1, kv_heads, kv_len, wide), (1, kv_heads, kv_len, wide_v))
    timing, seed = drawn_timing()
    where = f"{name}, {lengths}, width {width}, {kv_heads} KV heads, {timing} {seed}"
    given: list[tuple[Any, ...]] = []
    device = ptxsim.device("sm_90a", seed, timing, sms=BLOCKS, together=BLOCKS)
    # An engine of its own: a launch that served another call is made of no arguments again.
    with kept_arguments(given), patch.object(launch, "_prepared", weakref.WeakKeyDictionary()):
        judged(where, COMPOSED[name], shapes, device)
    counts = given[0][-2]
    return None if counts is None else counts.flatten().tolist()


def close(name: str, lengths: tuple[int, int], width: Width, kv_heads: int) -> None:
    counts = cleared(name, lengths, width, kv_heads)
    assert counts is not None
    assert counts[0] == 0, "the first section is cleared before"
    if kv_heads > 2:
        most = -(-lengths[1] // 128) // 2
        assert counts[1] > 0 and counts[1] % max(most, 1) == 0, "all tiles whose turn it is clear"


@pytest.mark.slow
@pytest.mark.parametrize("draw", range(2))
def test_some(draw: int) -> None:
    name = random.sample(NAMES, 2)[draw]
    close(name, random.choice(((200, 200), (130, 200))), random.choice(WIDTHS), random.choice((1, 2, 4)))


@pytest.mark.exhaustive
@pytest.mark.parametrize("width", WIDTHS, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_all(name: str, width: Width) -> None:
    for lengths in ((200, 200), (130, 200), (190, 129)):
        for kv_heads in (1, 2, 4):
            close(name, lengths, width, kv_heads)


@pytest.mark.slow
def test_many_tiles_share_a_section() -> None:
    close("sinks", (600, 600), 64, 4)


@pytest.mark.slow
def test_others_are_cleared_before() -> None:
    assert cleared("plain", (130, 200), 64, 2) is None


@pytest.mark.slow
def test_a_section_that_is_not_waited_for_is_noticed() -> None:
    with patch.object(Clearer, "wait", lambda *_: None), pytest.raises(AssertionError):
        cleared("sinks", (200, 200), 64, 4)


@pytest.mark.slow
def test_sums_that_are_left_out_are_noticed() -> None:
    made = Clearer.of

    def fewer(*given: Any) -> Any:
        found = made(*given)
        return found._replace(share=found.share // 2)

    with patch.object(Clearer, "of", fewer), pytest.raises(AssertionError):
        cleared("sinks", (200, 200), 64, 4)


@pytest.mark.slow
def test_one_synchronisation_less_is_noticed() -> None:
    """Mutants of what clearing has: the fence behind the wait, and what tells the warp of the next tile."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 3, length, 64).bfloat16() for length in (320, 128, 128))
    one = patch.object(BackwardTileScheduler, "heads_at_a_time", lambda *_: Int32(1))
    with one, many_keys():
        own: Own = captured("sm_90a", fa4flex.compile(mask=lambda b, h, q, k: q >= k), (q, k, v), sms=2)
    assert own.launch.grid == (2, 1, 1) and own.kept[-2].flatten().tolist()[1:] == [1, 1]
    tried = [m for m in own.that_matter() if m.instruction.opcode.startswith("fence.proxy.async.global")]
    assert len(tried) == 1 and own.noticed(tried[0])
