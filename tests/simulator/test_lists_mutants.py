"""One synchronisation less is noticed in the kernels for listed keys, right as they stand."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import lru_cache
from unittest.mock import patch

import pytest
import torch
from listed import CHIPS, KERNELS
from mutants import Mutant
from own_calls import Own, is_first, nearly_all_are_noticed, some_are_noticed

import fa4flex
from fa4flex import Lists
from fa4flex.kernels.plan import splitting
from fa4flex.variants import causal

KINDS = "ascending", "in no order", "many rows", "united"
"""Lists of a call; the third ones ascend, and a hundred heads share them; the last ones are of three
tokens."""


def call_of(kind: str) -> Callable[[], bool]:
    """Five tiles of keys of one block, whose maxima rise; or lists in no order, of which many ids repeat."""
    made = torch.Generator().manual_seed(0)
    heads, tokens = {"many rows": (100, 1), "united": (16, 3)}.get(kind, (40, 1))
    q = torch.randn(1, heads, tokens, 64, generator=made).bfloat16()
    grown = torch.linspace(0.5, 2.5, 700).view(1, 1, -1, 1)
    k, v = ((torch.randn(1, 1, 700, 64, generator=made) * grown).bfloat16() for _ in range(2))
    ids = torch.randint(-1, 175, (1, 1, 1, 300), generator=made, dtype=torch.int32)
    if kind == "united":
        ids = torch.randint(-1, 175, (1, 1, 3, 60), generator=made, dtype=torch.int32)
    elif kind != "in no order":
        ids = torch.arange(1, 126, dtype=torch.int32).view(1, 1, 1, -1)
    attn, lists = fa4flex.compile(mask=causal), Lists(ids, kv_len=700, unit=4, window=100)
    with torch.no_grad():
        exact = attn(q.double(), k.double(), v.double(), blocks=lists)

    def call() -> bool:
        with patch.object(splitting, "_splits", lambda *given: (1, 1)):
            out = attn(q, k, v, blocks=lists)
        return bool((out.double() - exact).abs().max() <= 2 * 2**-8 * exact.abs().max())

    return call


@lru_cache
def own(chip: str, kind: str) -> Own:
    return Own(chip, f"kernels{KERNELS[chip]}", call_of(kind), 1)


def implied(mutant: Mutant) -> bool:
    """True if what it lacks is known not to matter: of two fences after the initialisation of barriers,
    either; a fence of products that follows another one with no use of the registers between; a warp that
    gathers where its lanes have not parted; the fence after queries are copied, as there is one before each
    product; and the meeting of all threads at the start, who meet again before they use barriers."""
    fences = "fence.mbarrier_init", "wgmma.fence", "bar.warp"
    return mutant.instruction.opcode.startswith(fences) or is_first(mutant, "fence.proxy", "bar.sync")


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
def test_some(chip: str) -> None:
    some_are_noticed(own(chip, random.choice(KINDS)), implied)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chip", CHIPS)
def test_all(chip: str, kind: str) -> None:
    """Nearly every mutant that can matter is noticed, but for those that are implied."""
    # Where entries are looked up, bits that were written before are written again.
    nearly_all_are_noticed(own(chip, kind), implied, 80)
