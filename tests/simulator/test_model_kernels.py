"""Predictions of the model of time for whole kernels: flash-attn-4's forward near its published speed, this
library's own beside it, and no faster chip that is slower."""

from __future__ import annotations

import dataclasses
from functools import lru_cache

import peers
import pytest
import torch
from cases import Size, fa4_forward

import fa4flex
from fa4flex.errors import InputError
from ptxsim import model
from ptxsim.doors.launch import Launch
from ptxsim.model import B200, Attention, Prediction, Trace
from ptxsim.model.recorder import Recorder

STEP = 4 * 256 * 128 * 128
"""Flops of 256 rows of q and 128 of k."""


@lru_cache
def peer(causal: bool) -> Trace:
    """flash-attn-4's forward at head_dim 128, 12 tiles of keys: two CTAs with 256 rows each, or one of them
    under a causal mask, the longest row block."""
    captured = fa4_forward("sm_100a", Size(q_len=1536 if causal else 512, kv_len=1536), causal, sms=148)
    return model.record(captured.launch)


@lru_cache
def peer_prediction(causal: bool) -> Prediction:
    return model.predict(peer(causal))


@lru_cache
def own_prediction() -> Prediction:
    q, k, v = (torch.randn(1, 1, length, 128).bfloat16() for length in (512, 1536, 1536))
    with model.recording("sm_100a") as recorder, torch.no_grad():
        fa4flex.compile()(q, k, v)
    (trace,) = recorder.traces
    return model.predict(trace)


def test_the_published_peak_of_the_peer() -> None:
    """1,613 TFLOP/s at its best: 32k tokens of 16 heads."""
    found = peer_prediction(False).tflops(Attention(1, 16, 32768, 32768))
    assert 0.85 * 1613 < found < 1.15 * 1613


def test_other_published_speeds_of_the_peer() -> None:
    """Batch 4 of 8k tokens, 16 heads: 1,535 TFLOP/s, and 1,418 under a causal mask (its pull request 2280).
    The model is faster than both by about as much as above."""
    full = peer_prediction(False).tflops(Attention(4, 16, 8192, 8192))
    causal = peer_prediction(True).tflops(Attention(4, 16, 8192, 8192, causal=True))
    assert 1.0 < full / 1535 < 1.2 and 1.0 < causal / 1418 < 1.2
    assert causal / full == pytest.approx(1418 / 1535, abs=0.06)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_work_of_the_peer(causal: bool) -> None:
    """All MMAs of a CTA are replayed; each step is one tile; exponentials and MMAs are as busy as their
    counts say."""
    found = peer_prediction(causal)
    assert found.ctas == (1 if causal else 2)
    assert found.total_flops == 12 * STEP and found.step_flops == STEP
    assert found.cycles_per_step > 2048 and found.bound == "dependences"
    busy = found.utilisation
    assert busy["tensor core"] == pytest.approx(2048 / found.cycles_per_step, abs=0.02)
    # At most 24 of a row's 128 exponentials are polynomials; two warps share a sub-core's 4 lanes a clock.
    most = 2 * 129 * 8 / found.cycles_per_step
    assert 0.75 * most < busy["special functions"] < most + 0.02
    assert {role.name for role in found.roles} >= {"softmax 0", "softmax 1", "correction", "mma", "load"}
    assert all(0 <= share < 1 for share in busy.values())


def test_a_pair_of_ctas_halves_what_mmas_read_of_shared_memory() -> None:
    """Per step 768 clocks of each 128 x 128 tile for one CTA, 512 for a pair; the tile of K and V comes in as
    well, half of it to each CTA of a pair."""
    pair, alone = (
        peer_prediction(c).utilisation["shared memory"] * peer_prediction(c).cycles_per_step
        for c in (False, True)
    )
    assert alone == pytest.approx(2 * 768 + 512, rel=0.08)
    assert pair == pytest.approx(2 * 512 + 256, rel=0.08)


def test_the_own_kernel_in_the_same_run() -> None:
    """Both are predicted from the same numbers; neither reaches the peak."""
    peers, own = peer_prediction(False), own_prediction()
    assert own.step_flops == peers.step_flops == STEP and own.total_flops == 12 * STEP
    for found in (peers, own):
        assert 0.5 < found.utilisation["tensor core"] < 1
        assert found.steady_tflops < B200.peak_tflops


@pytest.mark.parametrize(
    "faster",
    [
        {"special": 32},
        {"packed_fma": 128},
        {"alu": 128},
        {"mma_flops": 16384},
        {"shared_bytes": 256},
        {"tensor_load_bytes": 1024},
        {"wait_latency": 24},
        {"mma_gap": 0.0},
    ],
    ids=lambda faster: next(iter(faster)),
)
def test_a_faster_chip_is_not_slower(faster: dict[str, float]) -> None:
    """But for what another order of issue may cost."""
    better = dataclasses.replace(B200, **faster)
    assert model.predict(peer(False), better).cycles_per_step < 1.01 * peer_prediction(False).cycles_per_step


def test_more_special_functions_help_and_fewer_hurt() -> None:
    """The sensitivities say so, and half as many are the busiest unit."""
    ((half, double),) = model.sensitivity(peer(False), ["special"]).values()
    assert half > 0.3 and double < -0.03
    starved = model.predict(peer(False), dataclasses.replace(B200, special=8)).utilisation
    assert max(starved, key=lambda unit: starved[unit]) == "special functions"


@pytest.mark.slow
def test_the_backward_of_the_peer() -> None:
    """Batch 4 of 8k tokens, 16 heads: 1,360 TFLOP/s (the same pull request, pairs of CTAs)."""
    q, k, v = (torch.randn(1, 1024, 1, 128).bfloat16().requires_grad_() for _ in range(3))
    recorder = Recorder()
    with peers.flash_attention("sm_100a", recorder.run, sms=148) as fa4:
        out, _ = fa4.flash_attn_func(q, k, v)
        out.backward(torch.randn_like(out))
    _, backward = recorder.traces
    found = model.predict(backward)
    # Five products of 128 keys and 8 tiles of queries.
    assert found.ctas == 2 and found.total_flops == 2 * 5 * 128 * 1024 * 128
    speed = found.tflops(Attention(4, 16, 8192, 8192, products=5), tile=(128, 64))
    assert 0.85 * 1360 < speed < 1.15 * 1360


def test_long_sequences_approach_the_steady_state() -> None:
    found = peer_prediction(False)
    short, long = (found.tflops(Attention(32768 // s, 148, s, s)) for s in (1024, 32768))
    assert short < long < found.steady_tflops and long > 0.97 * found.steady_tflops


def test_a_tile_that_is_not_the_kernels_is_refused() -> None:
    with pytest.raises(InputError, match="128 x 128"):
        peer_prediction(False).tflops(Attention(1, 16, 8192, 8192), tile=(128, 128))


def test_a_hopper_kernel_is_refused() -> None:
    launch: Launch = fa4_forward("sm_90a", Size(), False).launch
    with pytest.raises(InputError, match="sm_90a"):
        model.record(launch)


def test_words_and_pictures() -> None:
    found = peer_prediction(False)
    said = model.explain(found)
    assert f"takes {found.cycles_per_step:,.0f} clocks, 2,048 of them would be MMAs" in said
    assert "bounded by dependences" in said and "mma, warp 12: issues" in said
    title, *rows = model.timeline(found, steps=2, width=80).splitlines()
    assert title.startswith("2 steps from clock")
    assert [row.split("|")[0].strip() for row in rows][:3] == ["tensor core", "softmax 0", "softmax 1"]
    letters = rows[0].split("|")[1]
    assert len(letters) == 80
    assert letters.count("#") / 80 == pytest.approx(found.utilisation["tensor core"], abs=0.08)
