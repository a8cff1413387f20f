"""Resources of the roles of the Blackwell backward kernel: tensors and products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass.utils.blackwell_helpers as sm100
from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import OperandMajorMode

from fa4flex.kernels.bwd_sm100.config import FRAGMENT, HALF, ROWS, Config
from fa4flex.kernels.common.cluster import Cluster
from fa4flex.kernels.common.tensor_core import Product
from fa4flex.kernels.plan.problem import MMA_K

Tile = tuple[int, int, int]
"""Rows and columns of a product, and what is summed over."""

NUMBERS = ("lse2", "delta")
"""Statistics of rows, in rings of their own."""

OF_QUERIES = ("q", "q_t", "lse2")
"""Operands that come into stages with a tile of queries; all others come with its dO."""


class Operand(NamedTuple):
    """An operand in shared memory: the product that first takes it and that product's tile, and whether it
    is the first operand there."""

    product: cute.TiledMma
    tile: Tile
    first: bool


@dataclass(frozen=True)
class Shared:
    """Shared memory. As operands of products, (instruction, M or N, K, stage): q, k, v, dout, and ds; the
    same bytes with rows and columns exchanged: q_t, k_t, dout_t; as compute threads write it: ds_rows
    (queries, keys). float32: lse2, delta (128, stage); dq (number, warp, stage)."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    dout: cute.Tensor
    ds: cute.Tensor
    q_t: cute.Tensor
    k_t: cute.Tensor
    dout_t: cute.Tensor
    ds_rows: cute.Tensor
    lse2: cute.Tensor
    delta: cute.Tensor
    dq: cute.Tensor


class Products:
    """S' = K Q' and dP' = V dO' from shared memory; dV += P' dO and dK += dS' Q with their first operand in
    tensor memory; dQ = dS K from shared memory, where dS lies along its rows.

    Of a pair, each CTA has the rows of its own keys, and half of the second operand, by rows or by columns.
    Of dQ, each has half of the queries as rows, and half of the columns of all the pair's keys; its 64 rows
    lie in tensor memory twice, the first half of the columns in 64 lanes and the second in the others."""

    def __init__(self, config: Config, kind: Any, cluster: Cluster) -> None:
        self.config, self.kind, self.group = config, kind, cluster.group
        along, across = OperandMajorMode.K, OperandMajorMode.MN
        d, dv, keys, ctas = config.head_dim, config.head_dim_v, config.tile_n, config.ctas
        self.scores_tile: Tile = (keys, ROWS, d)
        self.dprob_tile: Tile = (keys, ROWS, dv)
        self.dv_tile: Tile = (keys, dv, ROWS)
        self.dk_tile: Tile = (keys, d, ROWS)
        self.dq_tile: Tile = (ROWS, d, keys)
        self.scores = self.tiled(along, along, self.scores_tile)
        self.dprob = self.tiled(along, along, self.dprob_tile)
        self.dv = self.tiled(along, across, self.dv_tile)
        self.dk = self.tiled(along, across, self.dk_tile)
        self.dq = self.tiled(across, across, self.dq_tile)
        # By the names of Shared.
        self.operands = {
            "q": Operand(self.scores, self.scores_tile, False),
            "k": Operand(self.scores, self.scores_tile, True),
            "v": Operand(self.dprob, self.dprob_tile, True),
            "dout": Operand(self.dprob, self.dprob_tile, False),
            "ds": Operand(self.dq, self.dq_tile, True),
            "q_t": Operand(self.dk, self.dk_tile, False),
            "k_t": Operand(self.dq, self.dq_tile, False),
            "dout_t": Operand(self.dv, self.dv_tile, False),
        }
        self.square = Product(kind, ctas, keys, ROWS, False, False)
        """Product of keys and queries."""
        self.to_dv = Product(kind, ctas, keys, dv, True, True)
        self.to_dk = Product(kind, ctas, keys, d, True, True)
        self.to_dq = Product(kind, ctas, ROWS, d, False, True, a_along_rows=True)

    def tiled(self, a: Any, b: Any, tile: Tile) -> cute.TiledMma:
        return sm100.make_trivial_tiled_mma(self.kind, self.kind, a, b, Float32, self.group, tile[:2])

    def layouts(self) -> dict[str, Any]:
        """Swizzled shared-memory layouts by the names of Shared, whose last mode counts stages."""
        stages = {
            **dict.fromkeys(("q", "q_t"), self.config.q_stages),
            **dict.fromkeys(("dout", "dout_t"), self.config.do_stages),
        }

        def layout(name: str) -> Any:
            product, tile, first = self.operands[name]
            make = sm100.make_smem_layout_a if first else sm100.make_smem_layout_b
            return make(product, tile, self.kind, stages.get(name, 1))

        return {name: layout(name) for name in self.operands}


def in_columns(base: cute.Pointer, first: Any, count: int) -> cute.Tensor:
    """All rows of so many columns of tensor memory, (128, count)."""
    return cute.make_tensor(base + first, cute.make_layout((ROWS, count), stride=(1 << 16, 1)))


def operand_columns(firsts: tuple[int, int]) -> list[int]:
    """First column of each instruction's first operand in tensor memory: two queries in a column, and each
    compute warpgroup's queries for themselves."""
    each = HALF // MMA_K
    return [first + i * MMA_K // 2 for first in firsts for i in range(each)]


def of_half(firsts: tuple[int, int], half: Int32) -> Int32:
    """The first column of a compute warpgroup."""
    return firsts[0] + half * (firsts[1] - firsts[0])


def fragment_columns(firsts: tuple[int, int], apart: int) -> list[int]:
    """First column of each instruction's first operand in tensor memory: two queries in a column, and the
    fragments of a compute warpgroup so far apart."""
    steps = FRAGMENT // MMA_K
    return [
        firsts[fragment % 2] + fragment // 2 * apart + i * MMA_K // 2
        for fragment in range(ROWS // FRAGMENT)
        for i in range(steps)
    ]
