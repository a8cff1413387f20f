"""Resources of the roles of the Hopper forward kernel for wide heads: tensors of one block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, cute
from cutlass.cute.nvgpu import warpgroup
from cutlass.tensor_utils import LayoutEnum

from fa4flex.kernels.common.transfer import tile_room
from fa4flex.kernels.fwd_wide_sm90.config import BUFFERS, HALVES, ROWS, Config


class Layouts(NamedTuple):
    """Swizzled layouts of q, k, v and probabilities; their last mode counts stages."""

    q: Any
    k: Any
    v: Any
    p: Any


@dataclass(frozen=True)
class Shared:
    """Shared memory: q (64, width, 1), k (tile_n, head_dim, stage), v (head_dim_v, tile_n, stage), p (64,
    tile_n, buffer); maxima and sums (warpgroup, row)."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    p: cute.Tensor
    maxima: cute.Tensor
    sums: cute.Tensor


def layouts_of(config: Config, kind: Any) -> Layouts:
    row, n, d = LayoutEnum.ROW_MAJOR, config.tile_n, config.head_dim
    return Layouts(
        sm90.make_smem_layout_a(row, (ROWS, n, d), kind, 1),
        sm90.make_smem_layout_b(row, (ROWS, n, d), kind, config.kv_stages),
        _values(config, kind),
        sm90.make_smem_layout_a(row, (ROWS, n, n), kind, BUFFERS),
    )


def _values(config: Config, kind: Any) -> Any:
    """Values, of which each warpgroup has whole blocks of columns."""
    atom = sm90.get_smem_layout_atom(LayoutEnum.COL_MAJOR, kind, config.columns)
    shape = config.head_dim_v, config.tile_n, config.kv_stages
    return cute.tile_to_shape(warpgroup.make_smem_layout_atom(atom, kind), shape, order=(1, 0, 2))


def members_of(layouts: Layouts, kind: Any) -> dict[str, Any]:
    """Tiles and statistics of a block's shared memory."""
    names = "queries", "keys", "values", "probabilities"
    tiles = {name: tile_room(kind, cute.cosize(one)) for name, one in zip(names, layouts, strict=True)}
    return tiles | dict.fromkeys(("maxima", "sums"), cute.struct.MemRange[Float32, HALVES * ROWS])


def shared_of(storage: Any, layouts: Layouts) -> Shared:
    rooms = storage.queries, storage.keys, storage.values, storage.probabilities
    tiles = [room.get_tensor(one.outer, swizzle=one.inner) for room, one in zip(rooms, layouts, strict=True)]
    statistics = cute.make_layout((HALVES, ROWS), stride=(ROWS, 1))
    q, k, v, p = tiles
    return Shared(q, k, v, p, storage.maxima.get_tensor(statistics), storage.sums.get_tensor(statistics))
