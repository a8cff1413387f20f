"""Boxes of whole rows of keys and values on the simulated Hopper GPU: pages of any layout are read in place
by the same kernels, whether heads start at multiples of 64 elements or of 8, and results are right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from unittest.mock import patch

import pytest
import torch
from paged_pools import Drawn, Size, drawn, guarded
from test_forward_paged import CAUSAL, check, chunks
from torch import Tensor

import fa4flex

Layout = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@pytest.fixture(autouse=True, params=["sm_90a"])
def chip(request: pytest.FixtureRequest) -> str:
    return request.param


def heads_before_slots(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    by_head = (guarded(x.transpose(1, 2).contiguous()).transpose(1, 2) for x in (k, v))
    return tuple(by_head)  # type: ignore[return-value]


def one_tensor(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values side by side in each slot, as wide as the wider ones."""
    width = max(k.shape[-1], v.shape[-1])
    both = torch.full((*k.shape[:1], 2, *k.shape[1:3], width), torch.nan, dtype=k.dtype)
    both[:, 0, ..., : k.shape[-1]], both[:, 1, ..., : v.shape[-1]] = k, v
    both = guarded(both)
    return both[:, 0, ..., : k.shape[-1]], both[:, 1, ..., : v.shape[-1]]


def heads_apart(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Eight elements of nobody before each head, so that heads start between units of 64 elements."""
    between = torch.full((*k.shape[:3], 8), torch.nan, dtype=k.dtype)
    return tuple(guarded(torch.cat((between, x), -1))[..., 8:] for x in (k, v))  # type: ignore[return-value]


LAYOUTS: dict[str, Layout] = {
    "slots before heads": lambda k, v: (k, v),
    "heads before slots": heads_before_slots,
    "one tensor": one_tensor,
    "heads apart": heads_apart,
}

USUAL = [
    ("slots before heads", 24, (128, 128), True),
    ("heads before slots", 16, (128, 128), False),
    ("one tensor", 64, (192, 128), True),
    ("heads apart", 8, (128, 128), True),
    ("heads apart", 128, (256, 256), False),
]

ALL = product(LAYOUTS, (8, 16, 24, 64, 128), ((128, 128), (192, 128), (256, 256)), (False, True))
CASES = [pytest.param(*case, marks=() if case in USUAL else pytest.mark.exhaustive) for case in ALL]


def given_in(layout: str, size: Size, packed: bool) -> Drawn:
    plain = drawn(size)
    k, v = LAYOUTS[layout](plain.k, plain.v)
    given = replace(plain, k=k, v=v)
    return chunks(given, (131, 1)) if packed else given


@pytest.mark.slow
@pytest.mark.parametrize("layout, page_size, widths, packed", CASES)
def test_layout(layout: str, page_size: int, widths: tuple[int, int], packed: bool) -> None:
    d, dv = widths
    size = Size(heads=3, kv_heads=3, q_len=70, lengths=(200, 33), d=d, dv=dv, page_size=page_size)
    check(CAUSAL, given_in(layout, size, packed))


@pytest.mark.slow
@pytest.mark.parametrize("widths, packed", [((128, 96), True), ((64, 128), False)])
def test_keys_or_values_in_blocks(widths: tuple[int, int], packed: bool) -> None:
    """Only the others have whole rows."""
    d, dv = widths
    size = Size(heads=2, kv_heads=2, q_len=70, lengths=(150, 33), d=d, dv=dv)
    check(CAUSAL, given_in("heads apart", size, packed))


@pytest.mark.slow
def test_heads_of_any_stride_are_the_same_launch() -> None:
    """One launch serves heads that start at multiples of 64 elements, and others."""
    size = Size(heads=2, kv_heads=2, q_len=70, lengths=(150, 33), d=128, dv=128)
    check(CAUSAL, given_in("slots before heads", size, True))
    with patch.object(fa4flex.runtime.cuda.in_place, "make_ready", side_effect=AssertionError("made anew")):
        check(CAUSAL, given_in("heads apart", size, True))
        check(CAUSAL, given_in("heads before slots", size, True))
