"""One synchronisation less is noticed in the Hopper kernel for wide heads, right as it stands."""

from __future__ import annotations

import random
from functools import lru_cache
from unittest.mock import patch

import pytest
from cases import Size
from mutants import Mutant
from own_forward import Own, captured_forward

from fa4flex.kernels.plan import splitting


@lru_cache
def forward(masked: bool, few: bool) -> Own:
    """One block has all keys of a tile, whose rings go round, and without `few` several tiles of rows."""
    queries, keys = (40, 200) if few else (150, 230)
    with patch.object(splitting, "_splits", lambda *given: (1, 1)):
        return captured_forward("sm_90a", Size(batch=1, heads=1, q_len=queries, kv_len=keys, dim=264), masked)


def implied(mutant: Mutant) -> bool:
    """True if what it lacks is known not to matter: of two fences after the initialisation of barriers,
    either; a fence of products that follows another one with no use of the registers between; and a warp
    that gathers where its lanes have not parted."""
    return mutant.instruction.opcode.startswith(("fence.mbarrier_init", "wgmma.fence", "bar.warp"))


@pytest.mark.slow
def test_some() -> None:
    own = forward(random.random() < 0.5, random.random() < 0.5)
    assert "fwd_wide" in own.launch.kernel
    for mutant in random.sample([m for m in own.that_matter() if not implied(m)], 3):
        assert own.noticed(mutant), mutant


@pytest.mark.exhaustive
@pytest.mark.parametrize("masked", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("few", [False, True], ids=["many", "few"])
def test_all(few: bool, masked: bool) -> None:
    """Every mutant that can matter is noticed, but for those that are implied."""
    own = forward(masked, few)
    tried = own.that_matter()
    left = [mutant for mutant in tried if not own.noticed(mutant)]
    print(len(left), "of", len(tried), *left, sep="\n")
    assert len(tried) >= 12 and all(map(implied, left))
