"""T5's relative position bias: one learned number per head and bucket of distances.

    score + table[bucket(kv - p), h],   p = q + (kv_len - q_len)

Half of a direction's n buckets hold one distance each; the others grow logarithmically up to max_distance:
    bucket(d) = n/2 + floor(log(d / (n/2)) / log(max_distance / (n/2)) * (n - n/2)), at most n - 1

Source: Raffel et al., T5, arXiv:1910.10683, section 2.1.
"""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from fa4flex.errors import InputError
from fa4flex.primitives.score import ScoreFunction, score_family
from fa4flex.variants._cases import Case, Drawn, Picture, Sizes, modified, show
from fa4flex.variants._common import FLOATS, aligned, for_heads, table, whole
from fa4flex.variants.causal import causal

Axes = Literal["bucket_head", "head_bucket"]


@score_family
def t5_bias(
    bias: Tensor, bidirectional: bool = False, max_distance: int = 128, axes: Axes = "bucket_head"
) -> ScoreFunction:
    """bias: learnable floating [num_buckets, H], as T5 checkpoints hold it, or axes="head_bucket".

    bidirectional=True (encoders) gives half of the buckets to keys ahead of the query; otherwise such keys
    share the bucket of distance 0. Aligned bottom-right. T5 itself does not scale q.k: compile with scale=1.
    Raises InputError.
    """
    values = table("t5_bias", "bias", bias, FLOATS, (2,), "[num_buckets, H] or [H, num_buckets]")
    if axes not in get_args(Axes):
        raise InputError(
            f"t5_bias(axes={axes!r})", f"one of {get_args(Axes)}", "name the axes of bias in order"
        )
    count, heads = values.shape if axes == "bucket_head" else values.shape[::-1]
    # The mod indexes the tensor that was given: a view of it would not follow a parameter's new storage.
    value_of = (lambda i, h: values[i, h]) if axes == "bucket_head" else (lambda i, h: values[h, i])
    per_side = count // 2 if bidirectional else count
    if per_side < 2 or (bidirectional and count % 2):
        raise InputError(
            f"t5_bias: {count} buckets, {bidirectional=}",
            "at least 2 buckets per direction, and an even number when bidirectional",
            'check `axes`: "bucket_head" expects [num_buckets, H]',
        )
    far = whole("t5_bias", "max_distance", max_distance, least=per_side // 2 + 1)
    buckets = torch.tensor(distance_buckets(per_side, far), dtype=torch.int32, device=values.device)

    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, q_len: Any, kv_len: Any) -> Any:
        behind = aligned(q_idx, q_len, kv_len) - kv_idx
        return score + value_of(buckets[torch.clamp(behind, 0, far)], h)

    def mod_bidirectional(
        score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, q_len: Any, kv_len: Any
    ) -> Any:
        ahead = kv_idx - aligned(q_idx, q_len, kv_len)
        bucket = buckets[torch.clamp(torch.abs(ahead), max=far)]
        return score + value_of(torch.where(ahead > 0, bucket + per_side, bucket), h)

    return for_heads(mod_bidirectional if bidirectional else mod, heads)


def distance_buckets(count: int, far: int) -> list[int]:
    """The bucket of every distance 0 .. far, one direction, with `count` buckets.

    Whole-number arithmetic: the logarithm of a distance on a bucket's edge rounds either way in floats.
    """
    exact = count // 2
    grown = count - exact
    buckets = list(range(exact))
    for distance in range(exact, far + 1):
        # floor(log(d / exact) / log(far / exact) * grown) >= k  <=>  d^grown * exact^k >= far^k * exact^grown
        steps = 0
        while (
            steps < grown - 1 and distance**grown * exact ** (steps + 1) >= far ** (steps + 1) * exact**grown
        ):
            steps += 1
        buckets.append(exact + steps)
    return buckets


def definition(score: float, q: int, kv: int, column: list[float], max_distance: int) -> float:
    """One direction; `column` holds one head's bias by bucket."""
    distance, half = max(q - kv, 0), len(column) // 2
    if distance < half:
        return score + column[distance]
    steps = math.log(distance / half) / math.log(max_distance / half) * (len(column) - half)
    return score + column[min(half + math.floor(steps + 1e-9), len(column) - 1)]


def _one_side(s: Sizes) -> Drawn:
    bias, far = s.learned(torch.randn(32, s.heads)), s.of(128, least=17)
    return modified(
        s,
        lambda bias: t5_bias(bias, max_distance=far),
        lambda x, b, h, q, kv: definition(x, q + s.kv_len - s.q_len, kv, bias[:, h].tolist(), far),
        bias,
        mask=causal,
    )


def _both_sides(s: Sizes) -> Drawn:
    bias, far = s.learned(torch.randn(s.heads, 16)), s.of(128, least=5)

    def by_side(x: float, b: int, h: int, q: int, kv: int) -> float:
        position, row = q + s.kv_len - s.q_len, bias[h].tolist()
        if kv > position:
            return definition(x, kv, position, row[8:], far)
        return definition(x, position, kv, row[:8], far)

    return modified(
        s,
        lambda bias: t5_bias(bias, bidirectional=True, max_distance=far, axes="head_bucket"),
        by_side,
        bias,
    )


CASES = (Case(_one_side), Case(_both_sides))
PICTURE = Picture("t5_bias(torch.randn(32, 8))")

if __name__ == "__main__":
    show(CASES)
