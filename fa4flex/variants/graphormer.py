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
from fa4flex.variants._alone import show_score
from fa4flex.variants._check import FLOATS, INTEGERS, for_heads, table


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


def definition(score: float, h: int, q: int, kv: int, bias: list[list[float]]) -> float:
    """On a path graph, whose nodes are |q - kv| edges apart."""
    return score + bias[h][abs(q - kv)]


def main() -> None:
    node = torch.arange(6)
    bias = -torch.arange(12.0).view(2, 6)
    path = (node[:, None] - node).abs()[None]
    show_score(graphormer(bias, path), lambda score, h, q, kv: definition(score, h, q, kv, bias.tolist()))


if __name__ == "__main__":
    main()
