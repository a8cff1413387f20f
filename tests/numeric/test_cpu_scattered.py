"""Block maps of small blocks on a CPU: gathered tiles give what the reference does, with all gradients."""

from __future__ import annotations

import random
from typing import Any
from unittest.mock import patch

import pytest
import torch
from helpers import agree, leaf

import fa4flex
from fa4flex import BlockMap, reference
from fa4flex.runtime.cpu import scattered
from fa4flex.variants import alibi, causal, softcap


def drawn_map(size: tuple[int, int], lengths: tuple[int, int], maps: tuple[int, int]) -> BlockMap:
    """A fifth of the blocks, partial or full, in small maps at least one and at most half of them; the first
    rows of blocks have none."""
    shape = *maps, *(-(-n // x) for n, x in zip(lengths, size, strict=True))
    there = torch.ones(shape)
    while there.mean() > scattered.DENSEST:
        there = (torch.rand(shape) < 0.2).float()
        there[:, :, 0], there[:, :, -1, 0] = 0, 1
    return BlockMap(torch.randint(1, 3, shape, dtype=torch.uint8) * there.to(torch.uint8), size, *lengths)


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"mask": causal},
    "alibi": {"score_mod": alibi},
    "soft cap, causal": {"score_mod": softcap(3.0), "mask": causal},
}
SIZES = [(16, 16), (64, 64), (16, 48), (8, 8), (32, 64)]


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("size", SIZES)
def test_draws_agree_with_the_reference(name: str, size: tuple[int, int]) -> None:
    heads, kv_heads = random.choice([(4, 4), (4, 2), (3, 1)])
    maps = random.choice([(1, 1), (2, 1), (1, heads), (2, heads)])
    lengths = random.randint(2 * size[0], 300), random.randint(2 * size[1], 300)
    blocks, variant = drawn_map(size, lengths, maps), VARIANTS[name]
    q, k, v = leaf(2, heads, lengths[0], 16), *(leaf(2, kv_heads, lengths[1], 16) for _ in range(2))
    sinks = leaf(heads) if random.random() < 0.5 else None
    exact = reference.attention(
        q, k, v, variant.get("score_mod"), blocks.mask(variant.get("mask")), sinks=sinks
    )
    attn = fa4flex.compile(blocks=blocks, sinks=sinks, **variant)
    with patch.object(scattered.Batch, "of", side_effect=scattered.Batch.of) as batches:
        found = attn(q, k, v, return_lse=True)
        forward = batches.call_count
        agree(found, exact, [q, k, v, *([] if sinks is None else [sinks])])
    assert 0 < forward < batches.call_count, "tiles are walked over in some pass"


def test_denser_maps_and_larger_blocks_are_walked_over() -> None:
    q, k, v = (torch.randn(1, 2, 512, 16) for _ in range(3))
    for size, density in ((128, 0.2), (32, 0.9)):
        shape = 1, 2, 512 // size, 512 // size
        blocks = BlockMap((torch.rand(shape) < density).to(torch.uint8), size, 512, 512)
        with patch.object(scattered.Batch, "of") as batches:
            fa4flex.compile(blocks=blocks)(q, k, v)
        assert not batches.called


def test_a_mod_that_reads_past_its_table_for_hidden_pairs() -> None:
    """Tiles are walked over, where such a mod is evaluated at the pairs that count."""
    blocks = drawn_map((16, 16), (96, 96), (1, 2))
    table = torch.randn(16)

    def near(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + table[q_idx - kv_idx]

    def window(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx >= kv_idx) & (q_idx - kv_idx < 16)

    q, k, v = (leaf(1, 2, 96, 16) for _ in range(3))
    classes = blocks.classes.clamp(max=1)
    classes[:, :, :, 0] = 1
    blocks = BlockMap(classes, 16, 96, 96)
    found = fa4flex.compile(near, window, blocks=blocks)(q, k, v, return_lse=True)
    agree(found, reference.attention(q, k, v, near, blocks.mask(window)), [q, k, v])


def test_half_precision_and_the_same_bits_again() -> None:
    blocks = drawn_map((16, 16), (200, 200), (1, 4))
    q, k, v = (torch.randn(1, 4, 200, 32).bfloat16().requires_grad_() for _ in range(3))
    attn = fa4flex.compile(blocks=blocks)
    exact = attn(*(x.detach().double() for x in (q, k, v)))
    found = [attn(q, k, v) for _ in range(2)]
    assert torch.equal(*found) and found[0].dtype == torch.bfloat16
    assert (found[0].double() - exact).abs().max() <= 2 * 2**-9 * exact.abs().max()
    grads = [torch.autograd.grad(x, (q, k, v), torch.ones_like(x)) for x in found]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
