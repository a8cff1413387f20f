"""The plan of the kernels that find a mask's tiles. Data only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fa4flex.codegen.analyze.intervals import Intervals, searched
from fa4flex.codegen.analyze.tile_bounds import TileBounds
from fa4flex.codegen.expr import Expr
from fa4flex.kernels.block_tables.config import WARPS, Config, Range
from fa4flex.kernels.plan.problem import Problem
from fa4flex.kernels.plan.target import Target


@dataclass(frozen=True)
class TablesPlan:
    """Tables for a kernel of `problem` on `target`, whose tiles are those of `bounds`. by_keys: its rows are
    tiles of keys, as in backward passes. read: slots of the captured tensors that they are made of. keys:
    intervals of which the ends are written too."""

    target: Target
    problem: Problem
    bounds: TileBounds
    by_keys: bool
    read: tuple[int, ...] = ()
    keys: Intervals | None = None

    module: ClassVar[str] = "fa4flex.kernels.block_tables"

    @property
    def tile(self) -> tuple[int, int]:
        return self.bounds.tile

    @property
    def varies(self) -> tuple[bool, bool]:
        """True if tiles differ by batch entry or sequence, and by head."""
        return self.bounds.ragged or "b" in self.bounds.free, "h" in self.bounds.free

    def config(self) -> Config:
        found = (Range(self.bounds.side(i), *self.bounds.varies(i)) for i in range(len(self.bounds.ranges)))
        spans = 0 if self.keys is None else len(self.keys.spans)
        searched = tuple(x.value for x in self.searched)
        lengths, ordered = self.problem.lengths, self.problem.deterministic
        ranges = tuple(found)
        return Config(
            self.tile, self.by_keys, lengths, self.varies, ranges, spans, searched, ordered, self.read
        )

    @property
    def searched(self) -> tuple[Expr, ...]:
        """Elements that have to be sorted for the intervals to hold."""
        return () if self.keys is None else searched(self.keys)

    def explain(self) -> str:
        rows, columns = ("keys", "queries") if self.by_keys else ("queries", "keys")
        lines = [
            f"Block tables on {self.target.chip}: a warp lists the tiles of {columns} of a tile of {rows}",
            f"tiles of {self.tile[0]} queries and {self.tile[1]} keys, {WARPS} rows per block",
            f"full where {self.bounds.certain}",
            f"empty unless {self.bounds.possible}",
            "pairs are asked one by one in tiles that are neither",
            "made anew where a digest of what they are made of differs from the last one's",
        ]
        if self.bounds.ragged:
            lines.append(f"{self.problem.lengths} lengths: of each sequence, tiles up to its own end")
        if self.keys is not None:
            lines.append(f"ends of rows' keys, where sorted: {', '.join(map(str, self.searched))}")
        if self.problem.deterministic:
            lines.append("both kinds in one list, and how many later rows list a tile: they add to it before")
        lines += [f"r{i}: least and greatest {x} of a tile" for i, x in enumerate(self.bounds.ranges)]
        return "\n".join(lines)
