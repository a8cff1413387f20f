"""Tensor memory: which columns hold what."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations, combinations_with_replacement

from fa4flex.kernels.plan.errors import PlanError

WHOLE = "tensor memory"
"""All of it: allocated before anything is written, and freed after everything is read."""


@dataclass(frozen=True)
class Range:
    """Columns [first, first + count); or as many in each of `stages`, which begin `apart` columns apart and
    which contents take one after the other."""

    name: str
    first: int
    count: int
    stages: int = 1
    apart: int = 0

    @property
    def end(self) -> int:
        return self.first + self.apart * (self.stages - 1) + self.count

    @property
    def columns(self) -> tuple[set[int], ...]:
        """Columns by stage."""
        firsts = (self.first + stage * self.apart for stage in range(self.stages))
        return tuple(set(range(first, first + self.count)) for first in firsts)

    def shares(self, other: Range) -> bool:
        return any(mine & others for mine in self.columns for others in other.columns)

    def shares_by_stage(self, other: Range) -> bool:
        """True if nothing is shared but by the same stage of both."""
        pairs = [(i, j) for i in range(self.stages) for j in range(other.stages)]
        return self.stages == other.stages and not any(
            self.columns[i] & other.columns[j] for i, j in pairs if i != j
        )


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

    def explain(self) -> str:
        """One line per range, and the sum."""
        lines = [
            f"  {r.name:<10}{r.first + stage * r.apart:>8} .. {r.first + stage * r.apart + r.count:<8}"
            f"{r.count:>8} columns"
            for r in self.ranges
            for stage in range(r.stages)
        ]
        used = len(set().union(*(columns for r in self.ranges for columns in r.columns)))
        lines.append(f"  {'total':<10}{used:>29} columns of {self.capacity}")
        return "\n".join(lines)

    def check(self) -> None:
        """PlanError where a range is empty or does not fit, or where stages share columns with other stages.
        Others that overlap are `sharing`'s."""
        for r in self.ranges:
            if r.first < 0 or r.count < 1 or r.end > self.capacity:
                raise PlanError(
                    f"{r.name} in columns {r.first} .. {r.end}", f"some of 0 .. {self.capacity}", "narrow it"
                )
        for a, b in combinations_with_replacement(self.ranges, 2):
            if max(a.stages, b.stages) > 1 and a.shares(b) and not a.shares_by_stage(b):
                raise PlanError(
                    f"a stage of {a.name} that shares columns with another one of {b.name}",
                    "what is staged to share columns stage by stage",
                    "move one of them",
                )
