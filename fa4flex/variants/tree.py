"""Tree attention for speculative decoding: drafted tokens form a tree behind a verified prefix.

    allowed(q, kv) = kv < prefix_len, or node kv - prefix_len is q or one of its ancestors

Without prefix_len, the nodes are the last q_len keys of each sequence, as over a cache.

Source: Miao et al., SpecInfer, arXiv:2305.09781, section 4.2; Medusa, arXiv:2401.10774, section 2.1.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fa4flex.errors import InputError
from fa4flex.primitives.mask import MaskMod, mask_family
from fa4flex.variants._cases import Case, Drawn, Picture, Sizes, masked, masked_by_batch, show
from fa4flex.variants._common import BOOL, INTEGERS, table, whole


@mask_family
def tree(
    parents: Sequence[int] | Tensor | None = None,
    prefix_len: int | Tensor | None = None,
    *,
    ancestors: Tensor | None = None,
) -> MaskMod:
    """Queries are the N nodes of the tree, keys the prefix and then the same N nodes; indices are absolute.

    parents     [N]: each node's parent, a smaller number, or -1 for a root (a tensor brings its device); or
    ancestors   bool [N, N] or [B, N, N]: ancestors[i, j], j is i or above it
    prefix_len  an int >= 0, or an integer tensor [B]; None: kv_len - q_len

    Raises InputError.
    """
    if (parents is None) == (ancestors is None):
        raise InputError(
            "tree() with parents and ancestors, or neither", "one of them", "e.g. tree([-1, 0, 0, 1])"
        )
    above = ancestors_of(parents) if parents is not None else ancestors
    above = table("tree", "ancestors", above, BOOL, (2, 3), "[N, N] or [B, N, N]")
    nodes = above.shape[-1]
    if above.shape[-2] != nodes:
        raise InputError(
            f"tree(ancestors=<{list(above.shape)}>)", "a square matrix", "one row and column per node"
        )
    is_above = (lambda b, i, j: above[i, j]) if above.ndim == 2 else (lambda b, i, j: above[b, i, j])

    def allowed(b: Any, q_idx: Any, node: Any) -> Any:
        in_tree = (node < nodes) & is_above(b, q_idx, torch.clamp(node, 0, nodes - 1))
        return (node < 0) | in_tree

    if prefix_len is None:

        def mod_at_the_end(b: Any, h: Any, q_idx: Any, kv_idx: Any, q_len: Any, kv_len: Any) -> Any:
            return allowed(b, q_idx, kv_idx - (kv_len - q_len))

        return mod_at_the_end
    lengths, length = None, 0
    if isinstance(prefix_len, Tensor):
        lengths = table("tree", "prefix_len", prefix_len, INTEGERS, (1,), "[B]")
    else:
        length = whole("tree", "prefix_len", prefix_len, least=0)
    prefix_of = (lambda b: length) if lengths is None else (lambda b: lengths[b])

    def mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return allowed(b, q_idx, kv_idx - prefix_of(b))

    return mod


def ancestors_of(parents: Sequence[int] | Tensor) -> Tensor:
    """bool [N, N] from parents [N]: row i marks i and everything above it."""
    numbers = parents.tolist() if isinstance(parents, Tensor) else list(parents)
    above = torch.eye(len(numbers), dtype=torch.bool)
    for node, parent in enumerate(numbers):
        if not isinstance(parent, int) or not -1 <= parent < node:
            raise InputError(
                f"tree: node {node} has parent {parent}",
                "a smaller node number, or -1 for a root",
                "number the nodes so that parents come before their children",
            )
        if parent >= 0:
            above[node] |= above[parent]
    return above.to(parents.device) if isinstance(parents, Tensor) else above


def definition(q: int, kv: int, parents: list[int], prefix_len: int) -> bool:
    node = q
    while node >= 0:
        if kv == prefix_len + node:
            return True
        node = parents[node]
    return kv < prefix_len


def _parents(nodes: int) -> list[int]:
    return [-1, *(int(torch.randint(-1, node, (), device="cpu")) for node in range(1, nodes))]


def _of(s: Sizes, *arguments: int, prefix: int, more: int = 0) -> Drawn:
    parents = _parents(s.of(256))
    nodes = len(parents)
    at = replace(s, q_len=nodes, kv_len=prefix + nodes + more)
    return masked(at, tree(parents, *arguments), definition, parents, prefix)


def _behind_a_prefix(s: Sizes) -> Drawn:
    prefix = s.of(100, least=0)
    return _of(s, prefix, prefix=prefix, more=0 if s.rng is None else s.rng.randint(0, 2))


def _matrices(s: Sizes) -> Drawn:
    above, prefix = torch.rand(s.batch, 6, 6) < 0.4, torch.randint(0, 4, (s.batch,))

    def allowed(b: int, q: int, kv: int) -> bool:
        node = kv - int(prefix[b])
        return node < 0 or (node < 6 and bool(above[b, q, node]))

    mask = tree(ancestors=above, prefix_len=prefix)
    return masked_by_batch(replace(s, q_len=6, kv_len=9), mask, allowed)


CASES = (
    Case(_behind_a_prefix),
    Case(lambda s: _of(s, prefix=s.of(100)), compiled=False),
    Case(_matrices, compiled=False),
)
PICTURE = Picture("tree([-1, 0, 0, 1, 1, 2, 2, 3, 4, 6, 7, 7], prefix_len=12)", 12, 24)

if __name__ == "__main__":
    show(CASES)
