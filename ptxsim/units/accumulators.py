"""Layouts of tcgen05.mma's D, and of A in tensor memory, and what one instruction does to D.

PTX ISA "Data Path Layout Organization" (layouts A to G, those of dense MMAs). `cells` is
the tensor memory of one CTA, uint32 [128, 512]; of a pair each CTA executes its own half. Elements of D take
a column each, those of 16 bits its low half. A row of A is 8 columns (32 bytes), low bits first.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptxsim.units.errors import invalid
from ptxsim.units.instruction import InstructionDescriptor
from ptxsim.units.matmul import Floats, accumulate, multiply_add
from ptxsim.units.scales import Quarter
from ptxsim.units.tensor import LANES, Cells, Region, region, split_address

A_COLUMNS = 8
_DTYPES = {"f32": np.float32, "f16": np.float16, "s32": np.int32}


@dataclass(frozen=True)
class Part:
    """The elements d[rows, columns] of a CTA's D, in these lanes and in columns from the address on."""

    rows: slice
    columns: slice
    lanes: slice


@lru_cache
def parts(m: int, n: int, cta_group: int, lane: int, ws: bool = False) -> tuple[Part, ...]:
    """Layout of one CTA's D, m / cta_group x n, in tensor memory from `lane` on; `ws` is that of
    tcgen05.mma.ws. Raises InputError for another lane than 0 (or 16, where only half of the lanes are used)
    and for an M that no layout has."""
    if lane and not (lane == 16 and (m, cta_group, ws) == (64, 1, False)):
        raise invalid(
            f"tcgen05.mma of M={m}, cta_group::{cta_group} at tensor memory lane {lane}",
            "lane 0; 0 or 16 for M=64",
        )
    match m, cta_group, ws:
        case (128, 1, _) | (256, 2, False):
            return (Part(slice(0, 128), slice(0, n), slice(0, 128)),)
        case (128, 2, False) | (64, 1, True):
            return _side_by_side(64, n)
        case (32, 1, True):
            return _side_by_side(32, n)
        case (64, 1, False):
            starts = ((16 * i, 32 * i + lane) for i in range(4))
            return tuple(Part(slice(row, row + 16), slice(0, n), slice(at, at + 16)) for row, at in starts)
    raise invalid(
        f"tcgen05.mma of M={m}, cta_group::{cta_group}", "64 or 128 with cta_group::1, 128 or 256 with ::2"
    )


def _side_by_side(rows: int, n: int) -> tuple[Part, ...]:
    """The same rows again and again down the lanes, each time with the next of the columns."""
    count = LANES // rows
    each = n // count
    return tuple(
        Part(slice(0, rows), slice(each * i, each * (i + 1)), slice(rows * i, rows * (i + 1)))
        for i in range(count)
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
    ws: bool = False

    @classmethod
    @lru_cache(maxsize=1024)
    def of(cls, instruction: InstructionDescriptor, address: int, cta_group: int) -> Accumulator:
        """The D of an instruction at a tensor memory address."""
        return cls(address, instruction.m, instruction.n, instruction.d_type, cta_group, instruction.ws)

    @property
    def rows(self) -> int:
        """Rows of one CTA."""
        return self.m // self.cta_group

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        return parts(self.m, self.n, self.cta_group, split_address(self.address)[0], self.ws)

    def regions(self) -> tuple[Region, ...]:
        """The cells of D in each CTA. Raises InputError where they leave tensor memory."""
        return self._regions

    @cached_property
    def _regions(self) -> tuple[Region, ...]:
        column = split_address(self.address)[1]
        return tuple(_region(part, column) for part in self.parts)

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


def _region(part: Part, column: int) -> Region:
    lanes, columns = part.lanes, part.columns
    return region(lanes.start, lanes.stop - lanes.start, column, columns.stop - columns.start)


def multiplicand_regions(address: int, m: int, cta_group: int, ws: bool = False) -> tuple[Region, ...]:
    """The cells of an A in tensor memory, in each CTA: one instruction's K, 8 columns."""
    lane, column = split_address(address)
    copies = parts(m, A_COLUMNS, cta_group, lane, ws)
    return tuple(_multiplicand_region(part, column) for part in copies)


def _multiplicand_region(part: Part, column: int) -> Region:
    return region(part.lanes.start, part.lanes.stop - part.lanes.start, column, A_COLUMNS)


def multiplicand(
    cells: Cells, address: int, m: int, cta_group: int, ws: bool = False
) -> tuple[NDArray[np.uint32], ...]:
    """A from tensor memory, uint32 [m / cta_group, 8]: one; or, where parts of D's columns have lanes of
    their own, as many as there are parts (a kernel keeps the same values in all)."""
    places = multiplicand_regions(address, m, cta_group, ws)
    found = [cells[place.lanes, place.columns] for place in places]
    rows = {part.rows.start for part in parts(m, A_COLUMNS, cta_group, split_address(address)[0], ws)}
    return tuple(found) if len(rows) < len(found) else (np.concatenate(found),)


@dataclass(frozen=True)
class Operation:
    """Operation of an instruction beside its shapes: whether it accumulates (enable-input-d), by how many
    powers of two D is halved first (scale-input-d), integer saturation, lanes of D left alone (bool
    [128])."""

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


def execute_scaled(cells: Cells, accumulator: Accumulator, quarters: tuple[Quarter, ...], keep: bool) -> None:
    """One CTA's share of an MMA with block scaling, in the quarters that scales.quarters makes: D = A B^T,
    plus D where `keep`."""
    column = split_address(accumulator.address)[1]
    for quarter in quarters:
        columns = quarter.right.shape[0]
        place = region(quarter.lane, quarter.left.shape[0], column, columns)
        d = accumulator.view(cells, place)
        product = np.matmul(quarter.left, quarter.right.T).astype(np.float32)
        d[...] = product + d if keep else product
