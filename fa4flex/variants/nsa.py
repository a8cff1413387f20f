"""Native sparse attention, its selected branch: blocks of keys by the probabilities of compressed keys.

    p(q, i) = softmax of q . c[i] over compressed keys i that end at or before p;
    s(q, J) = sum over heads of a group, m < block / stride, n < length / stride of
    p(q, J block / stride + m - n); the top best J, the first and the last two up to q's own among them,
    p = q + (kv_len - q_len)

Source: Yuan et al., Native Sparse Attention, arXiv:2502.11089, section 3.3.2 (equations 8 to 12).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fa4flex.errors import InputError
from fa4flex.primitives.kept import kept, steps, where_seen
from fa4flex.primitives.lists import Lists
from fa4flex.select import Scores, score, topk
from fa4flex.select.pooling import check_tokens
from fa4flex.variants._cases import Case, Drawn, Sizes, masked, show, tokens
from fa4flex.variants._common import whole
from fa4flex.variants.causal import causal


def nsa(
    q: Tensor,
    compressed: Tensor,
    kv_len: int,
    top: int = 16,
    block: int = 64,
    length: int = 32,
    stride: int = 16,
) -> Lists:
    """Lists for q [B, Hq, Sq, D] and compressed keys [B, Hk, C, D], C = (kv_len - length) // stride + 1, of
    which number i is made of keys i * stride to i * stride + length: blocks=nsa(...), mask=causal.

    The heads of queries that share a head of keys choose together. The compressed branch is attention over
    `compressed`, the window a sliding_window, and their gates are the caller's. Raises InputError.
    """
    sizes = {"kv_len": kv_len, "top": top, "block": block, "length": length, "stride": stride}
    for name, value in sizes.items():
        whole("nsa", name, value)
    check_tokens("nsa: q", q)
    check_tokens("nsa: compressed", compressed)
    count = (kv_len - length) // stride + 1
    if block % stride or length % stride or compressed.shape[2] != count:
        raise InputError(
            f"nsa({', '.join(f'{n}={x}' for n, x in sizes.items())}) of keys {list(compressed.shape)}",
            f"{count} compressed keys; block and length multiples of stride",
            "compress each `length` keys, `stride` after the last ones began",
        )
    offset, rows = kv_len - q.shape[2], q.shape[2]
    with torch.no_grad():
        places = steps(offset, rows, 1, q.device).unsqueeze(1)
        ends = steps(length - 1, count, stride, q.device)
        weights = where_seen(score(q, compressed).values, ends <= places).softmax(-1)
        if offset < length - 1:  # the first queries see no whole compressed key
            weights = where_seen(weights, places >= length - 1, 0.0)
        together = weights.unflatten(1, (compressed.shape[1], -1)).sum(2)
        shares = _shares((count, -(-kv_len // block)), block // stride, length // stride, q.device)
        scores = Scores(together @ shares.to(together.dtype), 1, block, rows, kv_len).causal()
        return topk(scores, top, first=1, own=2)


def _shares(shape: tuple[int, int], of_block: int, of_key: int, device: torch.device) -> Tensor:
    """float32 [C, blocks]: pairs m, n by which a compressed key adds to a block, those whose m - n is its
    distance to the first one of the block."""

    def make() -> Tensor:
        away = steps(0, shape[0], 1, device).unsqueeze(1) - steps(0, shape[1], of_block, device)
        pairs = (away + of_key).minimum(of_block - away)
        return pairs.clamp(0, min(of_block, of_key)).float()

    return kept(("shares", shape, of_block, of_key), device, make)


def definition(q: list[list[list[float]]], c: list[list[float]], numbers: tuple[int, ...]) -> list[set[int]]:
    """Blocks of each query of a group of heads [heads][queries][channels]; numbers: those of nsa."""
    kv_len, top, block, length, stride = numbers
    chosen, blocks = [], -(-kv_len // block)
    for row in range(len(q[0])):
        position, sums = row + kv_len - len(q[0]), [0.0] * blocks
        for head in q:
            weights = {
                i: math.exp(sum(x * y for x, y in zip(head[row], key, strict=True)) / math.sqrt(len(key)))
                for i, key in enumerate(c)
                if i * stride + length - 1 <= position
            }
            for at in range(blocks):
                for m in range(block // stride):
                    for n in range(length // stride):
                        number = at * block // stride + m - n
                        sums[at] += weights.get(number, 0.0) / sum(weights.values()) if weights else 0.0
        own = position // block
        forced = {0, own, max(own - 1, 0)}
        others = [at for at in range(own + 1) if at not in forced]
        best = sorted(others, key=lambda at: (-sums[at], at))[: top - len(forced)]
        chosen.append(forced | set(best))
    return chosen


def _chosen(s: Sizes) -> Drawn:
    (q, _), stride = tokens(s, heads=2), 2
    block, length = stride * 2, stride * 2
    count = (s.kv_len - length) // stride + 1
    compressed = torch.randn(1, 1, count, q.shape[3], dtype=torch.float64)
    numbers = s.kv_len, 4, block, length, stride
    wanted = definition(q[0].tolist(), compressed[0, 0].tolist(), numbers)
    offset = s.kv_len - s.q_len
    seen = lambda i, j: j <= i + offset and j // block in wanted[i]  # noqa: E731
    return masked(s, nsa(q, compressed, *numbers).mask(causal), seen)


def _sizes(s: Sizes) -> Sizes:
    return s.square(max(s.kv_len, 28))


CASES = (Case(lambda s: _chosen(_sizes(s))),)
PICTURE = None


if __name__ == "__main__":
    show(CASES)
