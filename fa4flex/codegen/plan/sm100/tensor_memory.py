"""Tensor memory: which columns hold what, by query tile, and that nothing overlaps that lives together."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

from fa4flex.codegen.kernels.fwd_sm100.config import TensorMemory
from fa4flex.codegen.plan.fault import PlanError
from fa4flex.codegen.plan.sm100.tiles import Tiles
from fa4flex.codegen.plan.target import Target


@dataclass(frozen=True)
class Range:
    """Columns [first, first + count). `over` names the range that it may take the place of."""

    name: str
    first: int
    count: int
    over: str | None = None

    @property
    def end(self) -> int:
        return self.first + self.count


@dataclass(frozen=True)
class Columns:
    """The tensor memory of one block, in columns of 32 bits."""

    ranges: tuple[Range, ...]
    capacity: int

    def config(self) -> TensorMemory:
        """First columns by query tile."""
        firsts = (self._firsts(letter) for letter in "SPO")
        return TensorMemory(*firsts)

    def _firsts(self, letter: str) -> tuple[int, ...]:
        return tuple(r.first for r in self.ranges if r.name.startswith(letter))

    def explain(self) -> str:
        return "\n".join(
            f"  {r.name:<10}{r.first:>8} .. {r.end:<8}{r.count:>8} columns"
            + (f"  over {r.over}" if r.over else "")
            for r in self.ranges
        )

    def check(self) -> None:
        for r in self.ranges:
            if r.end > self.capacity:
                raise PlanError(
                    f"{r.name} in columns {r.first} .. {r.end}", f"at most {self.capacity}", "narrow it"
                )
        for a, b in combinations(self.ranges, 2):
            if a.first < b.end and b.first < a.end and a.name != b.over:
                raise PlanError(
                    f"{a.name} and {b.name} overlap in tensor memory",
                    "columns of their own",
                    "move one of them",
                )


def lay_out_columns(tiles: Tiles, target: Target) -> Columns:
    """Scores, then outputs. Probabilities, half as wide, lie over the second half of their scores: the
    softmax has taken those to registers."""
    n, dv, count = tiles.tile_n, tiles.head_dim_v, tiles.q_tiles
    scores = [Range(f"S{i}", i * n, n) for i in range(count)]
    probabilities = [Range(f"P{i}", i * n + n // 2, n // 2, over=f"S{i}") for i in range(count)]
    outputs = [Range(f"O{i}", 2 * n + i * dv, dv) for i in range(count)]
    return Columns((*scores, *probabilities, *outputs), target.tensor_columns)
