"""Resources of the roles of the Hopper kernel for listed latent rows: tensors of one block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cutlass import cute

from fa4flex.kernels.lists.resources import behind, entry_members, entry_tensors
from fa4flex.kernels.mla_decode_sm90 import resources as base
from fa4flex.kernels.mla_decode_sm90.resources import Layouts
from fa4flex.kernels.mla_lists_sm90.config import Config


@dataclass(frozen=True)
class Shared(base.Shared):
    """Shared memory of the kernel for latent rows; keys of a tile, ids (128, 1, 1), -1 for none; and what is
    known of entries, see Shared of the kernel for listed keys."""

    ids: cute.Tensor
    bits: cute.Tensor
    places: cute.Tensor
    united: cute.Tensor | None


def members_of(layouts: Layouts, kind: Any, config: Config) -> dict[str, Any]:
    """Members of a block's shared memory, behind barriers."""
    room = {"behind": behind(cute.cosize(layouts.pieces) * kind.width // 32)}
    return {**entry_members(config), **base.members_of(layouts, kind), **room}  # type: ignore[arg-type]


def shared_of(storage: Any, layouts: Layouts, config: Config) -> Shared:
    plain = base.shared_of(storage, layouts)
    return Shared(**vars(plain), **entry_tensors(storage, plain.pieces, config))  # type: ignore[arg-type]
