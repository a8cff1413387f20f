"""Vertical and slash lines by the probabilities of the last queries."""

from __future__ import annotations

import torch
from torch import Tensor

from fa4flex.errors import InputError
from fa4flex.exact import is_count
from fa4flex.primitives.base import check_device
from fa4flex.primitives.kept import steps, where_seen
from fa4flex.select.pooling import check_tokens
from fa4flex.select.scoring import products_of


def lines(q: Tensor, k: Tensor, vertical: int, slash: int, last: int = 64) -> tuple[Tensor, Tensor]:
    """The keys and the distances with the most probability of the last queries, for variants.vertical_slash.

    q, k             [1, Hq, Sq, D] and [1, Hk, Skv, D], one sequence, aligned bottom-right
    vertical, slash  keys and distances of each query head; last: queries that they are chosen by

    Returns columns and slashes, bool [Hq, Skv] each. Raises InputError.
    """
    check_tokens("q", q)
    check_tokens("k", k)
    check_device("k", k, "q", q.device, "move one of them")
    if q.shape[0] != 1 or k.shape[0] != 1 or q.shape[1] % k.shape[1] or q.shape[3] != k.shape[3]:
        raise InputError(
            f"lines of q {list(q.shape)}, k {list(k.shape)}",
            "[1, Hq, Sq, D] and [1, Hk, Skv, D], Hq a multiple of Hk",
            "choose the lines of each sequence alone: its tables are [H, kv_len]",
        )
    for name, value in (("vertical", vertical), ("slash", slash), ("last", last)):
        if not is_count(value):
            raise InputError(f"{name}={value!r}", "a positive int", "e.g. vertical=1000, slash=6096, last=64")
    kv_len, tail = k.shape[2], q[:, :, -last:]
    rows, places = tail.shape[2], steps(0, kv_len, 1, q.device)
    with torch.no_grad():
        scores = products_of(tail, k, q.shape[3] ** -0.5)[0]
        seen = places <= steps(kv_len - rows, rows, 1, q.device).unsqueeze(1)
        weights = where_seen(scores, seen).softmax(-1)
        if rows > kv_len:  # queries before all keys
            weights = weights.nan_to_num(0.0)
        return _largest(weights.sum(1), vertical), _largest(_by_distance(weights), slash)


def _by_distance(weights: Tensor) -> Tensor:
    """Sums [H, S] of weights [H, R, S] by the distance of keys to queries, of which the last one is aligned
    with the last key. Seen from the last key, a row has one key of its future more than the next one."""
    heads, rows, keys = weights.shape
    wide = keys + rows - 1
    skewed = weights.new_zeros(heads, rows, wide)
    skewed[..., :keys] = weights.flip(-1)
    shape, strides = (heads, rows, keys), (rows * wide, wide - 1, 1)
    return skewed.as_strided(shape, strides, rows - 1).sum(1)


def _largest(x: Tensor, count: int) -> Tensor:
    best = x.sort(dim=1, descending=True, stable=True).indices[:, :count]
    return torch.zeros_like(x, dtype=torch.bool).scatter_(1, best, True)
