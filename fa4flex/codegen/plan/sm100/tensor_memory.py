"""Tensor memory: which columns hold what, by query tile."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

from fa4flex.codegen.kernels.fwd_sm100.config import TensorMemory
from fa4flex.codegen.plan.fault import PlanError
from fa4flex.codegen.plan.sm100.tiles import Tiles
from fa4flex.codegen.plan.target import Target

WHOLE = "tensor memory"
"""All of it: allocated before anything is written, and freed after everything is read."""


@dataclass(frozen=True)
class Range:
    """Columns [first, first + count)."""

    name: str
    first: int
    count: int

    @property
    def end(self) -> int:
        return self.first + self.count

    def shares(self, other: Range) -> bool:
        return self.first < other.end and other.first < self.end


@dataclass(frozen=True)
class Columns:
    """The tensor memory of one block, in columns of 32 bits."""

    ranges: tuple[Range, ...]
    capacity: int

    @property
    def names(self) -> tuple[str, ...]:
        """WHOLE too."""
        return (WHOLE, *(r.name for r in self.ranges))

    @property
    def overlaps(self) -> tuple[tuple[str, str], ...]:
        """Pairs of names that share columns."""
        shared = tuple((a.name, b.name) for a, b in combinations(self.ranges, 2) if a.shares(b))
        return (*((WHOLE, r.name) for r in self.ranges), *shared)

    def config(self) -> TensorMemory:
        """First columns by query tile."""
        return TensorMemory(self._firsts("S"), self._firsts("P"), self._firsts("O"))

    def _firsts(self, letter: str) -> tuple[int, ...]:
        return tuple(r.first for r in self.ranges if r.name[0] == letter and not r.name.endswith("late"))

    def explain(self) -> str:
        """One line per range, and the sum."""
        lines = [f"  {r.name:<10}{r.first:>8} .. {r.end:<8}{r.count:>8} columns" for r in self.ranges]
        used = len({column for r in self.ranges for column in range(r.first, r.end)})
        lines.append(f"  {'total':<10}{used:>29} columns of {self.capacity}")
        return "\n".join(lines)

    def check(self) -> None:
        """PlanError where a range is empty or does not fit. Those that overlap are `sharing`'s."""
        for r in self.ranges:
            if r.first < 0 or r.count < 1 or r.end > self.capacity:
                raise PlanError(
                    f"{r.name} in columns {r.first} .. {r.end}", f"some of 0 .. {self.capacity}", "narrow it"
                )


def lay_out_columns(tiles: Tiles, target: Target) -> Columns:
    """Scores, then outputs. Probabilities, two in a column, lie over the second half of their scores."""
    n, dv, early = tiles.tile_n, tiles.head_dim_v, tiles.early_keys
    scores, probabilities, outputs = [], [], []
    for i in range(tiles.q_tiles):
        start = i * n + n // 2
        scores.append(Range(f"S {i}", i * n, n))
        probabilities.append(Range(f"P {i} early", start, early // 2))
        probabilities.append(Range(f"P {i} late", start + early // 2, (n - early) // 2))
        outputs.append(Range(f"O {i}", 2 * n + i * dv, dv))
    return Columns((*scores, *probabilities, *outputs), target.tensor_columns)
