"""A model that calls every operator that an exported file can hold, and its inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import fa4flex
from fa4flex.variants import causal

HEADS, LENGTH, WIDTH, BLOCK, PAGE = 2, 24, 8, 8, 4


class EveryOperator(nn.Module):
    """Attention with captured values, then over blocks, then over pages that new keys are written into."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.linspace(-1, 1, HEADS))
        self.register_buffer("sinks", torch.linspace(0, 1, HEADS))
        self.slope, self.reach = 0.25, 9

    def score(self, s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s + self.bias[h] * (i % 3) - self.slope * (i - j).abs()

    def mask(self, b: Any, h: Any, i: Any, j: Any) -> Any:
        return (i - j < self.reach) & (i >= j)

    def forward(self, x: Tensor, classes: Tensor, pools: Tensor, table: Tensor, used: Tensor) -> Tensor:
        x = fa4flex.attention(x, x, x, score_mod=self.score, mask=self.mask, sinks=self.sinks)
        blocks = fa4flex.BlockMap.from_dense(classes, BLOCK)
        x = x + fa4flex.attention(x, x, x, mask=causal, blocks=blocks, scale=0.5)
        k_pool, v_pool = pools.clone().unbind()
        new = fa4flex.append(x, x * 2, k_pool, v_pool, fa4flex.Paging(table, used))
        paging = fa4flex.Paging(table, new.seqused_k)
        out: Tensor = fa4flex.attention(x, k_pool, v_pool, score_mod=self.score, paging=paging)
        return out


def inputs() -> tuple[Tensor, ...]:
    """The same at each call, in any version of torch."""
    x = torch.arange(HEADS * LENGTH * WIDTH).mul(0.37).sin().view(1, HEADS, LENGTH, WIDTH)
    classes = torch.tensor([[2, 0, 0], [1, 1, 0], [2, 1, 2]], dtype=torch.uint8)
    pools = torch.arange(2 * 9 * PAGE * HEADS * WIDTH).mul(0.71).cos().view(2, 9, PAGE, HEADS, WIDTH)
    return x, classes, pools, torch.arange(8).flip(0).int()[None], torch.tensor([5], dtype=torch.int32)
