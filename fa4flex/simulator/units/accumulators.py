"""Where tcgen05.mma keeps D, and A in tensor memory, and what one instruction does to D.

PTX ISA "Data Path Layout Organization" (layouts A, B, D and F, those of dense MMAs without .ws). `cells` is
the tensor memory of one CTA, uint32 [128, 512]; of a pair each CTA executes its own half. Elements of D take
a column each, those of 16 bits its low half. A row of A is 8 columns (32 bytes), low bits first.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fa4flex.simulator.units.errors import invalid
from fa4flex.simulator.units.instruction import InstructionDescriptor
from fa4flex.simulator.units.matmul import Floats, accumulate, multiply_add
from fa4flex.simulator.units.tensor import Cells, Region, region, split_address

A_COLUMNS = 8
_DTYPES = {"f32": np.float32, "f16": np.float16, "s32": np.int32}


@dataclass(frozen=True)
class Part:
    """The elements d[rows, columns] of a CTA's D, in these lanes and in columns from the address on."""

    rows: slice
    columns: slice
    lanes: slice


@lru_cache
def parts(m: int, n: int, cta_group: int, lane: int) -> tuple[Part, ...]:
    """How the D of one CTA, m / cta_group x n, lies in tensor memory from `lane` on. Raises InputError for
    another lane than 0 (or 16, where only half of the lanes are used) and for an M that no layout has."""
    if lane and not (lane == 16 and (m, cta_group) == (64, 1)):
        raise invalid(
            f"tcgen05.mma of M={m}, cta_group::{cta_group} at tensor memory lane {lane}",
            "lane 0; 0 or 16 for M=64",
        )
    match m, cta_group:
        case (128, 1) | (256, 2):
            return (Part(slice(0, 128), slice(0, n), slice(0, 128)),)
        case (128, 2):
            halves = (slice(0, n // 2), slice(n // 2, n))
            return tuple(
                Part(slice(0, 64), half, slice(64 * i, 64 * i + 64)) for i, half in enumerate(halves)
            )
        case (64, 1):
            starts = ((16 * i, 32 * i + lane) for i in range(4))
            return tuple(Part(slice(row, row + 16), slice(0, n), slice(at, at + 16)) for row, at in starts)
    raise invalid(
        f"tcgen05.mma of M={m}, cta_group::{cta_group}", "64 or 128 with cta_group::1, 128 or 256 with ::2"
    )


@dataclass(frozen=True)
class Accumulator:
    """A D in tensor memory: m x n of type f32, f16 or s32 at `address`; m is that of the whole
    instruction."""

    address: int
    m: int
    n: int
    type: str
    cta_group: int

    @classmethod
    @lru_cache(maxsize=1024)
    def of(cls, instruction: InstructionDescriptor, address: int, cta_group: int) -> Accumulator:
        """The D of an instruction at a tensor memory address."""
        return cls(address, instruction.m, instruction.n, instruction.d_type, cta_group)

    @property
    def rows(self) -> int:
        """Rows of one CTA."""
        return self.m // self.cta_group

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        return parts(self.m, self.n, self.cta_group, split_address(self.address)[0])

    def regions(self) -> tuple[Region, ...]:
        """The cells of D in each CTA. Raises InputError where they leave tensor memory."""
        return self._regions

    @cached_property
    def _regions(self) -> tuple[Region, ...]:
        column = split_address(self.address)[1]
        return tuple(_region(part, column, part.columns.stop - part.columns.start) for part in self.parts)

    def read(self, cells: Cells) -> NDArray[Any]:
        """D as float32, float16 or int32 [rows of the CTA, n]; a view where it lies in one piece."""
        places = [self.view(cells, place) for place in self.regions()]
        if len(places) == 1:
            return places[0]
        result = np.empty((self.rows, self.n), places[0].dtype)
        for part, place in zip(self.parts, places):
            result[part.rows, part.columns] = place
        return result

    def write(self, cells: Cells, values: NDArray[Any], disabled: NDArray[np.bool_] | None = None) -> None:
        """Sets D to values [rows of the CTA, n], but in lanes that are `disabled` (bool [128], the
        instruction's disable-output-lane)."""
        for part, place in zip(self.parts, self.regions()):
            np.copyto(
                self.view(cells, place), values[part.rows, part.columns], where=_enabled(place, disabled)
            )

    def view(self, cells: Cells, place: Region) -> NDArray[Any]:
        """The elements in one of the regions, writable."""
        found = cells[place.lanes, place.columns]
        if self.type == "f16":
            return found.view(np.float16)[:, ::2]
        return found.view(_DTYPES[self.type])


def _region(part: Part, column: int, columns: int) -> Region:
    return region(part.lanes.start, part.lanes.stop - part.lanes.start, column, columns)


def multiplicand_regions(address: int, m: int, cta_group: int) -> tuple[Region, ...]:
    """The cells of an A in tensor memory, in each CTA: one instruction's K, 8 columns."""
    lane, column = split_address(address)
    return tuple(_region(part, column, A_COLUMNS) for part in parts(m, A_COLUMNS, cta_group, lane))


def multiplicand(cells: Cells, address: int, m: int, cta_group: int) -> tuple[NDArray[np.uint32], ...]:
    """A from tensor memory, uint32 [m / cta_group, 8]: one, or for M=128 with cta_group::2 two of 64 rows,
    the first for the lower half of D's columns, the second for the upper half (a kernel keeps the same
    values in both)."""
    places = [cells[place.lanes, place.columns] for place in multiplicand_regions(address, m, cta_group)]
    return tuple(places) if (m, cta_group) == (128, 2) else (np.concatenate(places),)


@dataclass(frozen=True)
class Operation:
    """What an instruction adds to its shapes: whether it accumulates (enable-input-d), by how many powers of
    two D is halved first (scale-input-d), integer saturation, lanes of D left alone (bool [128])."""

    accumulate: bool
    halvings: int = 0
    saturate: bool = False
    disabled: NDArray[np.bool_] | None = None


def execute(
    cells: Cells, accumulator: Accumulator, a: tuple[Floats, ...], b: Floats, operation: Operation
) -> None:
    """One CTA's share of tcgen05.mma: D = A B^T + D.

    `a` is float32 [rows of the CTA, K], one or two as multiplicand gives them (negated already where the
    instruction says so); b float32 [n, K], of a pair the rows of CTA 0 before those of CTA 1.
    """
    for i, (part, place) in enumerate(zip(accumulator.parts, accumulator.regions())):
        left, right = a[i % len(a)][part.rows], b[part.columns]
        d = accumulator.view(cells, place)
        if accumulator.type == "f32" and operation.disabled is None:
            accumulate(d, left, right, operation.accumulate, operation.halvings)
            continue
        old = d if operation.accumulate else None
        halvings, saturate = operation.halvings, operation.saturate
        new = multiply_add(left, right, old, accumulator.type, halvings=halvings, saturate=saturate)
        np.copyto(d, new, where=_enabled(place, operation.disabled))


def _enabled(place: Region, disabled: NDArray[np.bool_] | None) -> Any:
    return True if disabled is None else ~disabled[place.lanes, None]
