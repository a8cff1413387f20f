"""Gain from sorting the tiles of a ragged batch: the time until the last block ends, by list scheduling.

Blocks take tiles from a list, one after another, whoever is done first. A tile takes as long as it visits
tiles of keys, and STARTS more for its first scores and its output. Printed is the time over the least that
any order could take: the mean over blocks, or the longest tile. No GPU is needed.

    python benchmarks/tile_order.py
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterable

BLOCKS, TILE_M, TILE_N, HEADS = 148, 256, 128, 8
STARTS = 1.5
Lengths = list[int]


def tiles(lengths: Lengths, causal: bool) -> list[float]:
    """Cost of each tile of queries, in tiles of keys; sequences one after another, each from its last tile to
    its first, as the kernel finds them under a causal mask, all heads of a tile together."""
    found = []
    for n in lengths:
        for first in reversed(range(0, n, TILE_M)):
            keys = min(first + TILE_M, n) if causal else n
            found += [STARTS + -(-keys // TILE_N)] * HEADS
    return found


def makespan(costs: Iterable[float], blocks: int = BLOCKS) -> float:
    done = [0.0] * blocks
    for cost in costs:
        heapq.heapreplace(done, done[0] + cost)
    return max(done)


def least(costs: list[float], blocks: int = BLOCKS) -> float:
    return max(sum(costs) / blocks, max(costs))


BATCHES: dict[str, Callable[[random.Random], Lengths]] = {
    "one of 16k last, 60 of 256 to 1k": lambda r: [*(r.randint(256, 1024) for _ in range(60)), 16384],
    "lognormal, 64 sequences": lambda r: [min(int(r.lognormvariate(6.5, 1.2)) + 1, 32768) for _ in range(64)],
    "4 of 8k among 128 of 512": lambda r: r.sample([8192] * 4 + [512] * 128, 132),
    "64 of 2k": lambda r: [2048] * 64,
}


def row(name: str, causal: bool, seeds: int = 20) -> tuple[float, float]:
    """(as they come, sorted) over the least time, the mean over random batches."""
    plain = by_work = 0.0
    for seed in range(seeds):
        costs = tiles(BATCHES[name](random.Random(seed)), causal)
        plain += makespan(costs) / least(costs)
        by_work += makespan(sorted(costs, reverse=True)) / least(costs)
    return plain / seeds, by_work / seeds


def main() -> None:
    print(f"{'batch':<36}{'mask':<8}{'as they come':>14}{'sorted':>8}")
    for name in BATCHES:
        for causal in (False, True):
            plain, by_work = row(name, causal)
            print(f"{name:<36}{'causal' if causal else 'none':<8}{plain:>14.2f}{by_work:>8.2f}")


if __name__ == "__main__":
    main()
