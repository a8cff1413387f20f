"""Resources of the roles of the Hopper kernel for listed keys: tensors of one block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cutlass import AddressSpace, Int32, cute

from fa4flex.kernels.common.transfer import tile_room
from fa4flex.kernels.lists_sm90.config import MOST_UNITED, PLACES, TABLE, UNITED, WORDS, Config


@dataclass(frozen=True)
class Shared:
    """Shared memory: q (64, head_dim, consumer), k (tile_n, head_dim, stage), v (head_dim_v, tile_n, stage);
    keys of a tile, ids (tile_n, 1 or 2, stage), -1 for none; bits of the entries that count, bits (WORDS);
    and, before there are keys, the table of entries over k and v and what lies behind, places (PLACES, 2). Of
    tiles with several rows of the lists, united (MOST_UNITED, 4), see union.py, and in ids the rows' bits."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    ids: cute.Tensor
    bits: cute.Tensor
    places: cute.Tensor
    united: cute.Tensor | None


def entry_members(config: Config) -> dict[str, Any]:
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


def entry_tensors(storage: Any, tiles: cute.Tensor, config: Config) -> dict[str, Any]:
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


def members_of(layouts: tuple[Any, ...], kind: Any, config: Config) -> dict[str, Any]:
    """Members of a block's shared memory, behind barriers."""
    q, k, v = (cute.cosize(layout) for layout in layouts)
    return {
        **entry_members(config),
        "queries": tile_room(kind, q),
        "keys": tile_room(kind, k),
        "values": tile_room(kind, v),
        "behind": behind((k + v) * kind.width // 32),
    }


def shared_of(storage: Any, layouts: tuple[Any, ...], config: Config) -> Shared:
    q, k, v = layouts
    keys = storage.keys.get_tensor(k.outer, swizzle=k.inner)
    return Shared(
        storage.queries.get_tensor(q.outer, swizzle=q.inner),
        keys,
        storage.values.get_tensor(v.outer, swizzle=v.inner),
        **entry_tensors(storage, keys, config),
    )
