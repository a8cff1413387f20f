"""Shared memory: named regions, where they lie, which of them share bytes, and that they fit.

Queries and output are kept in slices of 64 rows, one per consumer warpgroup, keys and values in stages. Each
of these is stored in blocks of columns: 64 wide (swizzle of 128 bytes) where the width is a multiple of 64,
else 32 wide.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from fa4flex.errors import UnsupportedError
from fa4flex.kernels.plan.errors import PlanError
from fa4flex.kernels.plan.target import Target

ALIGNMENT = 1024
"""Bytes that tiles are aligned to: a swizzle pattern of 128 bytes repeats every 1024, and tiles must start on
one."""

BARRIER = 8
"""Bytes of one mbarrier."""

ANSWER = 16
"""Bytes of the hardware's answer to a request for another block's tile."""

NUMBER = 4
"""Bytes of a number: of the next tile, of the first column of tensor memory, or of a row's scale."""

ALIGNMENTS = {
    **dict.fromkeys(("barriers", "freed"), BARRIER),
    "next": ANSWER,
    **dict.fromkeys(("columns", "scales", "finals", "kept", "asked"), NUMBER),
    **dict.fromkeys(("ids", "bits", "united", "behind"), NUMBER),
    **dict.fromkeys(("lse2", "delta"), 128),
    **dict.fromkeys(("statistics", "channels"), 16),
}
"""Bytes that regions without tiles are aligned to, by name."""


@dataclass(frozen=True)
class Region:
    """[offset, offset + size) bytes. `alias` names the region whose bytes this one takes over."""

    name: str
    offset: int
    size: int
    alignment: int
    alias: str | None = None

    @property
    def end(self) -> int:
        return self.offset + self.size


@dataclass(frozen=True)
class Memory:
    """The shared memory of one block."""

    regions: tuple[Region, ...]
    capacity: int

    @property
    def total(self) -> int:
        return max((region.end for region in self.regions), default=0)

    def __getitem__(self, name: str) -> Region:
        return next(region for region in self.regions if region.name == name)

    def explain(self) -> str:
        """One line per region, and the sum."""
        lines = [
            f"  {r.name:<10}{r.offset:>8} .. {r.end:<8}{r.size:>8} B" + (f"  in {r.alias}" if r.alias else "")
            for r in self.regions
        ]
        return "\n".join([*lines, f"  {'total':<10}{self.total:>29} B of {self.capacity}"])

    def check(self) -> None:
        """PlanError where regions overlap or lie badly, UnsupportedError where they do not fit."""
        for region in self.regions:
            if region.offset % region.alignment:
                raise PlanError(
                    f"region {region.name} at {region.offset}",
                    f"a multiple of {region.alignment}",
                    f"round the offset up\n{self.explain()}",
                )
            if region.alias is not None:
                self._check_alias(region)
        owners = sorted((r for r in self.regions if r.alias is None), key=lambda r: r.offset)
        for before, after in pairwise(owners):
            if after.offset < before.end:
                raise PlanError(
                    f"regions {before.name} and {after.name} overlap",
                    f"{after.name} at {before.end} or later",
                    f"move it, or name it an alias\n{self.explain()}",
                )
        if self.total > self.capacity:
            raise UnsupportedError(
                f"tiles that need {self.total} bytes of shared memory\n{self.explain()}",
                f"at most {self.capacity} bytes",
                "use fewer keys or queries per tile, or leave Schedule.tile at None",
            )

    def _check_alias(self, region: Region) -> None:
        owners = [r for r in self.regions if r.name == region.alias and r.alias is None]
        inside = owners and owners[0].offset <= region.offset and region.end <= owners[0].end
        if not inside:
            raise PlanError(
                f"region {region.name} at {region.offset} .. {region.end} is said to lie in {region.alias}",
                "an owning region that contains it",
                f"give it bytes of its own\n{self.explain()}",
            )


SWIZZLES = (128, 64, 32)
"""Bytes of a row that swizzle patterns have."""


def column_block(width: int, itemsize: int = 2) -> int:
    """Columns of one block of a tile this wide: what a TMA copy moves at once."""
    return next(x for x in SWIZZLES if width * itemsize % x == 0) // itemsize


def block_bytes(width: int) -> int:
    """Bytes of a row in one block of columns of a tile this wide, of 16-bit elements."""
    return 2 * column_block(width)


def tile_bytes(rows: int, width: int, itemsize: int) -> int:
    return rows * width * itemsize


def lay_out(sizes: dict[str, int], alias: dict[str, str], barrier_count: int, target: Target) -> Memory:
    """Barriers, then the regions of `sizes` in order; those in `alias` start where the named one does."""
    regions = [Region("barriers", 0, barrier_count * BARRIER, ALIGNMENTS["barriers"])]
    for name, size in sizes.items():
        owner = next((r for r in regions if r.name == alias.get(name)), None)
        alignment = ALIGNMENTS.get(name, ALIGNMENT)
        start = owner.offset if owner else -(-max(r.end for r in regions) // alignment) * alignment
        regions.append(Region(name, start, size, alignment, owner.name if owner else None))
    return Memory(tuple(regions), target.shared_memory)
