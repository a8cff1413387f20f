"""Resources of the roles of the Hopper backward kernel: tensors of one block, products of one warpgroup and
their operands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass.utils.hopper_helpers as sm90
from cutlass import Int32, cute
from cutlass.tensor_utils import LayoutEnum

from fa4flex.kernels.bwd_sm90.config import Config, swizzle
from fa4flex.kernels.common.backward import KeyWork
from fa4flex.kernels.common.transfer import head_of, reordered


class Layouts(NamedTuple):
    """Swizzled shared-memory layouts of q, dout (by stage), k, v, and of ds and p (queries, keys)."""

    q: Any
    dout: Any
    k: Any
    v: Any
    ds: Any
    p: Any


@dataclass(frozen=True)
class Shared:
    """Shared memory. q, dout (tile_m, width, stage), k, v (keys, width); ds (tile_m, keys, 2), and p
    likewise where warpgroups share out columns, float32 (tile_m * keys) where they share out products;
    lse2, delta float32 (tile_m, stage); dq float32 (elements of a part, part, stage). Of a pair of CTAs, ds
    has two more stages, for the other's; and k_peer, columns of its keys, lies where v was."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    dout: cute.Tensor
    ds: cute.Tensor
    p: cute.Tensor | None
    lse2: cute.Tensor
    delta: cute.Tensor
    dq: cute.Tensor
    k_peer: cute.Tensor | None = None


@dataclass(frozen=True)
class Mmas:
    """Tiled products of one warpgroup: S' = K Q' and dP' = V dO'; dV += P' dO; dK += dS' Q; dQ = dS K, by
    parts."""

    scores: cute.TiledMma
    dprob: cute.TiledMma
    dv: cute.TiledMma
    dk: cute.TiledMma
    dq: tuple[cute.TiledMma, ...]


@dataclass(frozen=True)
class Operands:
    """Shared-memory descriptors, q and dout by stage, and the accumulators that outlive a tile. for_dq: dS,
    by stage, and K, for each product for dQ. p_t and ds_t by stage, where P' and dS' are not operands in
    registers."""

    k: cute.Tensor
    q: cute.Tensor
    v: cute.Tensor
    dout: cute.Tensor
    dout_t: cute.Tensor
    q_t: cute.Tensor
    for_dq: tuple[tuple[cute.Tensor, cute.Tensor], ...]
    dv: cute.Tensor
    dk: cute.Tensor
    p_t: cute.Tensor | None = None
    ds_t: cute.Tensor | None = None


def queries_of(config: Config, tensor: cute.Tensor, work: KeyWork, h: Int32) -> cute.Tensor:
    """A head of q or dO, (tokens, width), as TMA has it."""
    return head_of(tensor, config.ragged, work.queries(h))


def keys_of(config: Config, tensor: cute.Tensor, work: KeyWork, head: Int32) -> cute.Tensor:
    """A head of k or v, or of dK or dV, likewise."""
    return head_of(tensor, config.ragged, work.keys(head))


def transposed(tensor: cute.Tensor) -> cute.Tensor:
    """The same shared memory with its first two modes exchanged."""
    modes = [1, 0, *range(2, cute.rank(tensor))]
    return reordered(tensor, modes)


def dq_rows(config: Config, memory: cute.Tensor, kind: Any) -> cute.Tensor:
    """(rows, columns) of a warpgroup's part of dQ in shared memory, where it is stored as it is."""
    ((rows, columns),) = config.dq_shapes
    layout = swizzled_rows(kind, (rows, columns, 1), swizzle(columns, columns))
    staged = cute.make_tensor(cute.recast_ptr(memory.iterator, layout.inner, dtype=kind), layout.outer)
    return staged[None, None, 0]


def swizzled_rows(kind: Any, shape: tuple[int, int, int], columns: int) -> Any:
    """A layout of (rows, width, stage), swizzled by rows of `columns` elements."""
    atom = sm90.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, kind, columns)
    return cute.tile_to_shape(sm90.make_smem_layout_atom(atom, kind), shape, order=(0, 1, 2))
