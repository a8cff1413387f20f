"""Instructions of the Blackwell forward: the paper's Table 1, and at most what FlashAttention-4 does."""

from __future__ import annotations

from collections import Counter
from unittest.mock import patch

import pytest
import torch
from cases import Size, fa4_forward

import fa4flex
import ptxsim
from fa4flex.kernels.plan import splitting
from fa4flex.primitives.schedule import Schedule
from fa4flex.variants import causal
from ptxsim import model
from ptxsim.model.chip import B200
from ptxsim.run.counts import by_warp, cycles, shared_memory
from ptxsim.run.launch import Result

ALONE, PAIR = Size(q_len=256, kv_len=1024), Size(q_len=512, kv_len=1024)
"""Problem sizes of one CTA, and of a CTA pair, which there is without a mask."""


def own(size: Size, masked: bool) -> Result:
    attn = fa4flex.compile(mask=causal) if masked else fa4flex.compile()
    q, k, v = (torch.randn(1, 1, n, size.dim).bfloat16() for n in (size.q_len, size.kv_len, size.kv_len))
    with torch.no_grad(), ptxsim.device("sm_100a", timing="eager") as gpu:
        attn(q, k, v)
    assert not gpu.findings
    return gpu.results[0]


WIDE = {
    "pair": (Schedule(), Size(q_len=256, kv_len=1280, dim=256)),
    "alone": (Schedule(tile=(128, 64)), Size(q_len=128, kv_len=640, dim=256)),
}
"""Heads of 256: 10 tiles of keys, of 128 for a pair of CTAs, of 64 for one alone."""


def wide(name: str) -> None:
    schedule, size = WIDE[name]
    q, k, v = (torch.randn(1, 1, n, size.dim).bfloat16() for n in (size.q_len, size.kv_len, size.kv_len))
    with torch.no_grad():
        fa4flex.compile(schedule=schedule)(q, k, v)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mma"), [("pair", 2048), ("alone", 1024)])
def test_clocks_of_heads_of_256(name: str, mma: int) -> None:
    """Per tile of keys and CTA. Operands of a pair: 16 x (128 x 16 of q and 64 x 16 of k) elements for scores
    and 8 x (16 x 128) of v; of one CTA as much, for half of the keys. No exponential is a polynomial."""
    with ptxsim.device("sm_100a", timing="eager") as gpu:
        wide(name)
    (result,), tiles = gpu.results, 10
    ctas = 2 if name == "pair" else 1
    found = cycles(result)
    assert not gpu.findings and result.shape.cluster == (ctas, 1, 1)
    assert found["mma"] == mma * tiles * ctas
    assert shared_memory(result)["operands of MMAs"] == 1024 * tiles * ctas
    assert mma / 2 * tiles * ctas <= found["special functions"] < 1.02 * mma / 2 * tiles * ctas


@pytest.mark.slow
@pytest.mark.parametrize(("name", "share"), [("pair", 0.85), ("alone", 0.62)])
def test_a_step_of_heads_of_256(name: str, share: float) -> None:
    """Products' share of a step, by the model of time. One CTA reads as much of shared memory for 64 keys as
    one of a pair for 128, which takes longer than their products."""
    torch.manual_seed(0)  # which rows raise their maxima shifts some warps by some clocks
    with model.recording("sm_100a") as recorder:
        wide(name)
    found = model.predict(recorder.traces[-1])
    assert found.utilisation["tensor core"] >= share


@pytest.mark.slow
def test_a_step_of_few_queries_of_256() -> None:
    """A block alone is done with 64 keys before memory, at 8 TB/s, has brought the next ones: K and V of 256
    columns of 16 bits. Products of 128 rows take 1,024 clocks of it."""
    torch.manual_seed(0)
    q, (k, v) = torch.randn(1, 8, 1, 256).bfloat16(), torch.randn(2, 1, 1, 1024, 256).bfloat16()
    alone = patch.object(splitting, "_splits", lambda *given: (1, 1))
    with model.recording("sm_100a") as recorder, torch.no_grad(), alone:
        fa4flex.compile()(q, k, v)
    found = model.predict(recorder.traces[0])
    memory = 2 * 64 * 256 * 2 / (8e3 / B200.processors / B200.gigahertz)
    assert 1024 < found.cycles_per_step < 0.8 * memory


def arithmetic(result: Result) -> float:
    """float32 results of additions, products, maxima and multiply-adds of all warps; packed ones count
    twice."""
    total = sum(by_warp(result).values(), Counter())
    return float(2 * total["float arithmetic, packed"] + total["float arithmetic"])


def test_clocks_of_the_paper() -> None:
    """Per 128 x 128 tile of width 128: MMA 1024, its operands 768, exponentials 1024 less those on FMA units
    (Zadouri et al. 2026, Table 1)."""
    result, tiles = own(ALONE, False), ALONE.q_len * ALONE.kv_len // 128**2
    found = cycles(result)
    assert found["mma"] == 1024 * tiles
    assert shared_memory(result)["operands of MMAs"] == 768 * tiles
    # An eighth of the exponentials are polynomials; a row that is rescaled takes one more.
    assert 0.87 * 1024 * tiles < found["special functions"] < 0.89 * 1024 * tiles


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "masked"), [(ALONE, False), (ALONE, True), (PAIR, False)], ids=["full", "causal", "pair"]
)
def test_no_more_than_flash_attention_4(size: Size, masked: bool) -> None:
    mine, peer = own(size, masked), fa4_forward("sm_100a", size, masked).run("eager", 0)
    assert mine.shape.cluster == peer.shape.cluster
    ours, theirs = cycles(mine), cycles(peer)
    for unit in ("mma", "special functions"):
        assert ours[unit] <= theirs[unit], unit
    assert arithmetic(mine) <= arithmetic(peer)
    moved, peers_moved = shared_memory(mine), shared_memory(peer)
    assert moved["operands of MMAs"] <= peers_moved["operands of MMAs"]
    # At the start of a CTA, and where it waits for barriers, some thousandths.
    assert sum(moved.values()) <= 1.005 * sum(peers_moved.values())


@pytest.mark.parametrize("q_len", [256, 512], ids=["alone", "pair"])
def test_a_step_moves_no_more_than_flash_attention_4s(q_len: int) -> None:
    """Clocks of shared memory that four more tiles of keys take."""
    mine, peers = [], []
    for kv_len in (512, 1024):
        size = Size(q_len=q_len, kv_len=kv_len)
        mine.append(sum(shared_memory(own(size, False)).values()))
        peers.append(sum(shared_memory(fa4_forward("sm_100a", size, False).run("eager", 0)).values()))
    assert 0 < mine[1] - mine[0] <= peers[1] - peers[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "masked"),
    [
        pytest.param(Size(q_len=256, kv_len=1280), True, id="causal"),
        pytest.param(Size(q_len=512, kv_len=1280), False, id="pair", marks=pytest.mark.exhaustive),
    ],
)
def test_a_step_takes_no_longer_than_flash_attention_4s(size: Size, masked: bool) -> None:
    """In the steady state, by the model of time, which charges this kernel's waits for tensor memory."""
    torch.manual_seed(0)  # which rows raise their maxima shifts some warps by some clocks
    attn = fa4flex.compile(mask=causal) if masked else fa4flex.compile()
    q, k, v = (torch.randn(1, 1, n, size.dim).bfloat16() for n in (size.q_len, size.kv_len, size.kv_len))
    with model.recording("sm_100a") as recorder, torch.no_grad():
        attn(q, k, v)
    mine = model.predict(recorder.traces[-1])
    peer = model.predict(model.record(fa4_forward("sm_100a", size, masked).launch))
    assert mine.step_flops == peer.step_flops
    assert mine.cycles_per_step <= peer.cycles_per_step
