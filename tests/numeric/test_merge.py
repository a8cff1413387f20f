"""Attention over parts of the keys, merged, is attention over all of them, with all gradients."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import fa4flex
from fa4flex.errors import InputError


def past(b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
    """The first rows of later heads see no key of some parts, and one row none at all."""
    return (kv_idx + 3 * h < q_idx) & (q_idx > 0)


CUTS = (0, 5, 6, 17, 24)


def parts_of(q: Tensor, k: Tensor, v: Tensor, layout: Any) -> tuple[list[Tensor], list[Tensor]]:
    axis, found = 1 if layout == "bshd" else 2, []
    for first, last in pairwise(CUTS):

        def shifted(b, h, q_idx, kv_idx, first=first):  # type: ignore[no-untyped-def]
            return past(b, h, q_idx, kv_idx + first)

        attn = fa4flex.compile(mask=shifted, layout=layout)
        found.append(attn(q, *(x.narrow(axis, first, last - first) for x in (k, v)), return_lse=True))
    outs, lses = zip(*found)
    return list(outs), list(lses)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_parts_are_the_whole(layout: Any, seed: int) -> None:
    torch.manual_seed(seed)
    lengths = 16, CUTS[-1], CUTS[-1]
    shapes = [(2, 3, n, 8) if layout == "bhsd" else (2, n, 3, 8) for n in lengths]
    qkv = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    whole = fa4flex.compile(mask=past, layout=layout)(*qkv, return_lse=True)
    outs, lses = parts_of(*qkv, layout)
    for merged in (
        fa4flex.merge(outs, lses, layout),
        fa4flex.merge(torch.stack(outs), torch.stack(lses), layout),
    ):
        for mine, exact in zip(merged, whole):
            torch.testing.assert_close(mine, exact, atol=1e-12, rtol=0)
    assert (whole[1] == -torch.inf).any(), "some row has no key"
    weight, finite = torch.randn_like(whole[0]), whole[1] > -torch.inf

    def loss(out: Tensor, lse: Tensor) -> Tensor:
        return (out * weight).sum() + lse[finite].square().sum()

    found, exact = (torch.autograd.grad(loss(*x), qkv) for x in (fa4flex.merge(outs, lses, layout), whole))
    for mine, other in zip(found, exact):
        torch.testing.assert_close(mine, other, atol=1e-11, rtol=0)


def test_packed(seed: int) -> None:
    torch.manual_seed(seed)
    outs, lses = torch.randn(2, 7, 3, 4), torch.randn(2, 3, 7)
    out, lse = fa4flex.merge(outs, lses)
    shares = lses.softmax(0).transpose(1, 2).unsqueeze(-1)
    torch.testing.assert_close(out, (shares * outs).sum(0))
    torch.testing.assert_close(lse, lses.logsumexp(0))


def test_parts_without_keys_may_hold_anything() -> None:
    outs = torch.tensor([[[[1.0, 2.0]]], [[[torch.nan, torch.inf]]]]).unsqueeze(1).requires_grad_()
    lses = torch.tensor([0.5, -torch.inf]).view(2, 1, 1, 1).requires_grad_()
    out, lse = fa4flex.merge(outs, lses)
    assert out.flatten().tolist() == [1.0, 2.0] and lse.item() == 0.5
    grads = torch.autograd.grad(out.sum() + lse.sum(), (outs, lses))
    assert all(x.isfinite().all() for x in grads)


def test_half_precision_is_summed_in_float32(seed: int) -> None:
    torch.manual_seed(seed)
    outs, lses = torch.randn(64, 1, 2, 5, 8).bfloat16(), torch.randn(64, 1, 2, 5)
    out, _ = fa4flex.merge(outs, lses)
    exact, _ = fa4flex.merge(outs.double(), lses.double())
    assert out.dtype == torch.bfloat16
    assert (out.double() - exact).abs().max() <= 2**-8 * exact.abs().max()


WRONG: dict[str, Callable[[], Any]] = {
    "no parts": lambda: fa4flex.merge([], []),
    "shapes of parts": lambda: fa4flex.merge(
        [torch.zeros(1, 1, 2, 3), torch.zeros(1, 1, 3, 3)], torch.zeros(2, 1, 1, 2)
    ),
    "another layout": lambda: fa4flex.merge(torch.zeros(2, 1, 4, 3, 8), torch.zeros(2, 1, 3, 4)),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_agree(name: str) -> None:
    with pytest.raises(InputError):
        WRONG[name]()
