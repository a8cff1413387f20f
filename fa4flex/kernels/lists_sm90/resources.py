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


def members_of(layouts: tuple[Any, ...], kind: Any, config: Config) -> dict[str, Any]:
    """Members of a block's shared memory, behind barriers."""
    q, k, v = (cute.cosize(layout) for layout in layouts)
    return {
        "ids": cute.struct.MemRange[Int32, config.tile_n * config.told * config.kv_stages],
        "bits": cute.struct.MemRange[Int32, WORDS],
        "united": cute.struct.MemRange[Int32, UNITED * (config.united > 1)],
        "queries": tile_room(kind, q),
        "keys": tile_room(kind, k),
        "values": tile_room(kind, v),
        "behind": cute.struct.MemRange[Int32, max(TABLE - (k + v) * kind.width // 32, 0)],
    }


def shared_of(storage: Any, layouts: tuple[Any, ...], config: Config) -> Shared:
    q, k, v = layouts
    keys = storage.keys.get_tensor(k.outer, swizzle=k.inner)
    table = cute.make_ptr(Int32, keys.iterator.toint(), AddressSpace.smem, assumed_align=16)
    united = None
    if config.united > 1:
        united = storage.united.get_tensor(cute.make_layout((MOST_UNITED, UNITED // MOST_UNITED)))
    return Shared(
        storage.queries.get_tensor(q.outer, swizzle=q.inner),
        keys,
        storage.values.get_tensor(v.outer, swizzle=v.inner),
        storage.ids.get_tensor(cute.make_layout((config.tile_n, config.told, config.kv_stages))),
        storage.bits.get_tensor(cute.make_layout(WORDS)),
        cute.make_tensor(table, cute.make_layout((PLACES, 2))),
        united,
    )
