"""One synchronisation less is noticed in the kernels for few query rows, right as they stand."""

from __future__ import annotations

import random
from functools import lru_cache
from unittest.mock import patch

import pytest
from cases import Size
from mutants import Mutant
from own_forward import Own, captured_forward

from fa4flex.kernels.plan import splitting

WIDTHS = (64, 128, 256)
CHIPS = pytest.mark.parametrize("chip", ["sm_90a", "sm_100a"])


@lru_cache
def forward(chip: str, masked: bool, dim: int) -> Own:
    """One block has all keys of a head, and its rings go round."""
    keys = 900 if dim == 64 else 470
    with patch.object(splitting, "_splits", lambda *given: (1, 1)):
        return captured_forward(chip, Size(batch=1, heads=1, q_len=40, kv_len=keys, dim=dim), masked)


def implied(mutant: Mutant) -> bool:
    """True if what it lacks is known not to matter: of two fences after the initialisation of barriers,
    either; and a fence of products that follows another one with no use of the registers between."""
    return mutant.instruction.opcode.startswith(("fence.mbarrier_init", "wgmma.fence"))


@pytest.mark.slow
@CHIPS
def test_some(chip: str) -> None:
    own = forward(chip, random.random() < 0.5, random.choice(WIDTHS))
    assert "decode" in own.launch.kernel
    for mutant in random.sample([m for m in own.that_matter() if not implied(m)], 4):
        assert own.noticed(mutant), mutant


@pytest.mark.exhaustive
@CHIPS
@pytest.mark.parametrize("masked", [False, True], ids=["dense", "causal"])
@pytest.mark.parametrize("dim", WIDTHS)
def test_all(masked: bool, dim: int, chip: str) -> None:
    """Every mutant that can matter is noticed, but for those that are implied."""
    own = forward(chip, masked, dim)
    tried = own.that_matter()
    left = [mutant for mutant in tried if not own.noticed(mutant)]
    print(len(left), "of", len(tried), *left, sep="\n")
    assert len(tried) >= 12 and all(map(implied, left))
