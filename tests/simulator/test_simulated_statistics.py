"""Statistics that kernels return beside the output, on simulated GPUs: right against the definition in
float64, in memory that is poisoned before; and computed blockwise where no kernel has them."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import fa4flex
import ptxsim
from fa4flex import reference
from fa4flex.variants import causal

EVERY = ("lse", "max_logit", "entropy")
BOTH = pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
POISON = 1e30
"""What memory holds that results are written to."""


def halved(score, b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
    """Scores below 0 in some heads, and far from their products."""
    return score * 0.5 - 3 * h


def banded(b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
    """Some rows see no key."""
    return (q_idx >= kv_idx - 5) & (q_idx % 7 != 3)


@contextlib.contextmanager
def simulated(arch: str, *names: str) -> Iterator[None]:
    """Within, calls run on a simulated GPU under a random timing, by kernels with these names alone."""
    timing, seed = random.choice([("eager", 0), ("late", 1), ("random", random.randrange(99))])
    empty = torch.Tensor.new_empty

    def poisoned(x: Tensor, *size: Any, **options: Any) -> Tensor:
        made = empty(x, *size, **options)
        return made.fill_(POISON) if made.is_floating_point() and not made.is_meta else made

    with (
        patch.object(torch.Tensor, "new_empty", poisoned),
        ptxsim.device(arch, seed, timing, sms=2) as gpu,
    ):
        yield
    kernels = [result.kernel for result in gpu.results]
    assert not any(result.findings or result.remarks for result in gpu.results)
    for name in names:
        assert any(name in kernel for kernel in kernels), kernels


def compare(aux: fa4flex.Aux, exact: dict[str, Tensor], lse: Tensor, names: tuple[str, ...] = EVERY) -> None:
    """Scores are float32 products of 16-bit numbers: errors are those of their sums and of exponentials."""
    for name in names:
        mine, truth = getattr(aux, name), lse if name == "lse" else exact[name]
        torch.testing.assert_close(mine.double(), truth, atol=2e-4, rtol=1e-4, msg=name)


def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape).mul_(1.5).to(dtype)


# --- many queries -------------------------------------------------------------------------------------------

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"mask": causal},
    "score": {"score_mod": halved, "mask": banded},
    "threshold 0": {"score_mod": halved},
}


@BOTH
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("heads", [(4, 4), (4, 1), (7, 1)], ids=str)
def test_dense(arch: str, case: str, heads: tuple[int, int], seed: int) -> None:
    torch.manual_seed(seed)
    q, (k, v) = drawn(1, heads[0], 200, 64), (drawn(1, heads[1], 300, 64) for _ in range(2))
    sinks = torch.randn(heads[0]) if case == "causal" else None
    names = ("lse", "max_scores", *EVERY[1:]) if case == "threshold 0" else EVERY
    attn = fa4flex.compile(**CASES[case], sinks=sinks)
    with torch.no_grad(), simulated(arch):
        _, aux = attn(q, k, v, return_aux=names)
    exact: dict[str, Tensor] = {}
    mods = CASES[case].get("score_mod"), CASES[case].get("mask")
    _, lse = reference.attention(q, k, v, *mods, sinks=sinks, statistics=exact)
    compare(aux, exact, lse, names)
