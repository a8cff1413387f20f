"""Integers of captured tensors that grow after kernels were compiled for smaller ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import fa4flex
import ptxsim
from fa4flex import later
from fa4flex.errors import EarlierError

LARGE = 2**31 - 100
"""Differences of two of these, of which one is negative, need more than 32 bits."""


@pytest.fixture(autouse=True)
def nothing_awaited(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(later, "awaited", type(later.awaited)())
    yield


def positions(far: int) -> torch.Tensor:
    return torch.cat([torch.arange(32), torch.arange(32) + far]).to(torch.int32)


def told_once(attn: Any, change: Callable[[], None]) -> None:
    """A call after the one that was given large integers raises, and those that follow are right."""
    qkv = [torch.randn(1, 1, 64, 64, dtype=torch.bfloat16) for _ in range(3)]
    with ptxsim.device("sm_90a"), torch.no_grad():
        attn(*qkv)
        attn(*qkv)
        change()
        attn(*qkv)
        with pytest.raises(EarlierError, match=r"2\^30 or more"):
            attn(*qkv)
        found = attn(*qkv).float()
        attn(*qkv)
    exact = attn(*(x.double() for x in qkv))
    assert (found - exact).abs().max() < 0.02


def test_a_new_tensor_of_larger_integers_is_told() -> None:
    where = positions(50)

    def distance(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return score - 1e-9 * (where[q] - where[kv]).abs()

    def change() -> None:
        nonlocal where
        where = positions(-LARGE)
        where[0] = LARGE

    told_once(fa4flex.compile(score_mod=distance), change)


def test_larger_integers_in_the_same_tensor_are_told() -> None:
    where = positions(50)

    def difference(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return score - 1e-9 * (where[q] - where[kv])

    def change() -> None:
        where.copy_(positions(-LARGE))
        where[0] = LARGE

    told_once(fa4flex.compile(score_mod=difference), change)
