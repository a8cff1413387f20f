"""Each bar.warp.sync of this library's kernels, left out: reported, unless another instruction implies it.

Most stand before an elect.sync, for which all lanes have to come as well: the election of the lane that
arrives, starts a copy or issues products. In the kernel of lengths, match.any.sync comes between two turns of
the loop over tiles. What is left are stores of which a lane that is not elected tells, reads by a bulk store
that one lane has waited for, and counts that lanes read before one of them changes them.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import paged_pools
import pytest
import torch
from helpers import cumulative
from mutants import Mutant, implied, lacking
from own_calls import Own
from test_forward_paged import chunks
from test_sequences import call_of, kernel_of

import fa4flex
import ptxsim
from fa4flex.kernels.plan import splitting
from fa4flex.variants import causal

MASKED = fa4flex.compile(mask=causal)


def decode() -> Own:
    """Blackwell's kernel for few rows, over pages, with a sequence whose last tile is not full."""
    given = paged_pools.drawn(paged_pools.Size(lengths=(470, 0, 33), d=128, dv=128))

    def call() -> bool:
        with patch.object(splitting, "_splits", lambda pairs, tiles, *more: (min(2, tiles),) * 2):
            given(MASKED)
        return True

    return Own("sm_100a", "decode", call)


def paged() -> Own:
    pool = paged_pools.drawn(paged_pools.Size(heads=1, lengths=(300, 33), d=128, dv=128))
    given = chunks(pool, (150, 33))
    return Own("sm_100a", "fwd_sm100", lambda: given(MASKED) is not None)


def backward() -> Own:
    """Sums of dQ go out in any order: where they go out in turns, a turn ends in a wait for all of them, and
    the first syncs of the next one have nothing to order."""
    inputs = [torch.randn(1, 2, 301, 128).bfloat16().requires_grad_() for _ in "qkv"]

    def call() -> bool:
        torch.use_deterministic_algorithms(False)
        with torch.enable_grad():
            MASKED(*inputs).sum().backward()
        return True

    return Own("sm_100a", "bwd_sm100", call)


def sequences() -> Own:
    """Lengths and order of tiles of more sequences than threads."""
    lengths = [[random.choice(of) for _ in range(600)] for of in ((100, 257, 900), (0, 1, 64, 257))]
    given = call_of((*map(cumulative, lengths), None, None), *map(sum, lengths))
    with ptxsim.device("sm_90a"):
        kernel: Any = kernel_of(causal, given, (128, 128))
    return Own("sm_90a", "sequences", lambda: kernel.compute(given) is not None)


def lanes_reported(own: Own, mutant: Mutant) -> bool:
    results, _ = own.run("eager", 0, mutant)
    return any(finding.kind == "lanes" for result in results for finding in result.findings)


SPEAKS = {"decode": 0, "paged": 2, "backward": 4, "sequences": 2}
"""Number of those that nothing implies, by kernel."""
MADE: dict[str, Callable[[], Own]] = {
    "decode": decode,
    "paged": paged,
    "backward": backward,
    "sequences": sequences,
}


LONG = ("paged", "backward")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in LONG else name for name in MADE]
)
def test_left_out(name: str) -> None:
    """All that nothing implies, and some of the others."""
    own = MADE[name]()
    results, _ = own.run("eager", 0)
    assert not any(result.findings for result in results)
    tried = [mutant for result in results for mutant in lacking(result, "bar.warp.sync")]
    matter = [mutant for mutant in tried if not implied(mutant)]
    assert len(matter) == SPEAKS[name]
    for mutant in matter:
        assert lanes_reported(own, mutant), mutant
    others = [mutant for mutant in tried if implied(mutant)]
    for mutant in random.sample(others, min(len(others), 2)):
        assert not lanes_reported(own, mutant), mutant
