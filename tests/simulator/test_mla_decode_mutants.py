"""One synchronisation less is noticed in the kernels for latent rows, right as they stand."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import lru_cache
from unittest.mock import patch

import pytest
import torch
from mutants import Mutant
from own_calls import Own
from own_calls import wait_left_out as waits

import fa4flex
from fa4flex import Latent, Varlen
from fa4flex.kernels.plan import splitting
from fa4flex.variants import causal

SCALE, USED = 192**-0.5, 300


def call_of(used: bool) -> Callable[[], bool]:
    """Three tiles of keys of one block, whose maxima rise; `used`: a sequence ends within its tensor, whose
    other rows are NaN."""
    made = torch.Generator().manual_seed(0)
    q = torch.randn(1, 40, 1, 576, generator=made).bfloat16()
    grown = torch.linspace(0.5, 2.5, 330).view(1, -1, 1, 1)
    rows = (torch.randn(1, 330, 1, 576, generator=made) * grown).bfloat16()
    if used:
        rows[:, USED:] = math.nan
    lengths = Varlen(seqused_k=torch.tensor([USED], dtype=torch.int32)) if used else None
    attn = fa4flex.compile(mask=causal, scale=SCALE)
    with torch.no_grad():
        exact = attn(q.double(), Latent(rows.double()), varlen=lengths)

    def call() -> bool:
        with patch.object(splitting, "_splits", lambda *given: (1, 1)):
            out = attn(q, Latent(rows), varlen=lengths)
        return bool((out.double() - exact).abs().max() <= 2 * 2**-8 * exact.abs().max())

    return call


@lru_cache
def own(chip: str, used: bool) -> Own:
    return Own(chip, "mla_decode", call_of(used), 1)


def implied(mutant: Mutant) -> bool:
    """True if what it lacks is known not to matter: of two fences after the initialisation of barriers,
    either; a fence of products that follows another one with no use of the registers between; and a warp
    that gathers where its lanes have not parted."""
    return mutant.instruction.opcode.startswith(("fence.mbarrier_init", "wgmma.fence", "bar.warp"))


CHIPS = pytest.mark.parametrize("chip", ["sm_90a", "sm_100a"])


@pytest.mark.slow
@CHIPS
def test_some(chip: str) -> None:
    one = own(chip, random.random() < 0.5)
    tried = random.sample([m for m in one.that_matter() if not implied(m) and not waits(m)], 4)
    left = [mutant for mutant in tried if not one.noticed(mutant)]
    # No timing shows the want of one in forty: stores, fences and groups of steps that may come last.
    assert len(left) <= 1, left


@pytest.mark.exhaustive
@CHIPS
@pytest.mark.parametrize("used", [False, True], ids=["dense", "used"])
def test_all(used: bool, chip: str) -> None:
    """Every mutant that can matter is noticed, but for those that are implied, and few waits."""
    one = own(chip, used)
    tried = one.that_matter()
    left = [mutant for mutant in tried if not implied(mutant) and not one.noticed(mutant)]
    print(len(left), "of", len(tried), *left, sep="\n")
    assert len(tried) >= 40 and all(map(waits, left))
