"""Variants composed of lists: each call reads what the lists hold then, by every door."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from helpers import close
from torch import Tensor

import fa4flex
from fa4flex import Lists, Varlen
from fa4flex.variants import causal

Q_LEN, KEYS, UNIT = 6, 24, 4


def drawn() -> Tensor:
    """One of many sets of ids: [1, 1, 6, 2]."""
    return torch.rand(1, 1, Q_LEN, KEYS // UNIT).argsort(-1)[..., :2].int()


def lists_of(ids: Tensor) -> Lists:
    return Lists(ids, kv_len=KEYS, unit=UNIT, sinks=1)


def tensors(kv_heads: int = 1) -> list[Tensor]:
    shapes = (1, 2, Q_LEN, 32), (1, kv_heads, KEYS, 32), (1, kv_heads, KEYS, 32)
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


def trained(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A call's gradient of q."""

    def gradient(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        leaf = q.clone().requires_grad_()
        return torch.autograd.grad(attend(leaf, k, v).sin().sum(), leaf)[0]

    return gradient


def packed(attn: Any) -> Callable[..., Tensor]:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ends = (torch.tensor([0, n], dtype=torch.int32) for n in (Q_LEN, KEYS))
        flat = (x[0].transpose(0, 1).contiguous() for x in (q, k, v))
        out: Tensor = attn(*flat, varlen=Varlen(*ends))
        return out

    return call


def weighed(attn: Any, name: str) -> Callable[..., Tensor]:
    """A second pass, whose lse is that of fresh lists."""

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        lse = attn(q, k, v, return_lse=True)[1]
        made: Tensor = getattr(attn, name)(q, k, lse)
        return made

    return call


def narrow(attn: Any) -> Callable[..., Tensor]:
    return lambda *qkv: attn(*(x.float() for x in qkv))


def stored(attn: Any) -> Any:
    """The attention from a file, and its lists, which are another object then."""
    file = io.BytesIO()
    torch.save(attn, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


DOORS: dict[str, Callable[[Lists], Callable[..., Tensor]]] = {
    "call": lambda lists: fa4flex.compile(mask=causal, blocks=lists),
    "as a mask": lambda lists: fa4flex.compile(mask=lists),
    "gradients": lambda lists: trained(fa4flex.compile(blocks=lists)),
    "flex": lambda lists: fa4flex.compile(blocks=lists, backend="flex"),
    "another scale": lambda lists: partial(fa4flex.compile(blocks=lists), scale=0.2),
    "module": lambda lists: fa4flex.nn.Attention(blocks=lists),
    "module as a mask": lambda lists: fa4flex.nn.Attention(mask=lists),
    "packed": lambda lists: packed(fa4flex.compile(blocks=lists)),
    "sums of weights": lambda lists: weighed(fa4flex.compile(blocks=lists), "key_mass"),
    "weights": lambda lists: weighed(fa4flex.compile(blocks=lists), "probabilities"),
    "function of an output": lambda lists: fa4flex.compile(
        blocks=lists, output_mod=lambda out, b, h, q_idx, d_idx: out * 2
    ),
    "normaliser": lambda lists: fa4flex.compile(blocks=lists, normalizer=fa4flex.Normalizer.softmax(plus=1)),
    "compiled": lambda lists: torch.compile(fa4flex.compile(blocks=lists), backend="eager", fullgraph=True),
    "composed in a graph": lambda lists: torch.compile(
        lambda *qkv: fa4flex.compile(mask=causal, blocks=lists)(*qkv), backend="eager", fullgraph=True
    ),
    "codes": lambda lists: narrow(fa4flex.compile(blocks=lists, precision=fa4flex.Precision(qk="int8"))),
}


@pytest.mark.parametrize("door", DOORS)
def test_ids_that_change_in_place_are_read(door: str) -> None:
    ids, qkv = drawn(), tensors()
    torch.compiler.reset()
    attend = DOORS[door](lists_of(ids))
    attend(*qkv)
    for _ in range(3):
        ids.copy_(drawn())
        assert close(attend(*qkv), DOORS[door](lists_of(ids.clone()))(*qkv))


def test_counts_that_change_in_place_are_read() -> None:
    ids, qkv, counts = drawn(), tensors(), torch.ones(1, 1, Q_LEN, dtype=torch.int32)
    attn = fa4flex.compile(blocks=Lists(ids, counts, kv_len=KEYS, unit=UNIT))
    first = attn(*qkv)
    counts.fill_(2)
    assert not close(attn(*qkv), first)
    assert close(attn(*qkv), fa4flex.attention(*qkv, blocks=Lists(ids, kv_len=KEYS, unit=UNIT)))


@pytest.mark.parametrize("copied", [copy.deepcopy, stored])
def test_copies_have_lists_of_their_own(copied: Callable[[Any], Any]) -> None:
    ids, qkv = drawn(), tensors()
    attn = fa4flex.compile(blocks=lists_of(ids))
    first, other = attn(*qkv), copied(attn)
    ids.copy_((ids + 1) % (KEYS // UNIT))
    assert close(other(*qkv), first) and not close(attn(*qkv), first)
    kept = other.variant.blocks.lists
    kept.ids.copy_(ids)
    assert close(other(*qkv), attn(*qkv))


def test_a_map_of_lists_stays_as_it_was() -> None:
    ids, qkv = drawn(), tensors()
    attn = fa4flex.compile(blocks=lists_of(ids).map())
    first = attn(*qkv)
    ids.copy_((ids + 1) % (KEYS // UNIT))
    assert torch.equal(attn(*qkv), first)


def test_a_map_of_a_call_stands_in_place_of_kept_lists() -> None:
    ids, qkv = drawn(), tensors()
    attn, others = fa4flex.compile(blocks=lists_of(ids)), lists_of(drawn())
    assert close(attn(*qkv, blocks=others), fa4flex.attention(*qkv, blocks=others))
    assert close(attn(*qkv, blocks=others.map()), fa4flex.attention(*qkv, blocks=others))
