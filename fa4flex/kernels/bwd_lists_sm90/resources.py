"""Resources of the roles of the Hopper backward kernel for listed keys: tensors of one block, products of the
consumer warpgroup and their operands."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from fa4flex.kernels.bwd_lists_sm90.config import KEYS, Config
from fa4flex.kernels.bwd_sm90.resources import swizzled_rows, transposed
from fa4flex.kernels.common.products import tiled_product
from fa4flex.kernels.common.transfer import tile_room
from fa4flex.kernels.lists.config import ROWS
from fa4flex.kernels.lists.resources import behind, entry_members, entry_tensors
from fa4flex.kernels.plan.memory import column_block


class Layouts(NamedTuple):
    """Swizzled shared memory, rows of their tensors: q and dout (64 rows, width, 1), k and v (64 keys, width,
    stage), p and ds (64 rows, 64 keys, 1)."""

    q: Any
    dout: Any
    k: Any
    v: Any
    p: Any
    ds: Any


def layouts_of(config: Config, kind: Any) -> Layouts:
    def rows(count: int, width: int, stages: int = 1) -> Any:
        return swizzled_rows(kind, (count, width, stages), column_block(width))

    d, dv = config.head_dim, config.head_dim_v
    return Layouts(
        rows(ROWS, d),
        rows(ROWS, dv),
        rows(KEYS, d, config.kv_stages),
        rows(KEYS, dv, config.v_stages),
        rows(ROWS, KEYS),
        rows(ROWS, KEYS),
    )


@dataclass(frozen=True)
class Shared:
    """Shared memory, as Layouts say it, and as the forward kernel has it: ids, bits, united, and the table of
    entries, which lies over k, v, p and ds and what is behind them."""

    q: cute.Tensor
    dout: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    p: cute.Tensor
    ds: cute.Tensor
    ids: cute.Tensor
    bits: cute.Tensor
    places: cute.Tensor
    united: cute.Tensor | None


def members_of(layouts: Layouts, kind: Any, config: Config) -> dict[str, Any]:
    """Members of a block's shared memory, behind barriers."""
    rooms = {name: tile_room(kind, cute.cosize(x)) for name, x in zip(Layouts._fields, layouts, strict=True)}
    over = sum(cute.cosize(x) for x in layouts[2:]) * kind.width // 32
    return {**entry_members(config), **rooms, "behind": behind(over)}


def shared_of(storage: Any, layouts: Layouts, config: Config) -> Shared:
    tiles = {
        name: getattr(storage, name).get_tensor(layout.outer, swizzle=layout.inner)
        for name, layout in zip(Layouts._fields, layouts, strict=True)
    }
    one = {name: tiles[name][None, None, 0] for name in ("q", "dout", "p", "ds")}
    return Shared(**{**tiles, **one}, **entry_tensors(storage, tiles["k"], config))


@dataclass(frozen=True)
class Mmas:
    """Tiled products of the warpgroup: S = Q K' and dP = dO V'; dQ += dS K; dV = P' dO and dK = dS' Q."""

    scores: cute.TiledMma
    dq: cute.TiledMma
    dv: cute.TiledMma
    dk: cute.TiledMma


def mmas_of(config: Config, kind: Any) -> Mmas:
    k_major, mn_major = OperandMajorMode.K, OperandMajorMode.MN
    product = partial(tiled_product, kind)
    return Mmas(
        product((k_major, k_major), KEYS),
        product((k_major, mn_major), config.head_dim, warpgroup.OperandSource.RMEM),
        product((mn_major, mn_major), config.head_dim_v),
        product((mn_major, mn_major), config.head_dim),
    )


@dataclass(frozen=True)
class Products:
    """Products with descriptors of their operands, k, v and k_t by stage, and the accumulator of dQ."""

    mmas: Mmas
    q: cute.Tensor
    k: cute.Tensor
    dout: cute.Tensor
    v: cute.Tensor
    k_t: cute.Tensor
    p_t: cute.Tensor
    dout_t: cute.Tensor
    ds_t: cute.Tensor
    q_t: cute.Tensor
    dq: cute.Tensor


def products_of(mmas: Mmas, shared: Shared, lane: Int32, head_dim: int) -> Products:
    scores, dq, dv, dk = (x.get_slice(lane) for x in (mmas.scores, mmas.dq, mmas.dv, mmas.dk))
    p_t, dout_t, ds_t, q_t, k_t = map(transposed, (shared.p, shared.dout, shared.ds, shared.q, shared.k))
    return Products(
        mmas,
        mmas.scores.make_fragment_A(scores.partition_A(shared.q)),
        mmas.scores.make_fragment_B(scores.partition_B(shared.k)),
        mmas.scores.make_fragment_A(scores.partition_A(shared.dout)),
        mmas.scores.make_fragment_B(scores.partition_B(shared.v)),
        mmas.dq.make_fragment_B(dq.partition_B(k_t)),
        mmas.dv.make_fragment_A(dv.partition_A(p_t)),
        mmas.dv.make_fragment_B(dv.partition_B(dout_t)),
        mmas.dk.make_fragment_A(dk.partition_A(ds_t)),
        mmas.dk.make_fragment_B(dk.partition_B(q_t)),
        cute.make_rmem_tensor(dq.partition_shape_C((ROWS, head_dim)), Float32),
    )
