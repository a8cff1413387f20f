"""Vertical and slash lines by the probabilities of the last queries."""

from __future__ import annotations

import torch
from torch import Tensor

from fa4flex.errors import InputError
from fa4flex.exact import is_count
from fa4flex.primitives.base import check_device
from fa4flex.select.pooling import check_tokens


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
    kv_len = k.shape[2]
    tail = q[0, :, -last:].float() if q.dtype != torch.float64 else q[0, :, -last:]
    keys = k[0].to(tail.dtype).repeat_interleave(q.shape[1] // k.shape[1], 0)
    rows, places = tail.shape[1], torch.arange(kv_len, device=q.device)
    away = torch.arange(kv_len - rows, kv_len, device=q.device).unsqueeze(1) - places
    scores = tail @ keys.transpose(1, 2) * q.shape[3] ** -0.5
    weights = scores.masked_fill(away < 0, -torch.inf).softmax(-1).nan_to_num(0.0)  # queries before all keys
    by_distance = torch.zeros_like(weights[:, 0])
    by_distance.scatter_add_(1, away.clamp(min=0).expand_as(weights).flatten(1), weights.flatten(1))
    return _largest(weights.sum(1), vertical), _largest(by_distance, slash)


def _largest(x: Tensor, count: int) -> Tensor:
    best = x.sort(dim=1, descending=True, stable=True).indices[:, :count]
    return torch.zeros_like(x, dtype=torch.bool).scatter(1, best, True)
