"""Shared memory of a block for what is known of entries and of the keys of tiles."""

from __future__ import annotations

from typing import Any, Protocol

from cutlass import AddressSpace, Int32, cute

from fa4flex.kernels.lists.config import MOST_UNITED, PLACES, TABLE, UNITED, WORDS, ListsConfig


class Shared(Protocol):
    """Tensors in shared memory: keys of a tile, ids (tile_n, 1 or 2, stage), -1 for none; bits of the entries
    that count, bits (WORDS); and, before there are keys, the table of entries over the first tiles and what
    lies behind them, places (PLACES, 2). Of tiles with several rows of the lists, united (MOST_UNITED, 4),
    see union.py, and in ids the rows' bits."""

    @property
    def ids(self) -> cute.Tensor: ...

    @property
    def bits(self) -> cute.Tensor: ...

    @property
    def places(self) -> cute.Tensor: ...

    @property
    def united(self) -> cute.Tensor | None: ...


class SharedTiles(Shared, Protocol):
    """The same, with tiles of K and V."""

    @property
    def k(self) -> cute.Tensor: ...

    @property
    def v(self) -> cute.Tensor: ...


def entry_members(config: ListsConfig) -> dict[str, Any]:
    """Members of a block's shared memory for what is known of entries and of the keys of tiles."""
    return {
        "ids": cute.struct.MemRange[Int32, config.tile_n * config.told * config.kv_stages],
        "bits": cute.struct.MemRange[Int32, WORDS],
        "united": cute.struct.MemRange[Int32, UNITED * (config.united > 1)],
    }


def behind(numbers: int) -> Any:
    """Room for the rest of the table of entries, which begins where tiles of so many 32-bit numbers will
    be."""
    return cute.struct.MemRange[Int32, max(TABLE - numbers, 0)]


def entry_tensors(storage: Any, tiles: cute.Tensor, config: ListsConfig) -> dict[str, Any]:
    """ids, bits, places and united of a block, see Shared. tiles: over which the table of entries
    begins."""
    table = cute.make_ptr(Int32, tiles.iterator.toint(), AddressSpace.smem, assumed_align=16)
    united = None
    if config.united > 1:
        united = storage.united.get_tensor(cute.make_layout((MOST_UNITED, UNITED // MOST_UNITED)))
    return {
        "ids": storage.ids.get_tensor(cute.make_layout((config.tile_n, config.told, config.kv_stages))),
        "bits": storage.bits.get_tensor(cute.make_layout(WORDS)),
        "places": cute.make_tensor(table, cute.make_layout((PLACES, 2))),
        "united": united,
    }
