"""Tensor memory: 128 lanes x 512 columns of 32 bits, and how tcgen05.ld, .st and .cp move data through it.

PTX ISA "Tensor Memory Addressing", "Data Movement Shape" (its figures, which CUTLASS spells as layouts),
"Packing and Unpacking", "tcgen05.ld", "tcgen05.st", "tcgen05.cp". Tensor memory is an array `cells`, uint32
[128, 512], contiguous.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from ptxsim.units.errors import invalid, unmodelled

LANES, COLUMNS = 128, 512
WARP = 32
Cells = NDArray[np.uint32]
Indices = NDArray[np.intp]


def split_address(address: int) -> tuple[int, int]:
    """The lane (bits 16-31) and column (bits 0-15) of a tensor memory address."""
    return address >> 16, address & 0xFFFF


@dataclass(frozen=True)
class Region:
    """A rectangle of cells: cells[region.lanes, region.columns]."""

    lanes: slice
    columns: slice


def region(lane: int, lanes: int, column: int, columns: int) -> Region:
    """Raises InputError where it leaves tensor memory."""
    if min(lane, column) < 0 or lane + lanes > LANES or column + columns > COLUMNS:
        raise invalid(
            f"tensor memory lanes {lane} to {lane + lanes - 1}, columns {column} to {column + columns - 1}",
            f"{LANES} lanes and {COLUMNS} columns",
        )
    return Region(slice(lane, lane + lanes), slice(column, column + columns))


# --- tcgen05.ld and tcgen05.st ------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Transfer:
    """Cells that one tcgen05.ld or .st moves. `lanes` and `columns` are those of the cell for [register, lane
    of the warp], relative to the address: intp. Packed, a register holds the low halves of that cell and of
    the next one."""

    lanes: Indices
    columns: Indices
    packed: bool
    height: int
    width: int
    """Columns of one access; all of them but for 16x32bx2, which makes a second one `split` columns on."""
    split: int | None = None

    @property
    def registers(self) -> int:
        return self.lanes.shape[0]

    @cached_property
    def _flat(self) -> Indices:
        return self.lanes * COLUMNS + self.columns

    @cached_property
    def _straight(self) -> bool:
        """True if lanes of the warp and registers are lanes and columns of the cells, as in .32x32b."""
        register, lane = np.ogrid[: self.registers, :WARP]
        return not self.packed and bool((self.lanes == lane).all() and (self.columns == register).all())

    @lru_cache(maxsize=4096)  # noqa: B019 - the tables are few and live on
    def regions(self, address: int) -> tuple[Region, ...]:
        """The cells it touches. Raises InputError where they leave tensor memory."""
        lane, column = split_address(address)
        starts = (column,) if self.split is None else (column, column + self.split)
        return tuple(region(lane, self.height, start, self.width) for start in starts)

    def load(self, cells: Cells, address: int) -> NDArray[np.uint32]:
        """tcgen05.ld: uint32 [registers, 32 lanes]."""
        self.regions(address)
        lane, column = split_address(address)
        found = cells.reshape(-1)[lane * COLUMNS + column :]
        if self._straight:
            return cells[lane : lane + self.height, column : column + self.width].T.copy()
        if not self.packed:
            return found.take(self._flat)
        return (found.take(self._flat) & np.uint32(0xFFFF)) | (found.take(self._flat + 1) << np.uint32(16))

    def store(self, cells: Cells, address: int, registers: NDArray[np.uint32]) -> None:
        """tcgen05.st of uint32 [registers, 32 lanes]. Unpacking leaves the upper halves of the cells
        alone."""
        self.regions(address)
        lane, column = split_address(address)
        found = cells.reshape(-1)[lane * COLUMNS + column :]
        if not self.packed:
            found[self._flat] = registers
            return
        halves = found.view(np.uint16)
        halves[2 * self._flat] = registers & np.uint32(0xFFFF)
        halves[2 * self._flat + 2] = registers >> np.uint32(16)


_REGISTERS = {"32x32b": 1, "16x64b": 1, "16x32bx2": 1, "16x128b": 2, "16x256b": 4}
"""For .x1; the others have as many times more."""
_WORDS = {"32x32b": 1, "16x64b": 2, "16x32bx2": 1, "16x128b": 4, "16x256b": 8}
"""32-bit words of each lane in one access of .x1."""


@lru_cache
def transfer(shape: str, number: int, packed: bool = False, split: int | None = None) -> Transfer:
    """The transfer of .`shape`.x`number`, with .pack::16b or .unpack::16b where `packed`; `split` is the
    immHalfSplitoff of 16x32bx2. Raises UnsupportedError for an unknown shape, InputError for an illegal
    number."""
    if shape not in _REGISTERS:
        raise unmodelled(f"tcgen05.ld or st of shape {shape}", ", ".join(_REGISTERS))
    registers = _REGISTERS[shape] * number
    if (
        number not in (1, 2, 4, 8, 16, 32, 64, 128)
        or registers > 128
        or (split is None) == (shape == "16x32bx2")
    ):
        raise invalid(
            f"tcgen05.ld or st .{shape}.x{number} with split {split}",
            "at most 128 registers; a split for 16x32bx2",
        )
    register, thread = np.ogrid[:registers, :WARP]
    match shape:
        case "32x32b":
            lanes, words = thread, register
        case "16x32bx2":
            lanes, words = thread % 16, register
        case "16x64b":
            lanes, words = thread // 4 + 8 * (thread % 2), thread // 2 % 2 + 2 * register
        case "16x128b":
            lanes, words = thread // 4 + 8 * (register % 2), thread % 4 + 4 * (register // 2)
        case _:
            lanes = thread // 4 + 8 * (register // 2 % 2)
            words = register % 2 + 2 * (thread % 4) + 8 * (register // 4)
    per_word = 2 if packed else 1
    columns = per_word * words + (split or 0) * (thread // 16)
    lanes, columns = (np.ascontiguousarray(table) for table in np.broadcast_arrays(lanes, columns))
    return Transfer(lanes, columns, packed, int(shape[:2]), _WORDS[shape] * number * per_word, split)


# --- tcgen05.cp ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Copy:
    """Cells that one tcgen05.cp writes: row r of the source, `columns` words, to the lanes lanes[:, r]
    relative to the address; intp [replicas, rows]. The source is a K-major operand of `rows` rows of
    `columns` 32-bit words."""

    lanes: Indices
    columns: int

    @property
    def rows(self) -> int:
        return self.lanes.shape[1]

    def store(self, cells: Cells, address: int, source: NDArray[np.uint32]) -> None:
        """Writes uint32 [rows, columns], once for each replica. Raises InputError where it leaves tensor
        memory."""
        lane, column = split_address(address)
        target = region(lane, int(self.lanes.max()) + 1, column, self.columns)
        cells[lane + self.lanes, target.columns] = source

    def regions(self, address: int) -> tuple[Region, ...]:
        """The cells it writes, a rectangle for every run of lanes. Raises InputError where they leave tensor
        memory."""
        lane, column = split_address(address)
        touched = np.unique(self.lanes)
        runs = np.split(touched, np.nonzero(np.diff(touched) > 1)[0] + 1)
        return tuple(region(lane + int(run[0]), len(run), column, self.columns) for run in runs)


@lru_cache
def copy(shape: str, multicast: str | None = None) -> Copy:
    """The copy of .`shape`.`multicast` ("warpx4", "warpx2::02_13", "warpx2::01_23" or None). Raises
    UnsupportedError for other combinations; decompression is not modelled."""
    row = np.arange(128, dtype=np.intp)
    match shape, multicast:
        case "128x256b", None:
            return Copy(row[None], 8)
        case "128x128b", None:
            return Copy(row[None], 4)
        case "4x256b", None:
            return Copy(32 * row[None, :4], 8)
        case "64x128b", "warpx2::02_13":
            return Copy(row[:64] + 64 * row[:2, None], 4)
        case "64x128b", "warpx2::01_23":
            return Copy(row[:64] // 32 * 64 + row[:64] % 32 + 32 * row[:2, None], 4)
        case "32x128b", "warpx4":
            return Copy(row[:32] + 32 * row[:4, None], 4)
    raise unmodelled(
        f"tcgen05.cp.{shape}{'.' + multicast if multicast else ''}",
        "128x256b, 128x128b, 4x256b, 64x128b.warpx2::02_13 and ::01_23, 32x128b.warpx4",
    )
