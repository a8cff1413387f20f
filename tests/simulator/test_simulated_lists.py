"""Lists of keys and maps of packed sequences on simulated GPUs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import cumulative
from torch import Tensor

import fa4flex
import ptxsim
from fa4flex import BlockMap, Lists, UnsupportedError, Varlen, reference, select
from fa4flex.variants import causal

SMS = 3


def plain(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    """The same maths in PyTorch operations at the tensors' dtype."""
    scores = (q @ k.mT).float() * q.shape[-1] ** -0.5
    weights = scores.masked_fill(~allowed, -torch.inf).softmax(-1).nan_to_num(0.0)
    return weights.to(q.dtype) @ v


def close(got: Tensor, qkv: tuple[Tensor, ...], allowed: Tensor) -> None:
    """At most twice plain PyTorch's worst error."""
    mask = lambda b, h, q_idx, kv_idx: allowed[b, h, q_idx, kv_idx]  # noqa: E731
    want = reference.attention(*(x.double() for x in qkv), None, mask)[0]
    q, k, v = qkv
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    bound = (plain(q, k, v, allowed).double() - want).abs().max()
    assert (got.double() - want).abs().max() <= 2 * bound + 1e-3


def drawn(heads: int, length: int) -> tuple[Tensor, ...]:
    return tuple(torch.randn(1, n, length, 64).bfloat16() for n in (heads, 1, 1))


@pytest.mark.slow
@pytest.mark.parametrize("chip", ["sm_90a", "sm_100a"])
def test_lists_of_key_heads_with_a_window(chip: Any) -> None:
    q, k, v = drawn(2, 256)
    with torch.no_grad(), ptxsim.device(chip, sms=SMS) as gpu:
        scores = select.score(select.pool(q, 64), select.pool(k, 64), over_heads="mean")
        chosen = select.topk(scores.causal(), 2, first=1)
        lists = Lists(chosen.ids, chosen.counts, kv_len=256, unit=64, queries=64, window=9, sinks=3)
        out = fa4flex.compile(mask=causal)(q, k, v, blocks=lists)
    assert not gpu.findings
    at = torch.arange(256)
    listed = chosen.classes().bool().repeat_interleave(64, 2).repeat_interleave(64, 3)
    near = (at > at[:, None] - 9) | (at < 3)
    allowed = ((listed | near) & (at <= at[:, None])).expand(1, 2, 256, 256)
    close(out, (q, k, v), allowed)


@pytest.mark.slow
def test_a_map_of_each_packed_sequence() -> None:
    lengths = [70, 130]
    q, k, v = (torch.randn(200, 2, 64).bfloat16() for _ in range(3))
    classes = torch.randint(0, 3, (2, 2, 3, 3), dtype=torch.uint8)
    with torch.no_grad(), ptxsim.device("sm_90a", sms=SMS) as gpu:
        blocks = BlockMap(classes, 64, 130, 130)
        out = fa4flex.compile(mask=causal, blocks=blocks)(q, k, v, varlen=Varlen(cumulative(lengths)))
    assert not gpu.findings
    for b, first in enumerate((0, 70)):
        n, at = lengths[b], torch.arange(lengths[b])
        found = classes[b].repeat_interleave(64, 1).repeat_interleave(64, 2)[:, :n, :n]
        allowed = (found == 2) | ((found == 1) & (at <= at[:, None]))
        one = tuple(x[first : first + n].transpose(0, 1)[None] for x in (q, k, v))
        close(out[first : first + n].transpose(0, 1)[None], one, allowed[None])


@pytest.mark.parametrize("chip, width, trains", [("sm_100a", 64, True), ("sm_90a", 160, True)])
def test_short_units_are_refused_in_words(chip: Any, width: int, trains: bool) -> None:
    q, k, v = (torch.randn(1, 1, 64, width).bfloat16() for _ in range(3))
    lists = Lists(torch.zeros(1, 1, 64, 2, dtype=torch.int32), kv_len=64, unit=4)
    with (
        ptxsim.device(chip, sms=SMS),
        pytest.raises(UnsupportedError, match=r"units of 4 keys.*\n.*\n.*map"),
    ):
        fa4flex.attention(q.requires_grad_(trains), k, v, blocks=lists)
