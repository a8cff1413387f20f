"""Resources of the roles of the Hopper backward kernel: tensors, barriers and pipelines of one block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass.utils.hopper_helpers as sm90
from cutlass import cute, pipeline
from cutlass.tensor_utils import LayoutEnum

from fa4flex.kernels.common.next_tile import NextTile
from fa4flex.kernels.common.transfer import reordered


@dataclass(frozen=True)
class Shared:
    """Shared memory. q, dout (tile_m, width, stage), k, v (tile_n, width); ds (tile_m, tile_n, 2), and p
    likewise where warpgroups share out columns, float32 (tile_m * tile_n) where they share out products;
    lse2, delta float32 (tile_m, stage); dq float32 (elements of a part, warpgroup, stage)."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    dout: cute.Tensor
    ds: cute.Tensor
    p: cute.Tensor | None
    lse2: cute.Tensor
    delta: cute.Tensor
    dq: cute.Tensor


@dataclass(frozen=True)
class Pipes:
    """q ring (with lse2) and dout ring (with delta); k and v have come. Of persistent blocks: k and v may be
    overwritten; and the next tile of keys."""

    q: pipeline.PipelineTmaAsync
    dout: pipeline.PipelineTmaAsync
    k_full: cute.Pointer
    v_full: cute.Pointer
    keys_empty: cute.Pointer
    next: NextTile


def transposed(tensor: cute.Tensor) -> cute.Tensor:
    """The same shared memory with its first two modes exchanged."""
    modes = [1, 0, *range(2, cute.rank(tensor))]
    return reordered(tensor, modes)


def swizzled_rows(kind: Any, shape: tuple[int, int, int], columns: int) -> Any:
    """A layout of (rows, width, stage), swizzled by rows of `columns` elements."""
    atom = sm90.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, kind, columns)
    return cute.tile_to_shape(sm90.make_smem_layout_atom(atom, kind), shape, order=(0, 1, 2))
