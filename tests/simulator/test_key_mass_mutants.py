"""One synchronisation less, a write less or a lane less is noticed in the kernel for sums per key, which is
right as it stands."""

from __future__ import annotations

import random
from functools import lru_cache

import pytest
import torch
from own_calls import Own

import fa4flex

IMPLIED = ("fence.mbarrier_init", "wgmma.")
"""Instructions that some of the mutants that are not noticed lack."""
KERNELS = pytest.mark.parametrize("masked", [False, True], ids=["dense", "causal"])


@lru_cache
def own(masked: bool) -> Own:
    """Two heads of 130 keys, the last of which are in a tile of their own; rings of queries go round."""
    torch.manual_seed(0)
    q, k, lse = (
        torch.randn(1, 2, 600, 64).bfloat16(),
        torch.randn(1, 1, 130, 64).bfloat16(),
        torch.ones(1, 2, 600),
    )
    attn = fa4flex.compile(mask=(lambda b, h, q, k: q >= k) if masked else None)
    expected: list[torch.Tensor] = []

    def call() -> bool:
        found = attn.key_mass(q, k, lse)
        expected.append(found.clone())
        exact = fa4flex.reference.probabilities(q, k, lse, mask=attn.variant.mask).sum(2)
        right = torch.allclose(found.double(), exact, rtol=4e-5, atol=4e-6)
        return right and torch.equal(found, expected[0])

    return Own("sm_90a", "mass_sm90", call)


@pytest.mark.slow
def test_some() -> None:
    one = own(random.random() < 0.5)
    tried = [m for m in one.that_matter() if not m.instruction.opcode.startswith(IMPLIED)]
    for mutant in random.sample(tried, 3):
        assert one.noticed(mutant), mutant


@pytest.mark.exhaustive
@KERNELS
def test_all(masked: bool) -> None:
    one = own(masked)
    missed = [str(m) for m in one.that_matter() if not one.noticed(m)]
    assert all(m.split(maxsplit=1)[1].startswith(IMPLIED) for m in missed), missed
