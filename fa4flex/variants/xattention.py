"""XAttention: blocks of keys by sums along antidiagonals, as many as hold a share of the probability.

    t(i, j) = sum over r < stride of q[stride i + stride - 1 - r] . k[stride j + r] / (stride sqrt(D));
    s(I, J) = sum over block (I, J) of softmax over j <= i of t(i, j);
    the fewest J with a share of all of row I, and I itself

Source: Xu et al., XAttention: Block Sparse Attention with Antidiagonal Scoring, arXiv:2503.16428, section 2.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from fa4flex.errors import InputError
from fa4flex.primitives.blocks import BlockMap
from fa4flex.select import mass, pool, score
from fa4flex.select.pooling import check_tokens
from fa4flex.variants._cases import Case, Drawn, Sizes, masked, show, tokens
from fa4flex.variants._common import finite, whole
from fa4flex.variants.causal import causal


def xattention(q: Tensor, k: Tensor, share: float = 0.9, block: int = 128, stride: int = 8) -> BlockMap:
    """The map for q [B, Hq, S, D] and k [B, Hk, S, D], for a causal attention: blocks=xattention(q, k),
    mask=causal.

    Scores cost 1 / stride of all products. Each query head has a map of its own. Raises InputError for a
    block that is no multiple of stride, and for other numbers of keys than of queries.
    """
    share = finite("xattention", "share", share, positive=True)
    block, stride = whole("xattention", "block", block), whole("xattention", "stride", stride)
    check_tokens("xattention: q", q)
    check_tokens("xattention: k", k)
    if block % stride or q.shape[2] != k.shape[2]:
        raise InputError(
            f"xattention of {q.shape[2]} queries, {k.shape[2]} keys, block={block}, stride={stride}",
            "self-attention, and a multiple of stride as block",
            "pad queries, or choose another stride",
        )
    scale = 1 / (stride * math.sqrt(q.shape[3]))
    with torch.no_grad():
        strided = score(pool(q, stride, "reversed"), pool(k, stride, "phases"), scale=scale).causal()
        probabilities = replace(strided, values=strided.values.softmax(-1))
        size = block // stride
        blocks = probabilities.reduced(None, ("sum", size), ("sum", size))
        return mass(replace(blocks, values=blocks.values.log()), share, own=1)


def definition(
    q: list[list[float]], k: list[list[float]], share: float, block: int, stride: int
) -> list[set[int]]:
    """Key blocks of each block of queries."""
    zero, rows = [0.0] * len(q[0]), -(-len(q) // stride)
    q, k = (x + [zero] * (rows * stride - len(x)) for x in (q, k))
    scale = 1 / (stride * math.sqrt(len(zero)))
    sums: dict[tuple[int, int], float] = {}
    for i in range(rows):
        weights = []
        for j in range(i + 1):
            pairs = ((q[stride * i + stride - 1 - r], k[stride * j + r]) for r in range(stride))
            weights.append(math.exp(scale * sum(x * y for a, b in pairs for x, y in zip(a, b, strict=True))))
        for j, weight in enumerate(weights):
            place = i * stride // block, j * stride // block
            sums[place] = sums.get(place, 0.0) + weight / sum(weights)
    chosen = []
    for row in range(-(-rows * stride // block)):
        scores, held = {at: x for (i, at), x in sums.items() if i == row}, 0.0
        chosen.append({row})
        for at in sorted(scores, key=lambda at: -scores[at]):
            if held < share * sum(scores.values()):
                chosen[row].add(at)
            held += scores[at]
    return chosen


def _chosen(s: Sizes) -> Drawn:
    (q, k), stride = tokens(s), 2
    block, share = stride * s.of(32, least=2), 0.61
    wanted = definition(q[0, 0].tolist(), k[0, 0].tolist(), share, block, stride)
    seen = lambda i, j: j <= i and j // block in wanted[i // block]  # noqa: E731
    return masked(s, xattention(q, k, share, block, stride).mask(causal), seen)


CASES = (Case(lambda s: _chosen(s.square(max(s.kv_len, 24)))),)
PICTURE = None


if __name__ == "__main__":
    show(CASES)
