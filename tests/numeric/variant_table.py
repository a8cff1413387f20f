"""Every variant with some of its parameters, as compositions over learned tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from helpers import cumulative, leaf
from torch import Tensor

from fa4flex import variants as v
from fa4flex.variants.mla import Mla

Composition = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """q [batch, heads, q_len, dim], k [batch, kv_heads, kv_len, dim], v [batch, kv_heads, kv_len, dim_v]."""

    batch: int = 3
    heads: int = 4
    kv_heads: int = 2
    q_len: int = 23
    kv_len: int = 37
    dim: int = 6
    dim_v: int = 5

    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        return (
            leaf(self.batch, self.heads, self.q_len, self.dim),
            leaf(self.batch, self.kv_heads, self.kv_len, self.dim),
            leaf(self.batch, self.kv_heads, self.kv_len, self.dim_v),
        )


@dataclass(frozen=True)
class Case:
    """`compose(*learned)` is what fa4flex.compile takes; gradients must reach all of `learned`."""

    sizes: Sizes
    compose: Callable[..., Composition]
    learned: tuple[Tensor, ...] = ()


Draw = Callable[[Sizes], Case]


def fixed(kind: str, mod: Any) -> Draw:
    """A mask or score mod that learns nothing and works at any lengths."""
    return lambda s: Case(s, lambda: {kind: mod})


mask, score = partial(fixed, "mask"), partial(fixed, "score_mod")


def over(q_len: int, kv_len: int, draw: Callable[[Sizes], Any]) -> Draw:
    """A mask tied to these lengths."""

    def case(s: Sizes) -> Case:
        s = replace(s, q_len=q_len, kv_len=kv_len)
        drawn = draw(s)
        return Case(s, lambda: {"mask": drawn})

    return case


def square(length: int, draw: Callable[[Sizes], Any]) -> Draw:
    return over(length, length, draw)


def sized(draw: Callable[[Sizes], Any]) -> Draw:
    """A mask whose tensors fit the lengths."""

    def case(s: Sizes) -> Case:
        drawn = draw(s)
        return Case(s, lambda: {"mask": drawn})

    return case


def learned(shape: Callable[[Sizes], tuple[int, ...]], family: Callable[[Tensor], Any]) -> Draw:
    """A score mod over one learned table."""
    return lambda s: Case(s, lambda table: {"score_mod": family(table)}, (leaf(*shape(s)),))


def graphormer(kinds: int) -> Draw:
    def case(s: Sizes) -> Case:
        s = replace(s, kv_len=s.q_len)
        distances = torch.randint(0, kinds, (s.batch, s.q_len, s.q_len), dtype=torch.int32)
        return Case(s, lambda bias: {"score_mod": v.graphormer(bias, distances)}, (leaf(s.heads, kinds),))

    return case


def sandwich(spare: int, d_bar: int) -> Draw:
    """A table that reaches `spare` distances beyond the lengths, where tensors are made."""

    def case(s: Sizes) -> Case:
        longest = max(s.q_len, s.kv_len)
        drawn = v.sandwich(longest + spare, d_bar, device=torch.get_default_device())
        return Case(s, lambda: {"score_mod": drawn})

    return case


def sinks(shift: float, **rest: Any) -> Draw:
    def case(s: Sizes) -> Case:
        logits = (torch.randn(s.heads, dtype=torch.float64) + shift).requires_grad_()
        return Case(s, lambda logits: {"sinks": v.gpt_oss_sinks(logits), **rest}, (logits,))

    return case


def mla(shapes: Mla) -> Draw:
    def case(s: Sizes) -> Case:
        s = replace(s, dim=shapes.qk_dim, dim_v=shapes.value)
        return Case(s, lambda: {"scale": shapes.scale, "mask": v.causal})

    return case


def ids(*shape: int) -> Tensor:
    return torch.randint(0, 4, shape, dtype=torch.int32)


def parents(nodes: int) -> list[int]:
    return [-1, *(int(torch.randint(-1, node, ())) for node in range(1, nodes))]


OFFSETS = cumulative([4, 3, 0, 5, 2])
TABLE: dict[str, tuple[Draw, ...]] = {
    "alibi": (
        score(v.alibi()),
        learned(lambda s: (s.heads,), v.alibi),
        learned(lambda s: (s.batch, s.heads), lambda t: v.alibi(t, symmetric=True)),
    ),
    "bigbird": (
        square(20, lambda s: v.bigbird(20, 2, 3, 1, 2, seed=1, device=torch.get_default_device())),
        square(15, lambda s: v.bigbird(15, 4, 1, 0, 1, device=torch.get_default_device())),
    ),
    "block_diffusion": (
        square(16, lambda s: v.block_diffusion(8, 3)),
        square(12, lambda s: v.block_diffusion(6, 2)),
    ),
    "causal": (mask(v.causal), mask(~v.causal)),
    "checkerboard": (mask(v.checkerboard()), mask(v.checkerboard(3))),
    "chunked_local": (mask(v.chunked_local(4)), mask(v.chunked_local(11))),
    "dilated_window": (mask(v.dilated_window(5, 2)), mask(v.dilated_window(9, 3))),
    "document": (
        sized(lambda s: v.document(ids(max(s.q_len, s.kv_len)).sort().values)),
        sized(lambda s: v.document(q_ids=ids(s.batch, s.q_len), kv_ids=ids(s.batch, s.kv_len))),
        square(14, lambda s: v.causal & v.document(offsets=OFFSETS)),
    ),
    "global_window": (
        mask(v.global_window(2, 3)),
        sized(lambda s: v.global_window(1, torch.rand(s.kv_len) < 0.2)),
    ),
    "gpt_oss_sinks": (sinks(0.0), sinks(4.0, mask=v.sliding_window(3)), sinks(-4.0, score_mod=v.alibi)),
    "graphormer": (graphormer(3), graphormer(8)),
    "learned_bias": (
        learned(lambda s: (s.heads, 9), v.learned_bias),
        learned(lambda s: (s.heads, s.q_len, s.kv_len), v.learned_bias),
        learned(lambda s: (s.batch, 1, 1, s.kv_len), v.learned_bias),
    ),
    "mla": (mla(v.mla()), mla(v.mla(4, 2, 3, mscale=1.3))),
    "natten": (
        square(12, lambda s: v.natten(12, 5)),
        square(20, lambda s: v.natten((4, 5), (3, 3), causal=(True, False))),
        square(24, lambda s: v.natten((2, 3, 4), (1, 3, 1), (1, 1, 2))),
    ),
    "prefix_lm": (
        mask(v.prefix_lm(3)),
        sized(lambda s: v.prefix_lm(torch.randint(0, s.kv_len + 1, (s.batch,)))),
    ),
    "relative_position": (score(v.relative_position()), score(v.relative_position(-0.05))),
    "sandwich": (sandwich(27, 8), sandwich(3, 16)),
    "shared_prefix": (
        square(14, lambda s: v.shared_prefix(OFFSETS, torch.tensor([0, 0, 0, 3, 3]))),
        square(14, lambda s: v.shared_prefix(OFFSETS, torch.tensor([1, 1, 1, 1, 1]))),
    ),
    "sliding_tile": (
        square(27, lambda s: v.sliding_tile((4, 6), (2, 4), (2, 2), 3)),
        square(16, lambda s: v.sliding_tile((2, 2, 4), (1, 2, 4), (1, 2, 2))),
    ),
    "sliding_window": (mask(v.sliding_window(1)), mask(v.sliding_window(6)), mask(v.sliding_window)),
    "softcap": (score(v.softcap(1.5)), score(v.alibi >> v.softcap(20.0))),
    "streaming_llm": (mask(v.streaming_llm(2, 3)), mask(v.streaming_llm(0, 5))),
    "symmetric_window": (mask(v.symmetric_window(1)), mask(v.symmetric_window(7))),
    "t5_bias": (
        learned(lambda s: (8, s.heads), lambda t: v.t5_bias(t, max_distance=16)),
        learned(lambda s: (8, s.heads), lambda t: v.t5_bias(t, bidirectional=True, max_distance=12)),
        learned(lambda s: (s.heads, 6), lambda t: v.t5_bias(t, max_distance=9, axes="head_bucket")),
    ),
    "tree": (
        over(7, 12, lambda s: v.tree(parents(7), 4)),
        over(
            6,
            9,
            lambda s: v.tree(
                ancestors=torch.rand(s.batch, 6, 6) < 0.4, prefix_len=torch.randint(0, 4, (s.batch,))
            ),
        ),
    ),
    "vision_cross": (
        over(10, 12, lambda s: v.vision_cross(torch.tensor([[0, 5], [2, 8], [8, 8]]), 4)),
        over(9, 6, lambda s: v.vision_cross(torch.tensor([[0, 9], [4, 6], [1, 3]]), 2)),
    ),
}
