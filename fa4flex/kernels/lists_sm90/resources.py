"""Resources of the roles of the Hopper kernel for listed keys: tensors of one block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cutlass import cute

from fa4flex.kernels.common.transfer import tile_room
from fa4flex.kernels.lists.resources import behind, entry_members, entry_tensors
from fa4flex.kernels.lists_sm90.config import Config


@dataclass(frozen=True)
class Shared:
    """Shared memory: q (64, head_dim, consumer), k (tile_n, head_dim, stage), v (head_dim_v, tile_n, stage);
    and what is known of entries, whose table lies over k and v and what is behind, see lists/resources.py."""

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
