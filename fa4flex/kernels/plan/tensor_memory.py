"""Tensor memory: which columns hold what."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

from fa4flex.kernels.plan.errors import PlanError

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
