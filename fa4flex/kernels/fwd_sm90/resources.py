"""Resources of the roles of the Hopper forward kernel: tensors of one block, and stages of queries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from cutlass import Int32, cute


class Layouts(NamedTuple):
    """Swizzled shared-memory layouts of q, k, v and out; their last mode counts warpgroups, stages, or for q
    the stages of one warpgroup after those of another."""

    q: Any
    k: Any
    v: Any
    out: Any


@dataclass(frozen=True)
class Shared:
    """Shared memory: q (64, width, stage of a warpgroup), out (64, width, warpgroup), k (tile_n, head_dim,
    stage), v (head_dim_v, tile_n, stage)."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    out: cute.Tensor


@dataclass(frozen=True)
class Turn:
    """One use of a stage: the stage, counted over a warpgroup's queries, and the phase of its barriers."""

    stage: Int32
    phase: Int32


@dataclass(frozen=True)
class QueryRing:
    """Stages of each warpgroup's queries. Of two, what a role carries from tile to tile ends with whether
    both were used an odd number of times."""

    stages: int

    def open(self, states: tuple) -> tuple:
        """Values that a role carries into the first tile."""
        return states if self.stages == 1 else (*states, Int32(0))

    def turn(self, phase: Int32, states: tuple) -> Turn:
        """The turn of a block's tile, whose number is even or odd as `phase` is."""
        return Turn(Int32(0), phase) if self.stages == 1 else Turn(phase, states[-1])

    def carry(self, phase: Int32, states: tuple, new: tuple) -> tuple:
        """Values that a role carries into the next tile: `new` states, and that of the queries."""
        return new if self.stages == 1 else (*new, states[-1] ^ phase)

    def place(self, group: Any, turn: Turn) -> Any:
        """Place of a warpgroup's queries among all in shared memory, and of their barriers."""
        return group if self.stages == 1 else group * self.stages + turn.stage
