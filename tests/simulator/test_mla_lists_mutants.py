"""One synchronisation less is noticed in the Hopper kernel for listed latent rows, right as it stands."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import lru_cache
from unittest.mock import patch

import pytest
import torch
from mutants import Mutant
from own_calls import Own, is_first, nearly_all_are_noticed, some_are_noticed, wait_left_out

import fa4flex
from fa4flex import Latent, Lists
from fa4flex.kernels.plan import splitting
from fa4flex.variants import causal

SCALE = 192**-0.5
KINDS = "ascending", "in no order"
"""Lists of a call."""


def call_of(kind: str) -> Callable[[], bool]:
    """Three tiles of keys of one block, whose maxima rise; or lists in no order, of which many ids repeat."""
    made = torch.Generator().manual_seed(0)
    q = torch.randn(1, 40, 1, 576, generator=made).bfloat16()
    grown = torch.linspace(0.5, 2.5, 500).view(1, -1, 1, 1)
    rows = (torch.randn(1, 500, 1, 576, generator=made) * grown).bfloat16()
    ids = torch.arange(1, 64, dtype=torch.int32).view(1, 1, 1, -1)
    if kind == "in no order":
        ids = torch.randint(-1, 125, (1, 1, 1, 100), generator=made, dtype=torch.int32)
    attn, lists = fa4flex.compile(mask=causal, scale=SCALE), Lists(ids, kv_len=500, unit=4, window=100)
    with torch.no_grad():
        exact = attn(q.double(), Latent(rows.double()), blocks=lists)

    def call() -> bool:
        with patch.object(splitting, "_splits", lambda *given: (1, 1)):
            out = attn(q, Latent(rows), blocks=lists)
        return bool((out.double() - exact).abs().max() <= 2 * 2**-8 * exact.abs().max())

    return call


@lru_cache
def own(kind: str) -> Own:
    return Own("sm_90a", "mla_lists", call_of(kind), 1)


def implied(mutant: Mutant) -> bool:
    """True if what it lacks is known not to matter: of two fences after the initialisation of barriers,
    either; a fence of products that follows another one with no use of the registers between; a warp that
    gathers where its lanes have not parted; the fence after queries are copied, as there is one before each
    product; the meeting of all threads at the start, who meet again before they use barriers; and waits for
    pieces, most of which others imply: a warpgroup waits for those of the other one's block, which that one
    has told it of, and pieces that are freed together are waited for one by one."""
    fences = "fence.mbarrier_init", "wgmma.fence", "bar.warp"
    again = mutant.instruction.opcode.startswith(fences) or is_first(mutant, "fence.proxy", "bar.sync")
    return again or wait_left_out(mutant)


@pytest.mark.slow
def test_some() -> None:
    some_are_noticed(own(random.choice(KINDS)), implied)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", KINDS)
def test_all(kind: str) -> None:
    """Nearly every mutant that can matter is noticed, but for those that are implied."""
    nearly_all_are_noticed(own(kind), implied, 80)
