"""Products of a warpgroup on Hopper, 64 rows each, and the two of a forward pass: S = q k^T and O += p v."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from fa4flex.kernels.common.fragment import as_operand

ROWS = 64
"""Query rows of a warpgroup: the rows of one wgmma instruction."""


class Mmas(NamedTuple):
    """Tiled products of one warpgroup: S = q k^T and O += p v."""

    scores: cute.TiledMma
    values: cute.TiledMma


@dataclass(frozen=True)
class Products:
    """q and k are shared-memory descriptors of S = q k^T, p registers and v descriptors of O += p v; v_shared
    is what v describes, (head_dim_v, tile_n, stage)."""

    scores: cute.TiledMma
    values: cute.TiledMma
    q: cute.Tensor
    k: cute.Tensor
    p: cute.Tensor
    v: cute.Tensor
    v_shared: cute.Tensor
    out: cute.Tensor


def tiled_product(
    kind: Any,
    majors: tuple[OperandMajorMode, OperandMajorMode],
    width: int,
    source: warpgroup.OperandSource = warpgroup.OperandSource.SMEM,
    sums: Any = Float32,
) -> cute.TiledMma:
    """One warpgroup's product of 64 rows and `width` columns, of operands of a kind, the first of which is in
    `source`."""
    return sm90.make_trivial_tiled_mma(
        kind,
        kind,
        *majors,
        sums,
        atom_layout_mnk=(1, 1, 1),
        tiler_mn=(ROWS, width),
        a_source=source,
    )


def tiled_products(kind: Any, tile_n: int, head_dim_v: int) -> Mmas:
    """S = q k^T from shared memory, O += p v with p in registers; one warpgroup each."""
    k_major, mn_major = OperandMajorMode.K, OperandMajorMode.MN
    scores = tiled_product(kind, (k_major, k_major), tile_n)
    return Mmas(scores, tiled_product(kind, (k_major, mn_major), head_dim_v, warpgroup.OperandSource.RMEM))


def products_of(
    mma: tuple[cute.TiledMma, cute.TiledMma],
    shared: tuple[cute.Tensor, cute.Tensor, cute.Tensor],
    widths: tuple[int, int],
    lane: Int32,
) -> Products:
    """A warpgroup's, of its q, and of k and v by stage, in shared memory; widths: keys of a tile, columns of
    the output."""
    scores, values = mma
    q, k, v = shared
    tile_n, head_dim_v = widths
    one, two = scores.get_slice(lane), values.get_slice(lane)
    p = cute.make_rmem_tensor(
        as_operand(cute.make_rmem_tensor(one.partition_shape_C((ROWS, tile_n)), Float32)).shape,
        v.element_type,
    )
    return Products(
        scores,
        values,
        scores.make_fragment_A(one.partition_A(q)),
        scores.make_fragment_B(one.partition_B(k)),
        p,
        values.make_fragment_B(two.partition_B(v)),
        v,
        cute.make_rmem_tensor(two.partition_shape_C((ROWS, head_dim_v)), Float32),
    )


@cute.jit
def zero_past(values: cute.Tensor, end: Int32, barrier: Int32) -> None:
    """Zero the keys from `end` on of a tile of values (column, key), by a warpgroup, which meets at a named
    barrier: what lies past the end of a sequence is another's, or nobody's, and a probability 0 times NaN is
    NaN."""
    lane = cute.arch.thread_idx()[0] % 128
    columns, keys = (cute.size(values, mode=[i]) for i in range(2))
    for d in cutlass.range(lane, columns, 128, unroll=1):
        for key in cutlass.range(cutlass.max(end, 0), keys, unroll=1):
            values[d, key] = values.element_type(0.0)
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.barrier(barrier_id=barrier, number_of_threads=128)
