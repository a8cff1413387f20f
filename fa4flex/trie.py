"""The trie of sequences of records: which of their elements are one, and the order of a depth-first walk.

Sequences are sorted; neighbours then share the longest prefixes that there are, and one walk over them finds
every node (as suffix arrays with longest common prefixes do: Kasai et al., 2001). The work is that of sorting
N strings, and a few operations of numpy for each sequence; none is done for single elements in Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Block = tuple[int, Any]
"""The first of some sequences that lie together, and the blocks or the sequence that it is made of."""


@dataclass(frozen=True, eq=False)
class Trie:
    """positions, parents [T] int64, leave [T] int32; index int64: each element's node, in the order given"""

    positions: Array
    parents: Array
    leave: Array
    index: Array

    def arrays(self) -> dict[str, Array]:
        """The fields by name."""
        return vars(self)

    @staticmethod
    def of(rows: Sequence[Array]) -> Trie:
        """rows: uint8 [len, bytes] each; two elements are one where their bytes, and those before, agree."""
        order = _order_of_walk(rows)
        total = sum(map(len, rows))
        leave, parents = np.empty(total, np.int32), np.empty(total, np.int64)
        positions = np.empty(total, np.int64)
        paths: list[Array] = [np.zeros(0, np.int64)] * len(rows)
        path, made, before = np.zeros(0, np.int64), 0, np.zeros((0, 0), np.uint8)
        for row in order:
            shared, length = _common(before, rows[row]), len(rows[row])
            leave[path[shared:]] = made
            end = made + length - shared
            parents[made:end] = np.arange(made - 1, end - 1)
            if end > made:
                parents[made] = path[shared - 1] if shared else -1
            positions[made:end] = np.arange(shared, length)
            path = np.concatenate((path[:shared], np.arange(made, end)))
            paths[row], before, made = path, rows[row], end
        leave[path] = made
        index = np.concatenate([np.zeros(0, np.int64), *paths])
        return Trie(positions[:made].copy(), parents[:made].copy(), leave[:made].copy(), index)


def _common(a: Array, b: Array) -> int:
    """Length of the longest common prefix."""
    shorter = min(len(a), len(b))
    if not shorter:
        return 0
    width = a.shape[1]
    differ = a[:shorter].ravel() != b[:shorter].ravel()
    first = int(differ.argmax())
    return first // width if differ[first] else shorter


def _order_of_walk(rows: Sequence[Array]) -> list[int]:
    """Rows such that those with a common prefix lie together, each group where its first row comes."""
    keys = [row.tobytes() for row in rows]
    in_order = sorted(range(len(rows)), key=keys.__getitem__)
    shared = [_common(rows[a], rows[b]) for a, b in pairwise(in_order)]
    groups: list[tuple[int, list[Block]]] = [(0, [])]  # that are open, by the length of what they share
    for row, depth in zip(in_order, [*shared, 0], strict=False):
        block: Block = row, row
        while groups[-1][0] > depth:
            _, blocks = groups.pop()
            block = _together([*blocks, block])
        if groups[-1][0] < depth:
            groups.append((depth, []))
        groups[-1][1].append(block)
    return _flat(_together(groups[0][1])) if rows else []


def _together(blocks: list[Block]) -> Block:
    blocks = sorted(blocks, key=lambda block: block[0])
    return blocks[0][0], blocks


def _flat(block: Block) -> list[int]:
    rows, left = [], [block]
    while left:
        _, parts = left.pop()
        if isinstance(parts, list):
            left.extend(reversed(parts))
        else:
            rows.append(parts)
    return rows
