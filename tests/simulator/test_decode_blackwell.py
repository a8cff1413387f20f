"""The Blackwell kernel for few query rows on the simulated GPU: what each run shows of it. Everything that
test_decode.py and test_decode_paged.py have, `-m exhaustive` runs on this chip too."""

from __future__ import annotations

import random
from typing import Any
from unittest.mock import patch

import decoding_pages as paged
import paged_pools
import pytest
import torch
from decoding import SIMULATED, Size, attend, check, drawn, split_in

import fa4flex
from fa4flex import Sinks, Varlen
from fa4flex.variants import alibi, causal, sliding_window, softcap

BOTH: dict[str, Any] = {"score_mod": alibi, "mask": causal}


@pytest.fixture(autouse=True)
def chip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SIMULATED, "chip", "sm_100a")


GROUPS = {
    "own heads": Size(2, 2, 9, 63, 128, batch=2),
    "4 heads": Size(8, 2, 5, 300, 128),
    "7 heads": Size(14, 2, 4, 129, 128),
    "8 heads": Size(8, 1, 1, 333, 128),
    "16 heads": Size(16, 1, 2, 200, 128),
    "32 heads": Size(32, 1, 1, 470, 128),
    "one key": Size(4, 1, 1, 1, 128),
}


@pytest.mark.parametrize("name", GROUPS)
def test_any_group_of_heads(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One kernel: four copies of up to 32 rows, each of which has its own slope and its own end of keys."""
    split_in(monkeypatch, random.choice([1, 2, 5]))
    check(fa4flex.compile(**BOTH), drawn(GROUPS[name]))


@pytest.mark.parametrize("width", [128, 256])
@pytest.mark.parametrize("timing", [("eager", 0), ("late", 1), ("random", 2), ("random", 3)])
def test_every_timing_has_the_same_bits(
    timing: tuple[str, int], width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results are also those of another order of copies, products and warps."""
    split_in(monkeypatch, 2)
    torch.manual_seed(1)
    qkv, attn = drawn(Size(8, 2, 2, 470, width)), fa4flex.compile(**BOTH)
    with patch.object(random, "choice", lambda several: timing):
        out, lse = attend(attn, *qkv)
    with patch.object(random, "choice", lambda several: ("eager", 0)):
        again, lse_again = attend(attn, *qkv)
    assert torch.equal(out, again) and torch.equal(lse, lse_again)
    check(attn, qkv)


@pytest.mark.parametrize("width", [128, 256])
def test_maxima_that_rise(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores of some rows pass the maximum in use at every tile, by more than probabilities may: the output
    so far is rescaled. Full tiles are met last to first."""
    split_in(monkeypatch, random.choice([1, 2]))
    q, k, v = drawn(Size(8, 2, 3, 470, width))
    larger = torch.linspace(9, 0.1, 470).view(1, 1, 470, 1)
    q[:, :, 1:2] = 0.05 * q[:, :, 1:2]
    check(fa4flex.compile(**BOTH), [q, (larger * k).bfloat16(), v])


ROWS = {
    "33 rows": Size(33, 1, 1, 200),
    "64 rows": Size(8, 2, 16, 301),
}


@pytest.mark.parametrize("name", ROWS)
def test_more_rows_have_fewer_copies(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    split_in(monkeypatch, random.choice([1, 3]))
    mods = {"score_mod": softcap(20.0), "mask": causal & sliding_window(90)}
    check(fa4flex.compile(**mods), drawn(ROWS[name]))


def test_float16_of_wide_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Latent attention's widths: one block has all of a multiprocessor."""
    split_in(monkeypatch, 2)
    q, k, v = drawn(Size(16, 1, 1, 200, 192), torch.float16)
    check(fa4flex.compile(), [q, k, v[..., :128]])


WIDE: dict[str, tuple[Size, int]] = {
    "256": (Size(8, 1, 2, 300, 256), 256),
    "256, 64 rows": (Size(8, 2, 16, 141, 256), 256),
    "256, 5 queries of 32 heads": (Size(32, 1, 5, 129, 256), 256),
    "256, one key": (Size(4, 2, 1, 1, 256, batch=2), 256),
    "192": (Size(8, 1, 3, 270, 192), 192),
    "200 and 136": (Size(6, 2, 3, 200, 200), 136),
    "64 and 256": (Size(6, 1, 9, 210, 256), 64),
    "256 and 64": (Size(16, 2, 1, 401, 256), 64),
}
"""Sizes of the wider operands, and columns of values; of "64 and 256", of queries and keys."""

COMPOSED: dict[str, dict[str, Any]] = {
    "dense": {},
    "alibi, causal": BOTH,
    "softcap, window": {"score_mod": softcap(20.0), "mask": causal & sliding_window(90)},
    "a tree": {"mask": lambda b, h, q_idx, kv_idx: (q_idx * 7 + kv_idx) % 3 != h % 2},
}


@pytest.mark.parametrize("name", WIDE)
def test_heads_up_to_256(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs of up to 256 columns beside queries and scores are most of tensor memory: one block of a
    multiprocessor."""
    split_in(monkeypatch, random.choice([1, 2, 3]))
    size, other = WIDE[name]
    q, k, v = drawn(size, random.choice([torch.bfloat16, torch.float16]))
    if name.startswith("64"):
        q, k = q[..., :other], k[..., :other]
    else:
        v = v[..., :other]
    check(fa4flex.compile(**COMPOSED[random.choice(list(COMPOSED))]), [q, k, v])


@pytest.mark.parametrize("splits", [1, 3])
def test_sinks_of_ragged_lengths(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sequence's own keys are split; what lies past its end may be anything. A sequence without keys has
    its sink alone."""
    split_in(monkeypatch, splits)
    q, k, v = drawn(Size(q_len=2, kv_len=400, batch=4))
    used = torch.tensor([400, 129, 1, 0], dtype=torch.int32)
    for b, length in enumerate(used):
        k[b, :, length:], v[b, :, length:] = torch.nan, torch.nan
    attn = fa4flex.compile(mask=causal, sinks=Sinks(torch.tensor([0.5, 3.0, -torch.inf, 1.0])))
    varlen = Varlen(seqused_k=used)
    out, lse = attend(attn, q, k, v, varlen=varlen)
    clean = [x.nan_to_num().double() for x in (q, k, v)]
    exact, exact_lse = attn(*clean, return_lse=True, varlen=varlen)
    assert (out.double() - exact).abs().max().item() <= 2 * 2**-8 * exact.abs().max().item()
    torch.testing.assert_close(lse.double(), exact_lse, atol=1e-4, rtol=0)


PAGES = {
    "16": paged_pools.Size(8, 1, 3, (301, 0, 1), 128, 128, 16),
    "64": paged_pools.Size(4, 1, 2, (129, 64), page_size=64),
    "1": paged_pools.Size(8, 2, 1, (70, 33), page_size=1),
    "16, heads of 256": paged_pools.Size(8, 1, 3, (133, 0, 1), 256, 256, 16),
    "1, heads of 200 and 256": paged_pools.Size(4, 2, 2, (70, 1), 200, 256, 1),
}


@pytest.mark.parametrize("name", PAGES)
def test_pages(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some sequences have no keys, or one; pages lie in any order, and nobody else's are read."""
    split_in(monkeypatch, random.choice([1, 2, 3]))
    paged.check(fa4flex.compile(mask=causal), paged_pools.drawn(PAGES[name]))


def test_wrong_pages_are_told_by_the_next_call() -> None:
    attn = fa4flex.compile(mask=causal)
    given = paged_pools.drawn(paged_pools.Size(8, 1, 3, (40, 33), 128, 128, 16))
    given.paging.page_table[0, 1] = -7
    paged.attend(attn, given)
    with pytest.raises(fa4flex.InputError, match="page -7 in the page table"):
        fa4flex.synchronize()


def test_what_is_shown_is_this_kernel() -> None:
    attn = fa4flex.compile(**BOTH)
    call = {"q_len": 1, "kv_len": 8192, "heads": 32, "kv_heads": 8, "arch": "sm_100a"}
    assert "few query rows" in attn.source("plan", **call)
    assert "kernels.decode_sm100" in attn.source("forward", **call)
    assert "few query rows" in str(attn.explain(1, 8192, "sm_100a"))
