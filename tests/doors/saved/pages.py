"""A model over pages, packed and padded, whose keys kernels read in place, and its inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import fa4flex
from fa4flex.variants import causal

HEADS, WIDTH, PAGE = 2, 8, 4


class OverPages(nn.Module):
    """Attention of a padded and of a packed batch over one cache, with captured values and sinks."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bias", torch.linspace(-1, 1, HEADS))
        self.register_buffer("sinks", torch.linspace(0, 1, HEADS))
        self.slope, self.reach = 0.25, 9

    def score(self, s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s + self.bias[h] * (i % self.reach) - self.slope * (i - j).abs()

    def forward(self, x: Tensor, pools: Tensor, table: Tensor, used: Tensor, cu: Tensor) -> Tensor:
        paging = fa4flex.Paging(table, used)
        k, v = pools.unbind()
        one: Tensor = fa4flex.attention(x, k, v, score_mod=self.score, sinks=self.sinks, paging=paging)
        rows = one.transpose(1, 2).flatten(0, 1)
        out: Tensor = fa4flex.attention(rows, k, v, mask=causal, paging=paging, varlen=fa4flex.Varlen(cu))
        return out


def inputs() -> tuple[Tensor, ...]:
    """The same at each call, in any version of torch."""
    x = torch.arange(2 * HEADS * 3 * WIDTH).mul(0.37).sin().view(2, HEADS, 3, WIDTH)
    pools = torch.arange(2 * 9 * PAGE * HEADS * WIDTH).mul(0.71).cos().view(2, 9, PAGE, HEADS, WIDTH)
    tables = [[3, 1, 8], [5, 0, 7]], [5, 11], [0, 2, 6]
    return x, pools, *[torch.tensor(given, dtype=torch.int32) for given in tables]
