"""One synchronisation less is noticed in the Blackwell kernel of codes, which is right as it stands."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import lru_cache

import pytest
import torch
from blackwell import planned
from code_calls import BLACKWELL, Exact
from own_calls import Own
from own_calls import wait_left_out as waits

import fa4flex
from fa4flex import quantize
from fa4flex.variants import causal


def call_of(masked: bool) -> Callable[[], bool]:
    """Two tiles of queries of two heads by one block, whose maxima rise; or, without a mask, by one pair."""
    made = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, h, n, 128, generator=made) for h, n in ((2, 260), (1, 400), (1, 400)))
    grown = torch.linspace(0.5, 3.0, 400).view(1, 1, -1, 1)
    form = "int8" if masked else "float8_e4m3"
    codes = quantize(*(x.bfloat16() for x in (q, k * grown, v + 1)), qk=form)
    mask = causal if masked else None
    attn, exact = fa4flex.compile(mask=mask), Exact.of(codes, None, mask, chip=BLACKWELL)

    def call() -> bool:
        with planned(2 if not masked else 1):
            out = attn(codes)
        return bool(((out.double() - exact.out).abs() <= exact.most).all())

    return call


@lru_cache
def own(masked: bool) -> Own:
    return Own("sm_100a", "fwd_8bit", call_of(masked), 1 if masked else 2)


IMPLIED = ("fence.mbarrier_init", "cp.async.bulk", "bar.warp")
"""Opcodes of instructions whose removal may go unnoticed: others imply them, and lanes have not parted."""


@pytest.mark.slow
@pytest.mark.parametrize("masked", [False, True], ids=["pair", "alone"])
def test_some(masked: bool) -> None:
    one = own(masked)
    matter = [m for m in one.that_matter() if not m.instruction.opcode.startswith(IMPLIED) and not waits(m)]
    assert len(matter) >= 30
    tried = random.sample(matter, 4)
    left = [mutant for mutant in tried if not one.noticed(mutant)]
    assert len(left) <= 1, left


@pytest.mark.exhaustive
@pytest.mark.parametrize("masked", [False, True], ids=["pair", "alone"])
def test_all(masked: bool) -> None:
    """Every mutant that can matter is noticed, but for those that are implied, and few waits."""
    one = own(masked)
    tried = one.that_matter()
    left = [m for m in tried if not one.noticed(m) and not m.instruction.opcode.startswith(IMPLIED)]
    print(len(left), "of", len(tried), *left, sep="\n")
    assert len(tried) >= 60 and len(left) <= 0.05 * len(tried)
