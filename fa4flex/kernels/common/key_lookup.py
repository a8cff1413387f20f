"""Places of a sequence's keys, which lanes of a warp look up by its loader.

Each lane looks up the page of one box of keys, or of a few, for as many tiles as there are lanes for. It asks
one such batch before it looks: what says where keys lie takes as long to come as the copy that waits for it.
What lies past the end of a sequence, or in a page that does not exist, has the number past the last page.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, const_expr, cute, select_

from fa4flex.kernels.common.key_loader import KeyLoader
from fa4flex.kernels.common.keys import KeyTiles, tile_at

LANES = 32

NOTHING = -1
"""Number of the box where there is no key."""


class Order(NamedTuple):
    """Tiles of keys, and the number of the first one that is asked for."""

    keys: KeyTiles
    first: Int32


class Places(NamedTuple):
    """Boxes of a tile: the first lane that has one, and for each part of the tile what lanes have, pages and
    numbers of boxes in these."""

    first: Int32
    parts: tuple[tuple[Int32, Int32], ...]


@dataclass(frozen=True)
class KeyLookup:
    """Boxes of the tiles of a sequence, in the order in which these are asked for.

    loader    of the sequence
    length    keys of the sequence
    rows      keys of a box, which lie next to each other in a page
    tile_n    keys of a tile
    behind    1 where boxes of the tile before the one at hand are asked for, too
    warps     that share a tile, each its own keys
    warp      the number of this one among them

    `now` [box, 2] has a lane's pages, and numbers of boxes in these, for the tiles at hand, `passed` for the
    ones before; `entries` and `asked` [box] are what was read for the tiles after them, and numbers of boxes
    in their pages. `turn` [1] is the number of the tile among those at hand.
    """

    loader: KeyLoader
    length: Int32
    order: Order
    rows: int
    tile_n: int
    behind: int = 0
    warps: int = 1
    warp: Int32 | int = 0
    now: cute.Tensor = field(init=False)
    passed: cute.Tensor | None = field(init=False, default=None)
    entries: cute.Tensor = field(init=False)
    asked: cute.Tensor = field(init=False)
    turn: cute.Tensor = field(init=False)

    def __post_init__(self) -> None:
        parts = -(-self.boxes // LANES)
        entry = self.loader.entry
        shapes = {"now": (parts, 2), "entries": (parts,), "asked": (parts,), "turn": (1,)}
        shapes |= {"passed": (parts, 2)} if self.behind else {}
        for name, shape in shapes.items():
            kind = entry if name == "entries" else Int32
            object.__setattr__(self, name, cute.make_rmem_tensor(shape, kind))

    @property
    def height(self) -> int:
        """Keys of a tile that the warp looks up."""
        return self.tile_n // self.warps

    @property
    def boxes(self) -> int:
        """Number of boxes of a tile that the warp looks up."""
        return self.height // self.rows

    @property
    def tiles(self) -> int:
        """Whose boxes are looked up together."""
        return max(LANES // self.boxes, 1)

    def begin(self) -> None:
        """A warp's: before the first tile."""
        _ask(self, self.order.first)

    def turn_to(self, number: Int32) -> None:
        """A warp's: the tile of this number is at hand."""
        _turn_to(self, number)

    def places(self, behind: int = 0) -> Places:
        """The boxes of the tile at hand, or of the one before."""
        now, turn = self.now, self.turn[0]
        parts = range(cute.size(now, mode=[0]))
        if not behind:
            return Places(turn * self.boxes, tuple((now[part, 0], now[part, 1]) for part in parts))
        assert self.passed is not None
        passed, wrapped = self.passed, turn == 0
        before = select_(wrapped, Int32(self.tiles - 1), turn - 1)
        both = tuple(
            (select_(wrapped, passed[part, 0], now[part, 0]), select_(wrapped, passed[part, 1], now[part, 1]))
            for part in parts
        )
        return Places(before * self.boxes, both)


@cute.jit
def _turn_to(lookup: cutlass.Constexpr[KeyLookup], number: Int32) -> None:
    turn = (number - lookup.order.first) % lookup.tiles
    lookup.turn[0] = turn
    now, passed = lookup.now, lookup.passed
    if turn == 0:
        if const_expr(passed is not None):
            for i in cutlass.range_constexpr(cute.size(now)):
                passed[i] = now[i]
        _look(lookup)
        for i in cutlass.range_constexpr(cute.size(lookup.entries)):
            now[i, 0] = Int32(lookup.entries[i])
            now[i, 1] = lookup.asked[i]
        _ask(lookup, number + lookup.tiles)


@cute.jit
def _ask(lookup: cutlass.Constexpr[KeyLookup], number: Int32) -> None:
    """Start to read the entries of a lane's boxes of the tiles from this one on. They are looked at when they
    are needed, so that nothing waits for them before."""
    loader, lane = lookup.loader, cute.arch.lane_idx()
    place = number + lane // lookup.boxes
    keys = lookup.order.keys
    tile = tile_at(keys, cutlass.min(place, keys.count - 1))
    entries, asked = lookup.entries, lookup.asked
    first = tile * lookup.tile_n + lookup.warp * lookup.height
    for i in cutlass.range_constexpr(cute.size(asked)):
        key = first + (i * LANES + lane) % lookup.boxes * lookup.rows
        entry, box = entries.element_type(loader.pages), Int32(NOTHING)
        if place < keys.count and key < lookup.length:
            entry, box = _entry_and_box(lookup, key)
        entries[i] = entry
        asked[i] = box


def _entry_and_box(lookup: KeyLookup, key: Int32) -> tuple[Any, Int32]:
    entry, slot = lookup.loader.entry_of(key)
    return entry, slot // lookup.rows


@cute.jit
def _look(lookup: cutlass.Constexpr[KeyLookup]) -> None:
    """Entries become pages: that past the last one where there is none."""
    loader, entries, asked = lookup.loader, lookup.entries, lookup.asked
    for i in cutlass.range_constexpr(cute.size(asked)):
        page, box = loader.pages, Int32(0)
        if asked[i] != NOTHING:
            page, box = loader.place(entries[i], asked[i])
        entries[i] = entries.element_type(page)
        asked[i] = box
