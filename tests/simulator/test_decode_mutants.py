"""One synchronisation less is noticed in the Hopper kernel for few query rows, right as it stands."""

from __future__ import annotations

import random
from functools import lru_cache
from unittest.mock import patch

import pytest
from cases import Size
from mutants import Mutant
from own_forward import Own, captured_forward

from fa4flex.codegen.plan import splitting


@lru_cache
def forward(masked: bool, dim: int) -> Own:
    """One block has all keys of a head, and its rings go round."""
    keys = 900 if dim == 64 else 470
    with patch.object(splitting, "_splits", lambda *given: 1):
        return captured_forward("sm_90a", Size(batch=1, heads=1, q_len=40, kv_len=keys, dim=dim), masked)


def implied(mutant: Mutant) -> bool:
    """True if what it lacks is known not to matter: of two fences after the initialisation of barriers,
    either; and a fence of products that follows another one with no use of the registers between."""
    return mutant.instruction.opcode.startswith(("fence.mbarrier_init", "wgmma.fence"))


@pytest.mark.slow
def test_some() -> None:
    own = forward(random.random() < 0.5, random.choice((64, 128)))
    assert "decode" in own.launch.kernel
    for mutant in random.sample([m for m in own.that_matter() if not implied(m)], 4):
        assert own.noticed(mutant), mutant


@pytest.mark.exhaustive
@pytest.mark.parametrize("masked", [False, True], ids=["dense", "causal"])
@pytest.mark.parametrize("dim", [64, 128])
def test_all(masked: bool, dim: int) -> None:
    """Every mutant that can matter is noticed, but for those that are implied."""
    own = forward(masked, dim)
    tried = own.that_matter()
    left = [mutant for mutant in tried if not own.noticed(mutant)]
    print(len(left), "of", len(tried), *left, sep="\n")
    assert len(tried) >= 12 and all(map(implied, left))
