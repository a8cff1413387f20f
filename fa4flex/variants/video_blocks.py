"""Video sparse attention, its fine stage: cubes of tokens choose cubes by their means.

    s(I, J) = mean(q of cube I) . mean(k of cube J): cubes of queries attend to the top best cubes of keys

Source: Zhang et al., VSA: Faster Video Diffusion with Trainable Sparse Attention, arXiv:2505.13389,
section 2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fa4flex.primitives.lists import Lists
from fa4flex.select import pool, score, topk
from fa4flex.variants._cases import Case, Drawn, Sizes, masked, show, tokens
from fa4flex.variants._common import whole


def video_blocks(q: Tensor, k: Tensor, cube: int = 64, top: int = 32) -> Lists:
    """Lists for q and k [B, H, S, D] whose tokens are in cube order: blocks=video_blocks(q, k), no mask.

    cube  tokens of a cube, 64 of 4 x 4 x 4; `fa4flex.select.tile_order` says how to put tokens
          in that order. Each query
          head chooses for itself, among all cubes: attention is bidirectional.

    Raises InputError.
    """
    cube, top = whole("video_blocks", "cube", cube), whole("video_blocks", "top", top)
    with torch.no_grad():
        return topk(score(pool(q, cube), pool(k, cube)), top)


def definition(q: list[list[float]], k: list[list[float]], cube: int, top: int) -> list[set[int]]:
    """Cubes of keys of each cube of queries."""

    def means(rows: list[list[float]]) -> list[list[float]]:
        parts = [rows[at : at + cube] for at in range(0, len(rows), cube)]
        return [[sum(c) / len(part) for c in zip(*part, strict=True)] for part in parts]

    of_q, of_k = means(q), means(k)
    scores = [[sum(x * y for x, y in zip(a, b, strict=True)) for b in of_k] for a in of_q]
    return [set(sorted(range(len(row)), key=row.__getitem__, reverse=True)[:top]) for row in scores]


def _chosen(s: Sizes) -> Drawn:
    (q, k), cube, top = tokens(s), s.of(64, least=2), 2
    wanted = definition(q[0, 0].tolist(), k[0, 0].tolist(), cube, top)
    return masked(s, video_blocks(q, k, cube, top).mask(), lambda i, j: j // cube in wanted[i // cube])


CASES = (Case(_chosen),)
PICTURE = None


if __name__ == "__main__":
    show(CASES)
