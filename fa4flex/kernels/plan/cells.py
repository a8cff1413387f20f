"""Cells of queries, for each of which a choice among candidates is settled once. Data only.

One axis, so that a few launches serve calls of all lengths. Where candidates differ in rows past the end, the
best one goes up and down with the length, and each change is one more launch to make for whoever has calls on
both sides of it. So changes cost something, and the cheapest sequence of candidates is found by dynamic
programming (Viterbi 1967), as paths of hidden states are.
"""

from __future__ import annotations

from collections.abc import Sequence

CELLS = (*range(64, 641, 64), 768, 1024, 1536, 2048, 3072, 4096, 8192)
"""Ends of the cells, of which the last one stands for all beyond."""

CHANGE = 0.015
"""Price of a change between two cells next to each other, as a share of the time of a call, summed over the
cells: a range in the middle must save twice as much in all of its cells together, beyond what is believed."""


def cell_of(q_len: int) -> int:
    """Number of the cell in which so many queries lie."""
    return next((i for i, end in enumerate(CELLS) if q_len <= end), len(CELLS) - 1)


def cheapest_path(losses: Sequence[Sequence[float]], change: float = CHANGE) -> tuple[int, ...]:
    """The candidate of each cell: the sequence whose losses and changes are least together. losses: by cell
    and candidate."""
    costs, before = list(losses[0]), []
    for row in losses[1:]:
        least = min(range(len(costs)), key=costs.__getitem__)
        steps = [i if cost <= costs[least] + change else least for i, cost in enumerate(costs)]
        costs = [costs[j] + change * (i != j) + row[i] for i, j in enumerate(steps)]
        before.append(steps)
    path = [min(range(len(costs)), key=costs.__getitem__)]
    for steps in reversed(before):
        path.append(steps[path[-1]])
    return tuple(reversed(path))


def extents_around(path: Sequence[int], cell: int) -> tuple[int, int | None]:
    """Queries of the cells around this one that have its candidate, from and to; no end of the last cell."""
    first = last = cell
    while first and path[first - 1] == path[cell]:
        first -= 1
    while last + 1 < len(path) and path[last + 1] == path[cell]:
        last += 1
    return CELLS[first - 1] + 1 if first else 0, CELLS[last] if last + 1 < len(path) else None
