"""One synchronisation less is noticed in the Hopper kernel for an e4m3 cache, right as it stands."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import lru_cache
from unittest.mock import patch

import pytest
import torch
from mutants import Mutant
from own_forward import Noticing
from torch import Tensor

import fa4flex
from fa4flex.kernels.plan import splitting
from fa4flex.primitives.kv_scales import E4M3
from fa4flex.variants import causal
from ptxsim.active import simulated
from ptxsim.doors.capture import capturing
from ptxsim.doors.launch import Launch


@dataclass(frozen=True, eq=False)
class Own(Noticing):
    """A launch over a cache without scales, whose dequantised keys and values are k and v."""

    cache: tuple[Tensor, Tensor]


@lru_cache
def forward(q_len: int) -> Own:
    """One block has all keys of a head, and its rings go round."""
    torch.manual_seed(0)
    dim, tile = (128, 128) if q_len <= 16 else (64, 256)
    q = torch.randn(1, q_len, 1, dim).bfloat16()
    k, v = (torch.randn(1, tile * 4 + 30, 1, dim).to(E4M3) for _ in range(2))
    attn = fa4flex.compile(mask=causal, layout="bshd")
    seen: list[Launch] = []
    with (
        torch.no_grad(),
        patch.object(splitting, "_splits", lambda *given: (1, 1)),
        capturing("sm_90a", seen.append, 1),
        simulated("sm_90a"),
    ):
        out = attn(q, k, v)
    (launch,) = seen
    assert "fp8" in launch.kernel
    return Own(launch, q, k.bfloat16(), v.bfloat16(), out, True, (k, v))


def implied(mutant: Mutant) -> bool:
    """True if what it lacks is known not to matter: of two fences after the initialisation of barriers,
    either; and a warp that gathers where its lanes have not parted."""
    return mutant.instruction.opcode.startswith(("fence.mbarrier_init", "bar.warp"))


@pytest.mark.slow
def test_some() -> None:
    own = forward(4)
    for mutant in random.sample([m for m in own.that_matter() if not implied(m)], 4):
        assert own.noticed(mutant), mutant


@pytest.mark.exhaustive
@pytest.mark.parametrize("q_len", [4, 40])
def test_all(q_len: int) -> None:
    """Every mutant that can matter is noticed, but for those that are implied: where a warp takes several
    steps, it has read a tile's values before it lets its keys go, and the producer waits for these first."""
    own = forward(q_len)
    tried = own.that_matter()
    left = [mutant for mutant in tried if not own.noticed(mutant)]
    print(len(left), "of", len(tried), *left, sep="\n")
    waits = [mutant for mutant in left if "try_wait" in mutant.instruction.opcode]
    assert len(waits) <= (q_len > 16)
    assert len(tried) >= 8 and all(implied(mutant) for mutant in left if mutant not in waits)
