"""One synchronisation less is noticed in the Hopper backward kernel for listed keys, right as it stands."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import lru_cache
from unittest.mock import patch

import pytest
import torch
from mutants import Mutant
from own_calls import Own, is_first, nearly_all_are_noticed, some_are_noticed

import fa4flex
from fa4flex import Lists, listed_calls
from fa4flex.runtime.cuda import listed_backward
from fa4flex.variants import causal

KINDS = "ascending", "in no order", "united"
"""Lists of a call; the last ones are of three tokens."""


def call_of(kind: str) -> Callable[[], bool]:
    """Some tiles of keys of one block; or lists in no order, of which many ids repeat."""
    made = torch.Generator().manual_seed(0)
    heads, tokens = (16, 3) if kind == "united" else (40, 1)
    q, dout = (torch.randn(1, heads, tokens, 64, generator=made).bfloat16() for _ in range(2))
    k, v = (torch.randn(1, 1, 600, 64, generator=made).bfloat16() for _ in range(2))
    shape, most = ((1, 1, 3, 40), 150) if kind == "united" else ((1, 1, 1, 200), 150)
    ids = torch.randint(-1, most, shape, generator=made, dtype=torch.int32)
    if kind == "ascending":
        ids = torch.arange(1, 81, dtype=torch.int32).view(1, 1, 1, -1)
    attn, lists = fa4flex.compile(mask=causal), Lists(ids, kv_len=600, unit=4, window=70)

    def gradients(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        inputs = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        with torch.enable_grad():
            return torch.autograd.grad(attn(*inputs, blocks=lists), inputs, dout.to(dtype))

    exact = gradients(torch.float64)

    def call() -> bool:
        # Memory is poisoned by a mode of torch in which sums are to be ordered.
        with (
            patch.object(listed_calls, "deterministic", lambda engine: False),
            patch.object(listed_backward, "deterministic", lambda engine: False),
        ):
            got = gradients(torch.bfloat16)
        return all(
            bool((x.double() - y).abs().max() <= 3 * 2**-8 * y.abs().max())
            for x, y in zip(got, exact, strict=True)
        )

    return call


@lru_cache
def own(kind: str) -> Own:
    return Own("sm_90a", "bwd_lists_sm90", call_of(kind), 1)


def implied(mutant: Mutant) -> bool:
    """True if what it lacks is known not to matter: see test_lists_mutants.py; Q and dO are copied with a
    fence each; and that the product for S is a group of its own, as it is waited for together with that for
    dP."""
    opcode, before = mutant.instruction.opcode, mutant.program.kernel.body[: mutant.index]
    if opcode.startswith("fence.proxy"):
        return sum(other.opcode.startswith("fence.proxy") for other in before) < 2
    fences = "fence.mbarrier_init", "wgmma.fence", "bar.warp"
    return opcode.startswith(fences) or is_first(mutant, "bar.sync", "wgmma.commit_group")


@pytest.mark.slow
def test_some() -> None:
    some_are_noticed(own(random.choice(KINDS)), implied)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", KINDS)
def test_all(kind: str) -> None:
    """Nearly every mutant that can matter is noticed, but for those that are implied."""
    # Left is the meeting before P and dS are written anew: on the simulated GPU, warps come together to each
    # product, so that none is a tile ahead; on a chip, nothing says so.
    nearly_all_are_noticed(own(kind), implied, 60)
