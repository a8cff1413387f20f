"""Prefix tree: sequences that share prefixes, each token stored once, attend as if each stood alone.

    allowed(q, kv) = kv <= q < leave[kv]

Tokens lie in depth-first order: token kv and those of the subtree below it are kv up to leave[kv] - 1.

Source: times of a depth-first search, Cormen et al., Introduction to Algorithms, the parenthesis theorem.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fa4flex.primitives.mask import MaskMod, mask_family
from fa4flex.variants._cases import Case, Drawn, Picture, Sizes, masked, masked_by_batch, show
from fa4flex.variants._common import INTEGERS, table


@mask_family
def prefix_tree(leave: Tensor) -> MaskMod:
    """leave: the end of each token's subtree in depth-first order, integer [S] or [B, S]; 0 for padding.

    `fa4flex.trees.fold` makes it of sequences. Indices are absolute, and queries are the same tokens as keys.
    A token with leave[k] <= k attends nothing and is attended by none. Raises InputError.
    """
    leave = table("prefix_tree", "leave", leave, INTEGERS, (1, 2), "[S] or [B, S]")
    if leave.ndim == 2:

        def mod_per_batch(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return (kv_idx <= q_idx) & (q_idx < leave[b, kv_idx])

        return mod_per_batch

    def mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (kv_idx <= q_idx) & (q_idx < leave[kv_idx])

    return mod


def definition(q: int, kv: int, parents: list[int]) -> bool:
    while q > kv:
        q = parents[q]
    return q == kv


def _parents(tokens: int, branches: int) -> list[int]:
    """A random tree in depth-first order: each token continues the one before, or one above it."""
    parents = [-1]
    for token in range(1, tokens):
        parent = token - 1
        if not int(torch.randint(branches, (), device="cpu")):
            for _ in range(int(torch.randint(tokens, (), device="cpu"))):
                parent = parents[parent] if parent >= 0 else parent
        parents.append(parent)
    return parents


def _leave(parents: list[int]) -> list[int]:
    ends = list(range(1, len(parents) + 1))
    for token in range(len(parents) - 1, -1, -1):
        if parents[token] >= 0:
            ends[parents[token]] = max(ends[parents[token]], ends[token])
    return ends


def _one_tree(s: Sizes) -> Drawn:
    parents = _parents(s.of(400), max(s.of(100), 2))
    leave = torch.tensor(_leave(parents), dtype=torch.int32)
    return masked(s.square(len(parents)), prefix_tree(leave), definition, parents)


def _rows(s: Sizes) -> Drawn:
    tokens = s.of(300)
    rows = [_parents(tokens, 3) for _ in range(s.batch)]
    leave = torch.tensor([_leave(parents) for parents in rows])
    return masked_by_batch(s.square(tokens), prefix_tree(leave), lambda b, q, kv: definition(q, kv, rows[b]))


CASES = (Case(_one_tree), Case(_rows))
PICTURE = Picture("prefix_tree(torch.tensor([128] * 48 + [72] * 24 + [128] * 16 + [104] * 16 + [128] * 24))")


if __name__ == "__main__":
    show(CASES)
