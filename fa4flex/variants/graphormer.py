"""Graphormer's spatial encoding: one learned number per head and shortest-path distance between two nodes.

    score + bias[h, distances[b, q, kv]]

Source: Ying et al., Graphormer, arXiv:2106.05234, section 3.1.2.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fa4flex.errors import InputError
from fa4flex.primitives.score import ScoreFunction, score_family
from fa4flex.variants._cases import Case, Drawn, Picture, Sizes, modified, show
from fa4flex.variants._common import FLOATS, INTEGERS, for_heads, table


@score_family
def graphormer(spatial_bias: Tensor, distances: Tensor) -> ScoreFunction:
    """spatial_bias [H, K], learnable floating; distances [B, N, N], integers in 0 .. K - 1.

    Indices are absolute node numbers. Give unreachable pairs a distance of their own. Raises InputError.
    """
    bias = table("graphormer", "spatial_bias", spatial_bias, FLOATS, (2,), "[H, K]")
    distances = table("graphormer", "distances", distances, INTEGERS, (3,), "[B, N, N]")
    least, most = int(distances.min()), int(distances.max())
    if least < 0 or most >= bias.shape[1]:
        raise InputError(
            f"graphormer: distances from {least} to {most} with a table of {bias.shape[1]}",
            f"distances in 0 .. {bias.shape[1] - 1}",
            f"clamp them: distances.clamp(0, {bias.shape[1] - 1}), or give spatial_bias more columns",
        )

    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + bias[h, distances[b, q_idx, kv_idx]]

    return for_heads(mod, bias.shape[0])


def definition(score: float, distance: int, row: list[float]) -> float:
    """`row` holds one head's bias by distance."""
    return score + row[distance]


def _case(s: Sizes) -> Drawn:
    nodes = s.of(520)
    bias = s.learned(torch.randn(s.heads, 9))
    distances = torch.randint(0, 9, (s.batch, nodes, nodes), dtype=torch.int32)
    return modified(
        s.square(nodes),
        lambda bias: graphormer(bias, distances),
        lambda x, b, h, q, kv: definition(x, int(distances[b, q, kv]), bias[h].tolist()),
        bias,
    )


CASES = (Case(_case),)
PICTURE = Picture("graphormer(-torch.arange(8.0).expand(8, 8), torch.randint(8, (1, 64, 64)))")

if __name__ == "__main__":
    show(CASES)
