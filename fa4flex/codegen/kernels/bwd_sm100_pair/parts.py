"""What the roles of a pair's backward kernel share: tensors, barriers and products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass.utils.blackwell_helpers as sm100
from cutlass import Float32, cute, pipeline
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05
from cutlass.memory import TmemAllocator

from fa4flex.codegen.kernels.bwd_sm100 import parts as alone
from fa4flex.codegen.kernels.bwd_sm100.config import FRAGMENT, ROWS
from fa4flex.codegen.kernels.bwd_sm100.parts import Tile
from fa4flex.codegen.kernels.bwd_sm100.roles import ALLOCATED, COMPUTE, TOUCH_TENSOR_MEMORY
from fa4flex.codegen.kernels.bwd_sm100_pair.config import CTAS, FRAGMENTS, Config
from fa4flex.codegen.kernels.common.tensor_core import MMA_K, Product


@dataclass(frozen=True)
class Shared(alone.Shared):
    """As of one CTA alone, but q_t, k_t and dout_t have bytes of their own, and ds_rows is (queries of which
    this CTA makes dQ, keys of the pair). sent: those bytes, for the other CTA to write."""

    sent: cute.Pointer


@dataclass(frozen=True)
class Pipes:
    """Rings of q and dout, by queries, and of their transposes, by columns of a head; and barriers. Of those
    that the multiplying warp waits for, the first CTA's count; what it signals is signalled in both CTAs.

    k_full, v_full, k_t_full   the pair's keys and values have come
    lse2_full, lse2_empty      by stage of q: rows' log-sum-exps have come; they are read
    delta_full, delta_empty    by stage of dout: likewise rows' deltas
    s_full, dp_full            scores, or dP, are there, and all earlier products are done
    p_full, ds_full            probabilities, or dS, are in tensor memory, and scores, or dP, read
    ds_come                    dS of this CTA's queries and all keys is in its shared memory
    ds_there                   that has happened in the second CTA
    dq_full, dq_empty          a step's dQ is there, and all earlier products are done; it is read
    dv_full, dk_full           all steps have been added to dV, or dK
    """

    q: pipeline.PipelineTmaUmma
    q_t: pipeline.PipelineTmaUmma
    dout: pipeline.PipelineTmaUmma
    dout_t: pipeline.PipelineTmaUmma
    k_full: cute.Pointer
    v_full: cute.Pointer
    k_t_full: cute.Pointer
    lse2_full: cute.Pointer
    lse2_empty: cute.Pointer
    delta_full: cute.Pointer
    delta_empty: cute.Pointer
    s_full: cute.Pointer
    p_full: cute.Pointer
    dp_full: cute.Pointer
    ds_full: cute.Pointer
    ds_come: cute.Pointer
    ds_there: cute.Pointer
    dq_full: cute.Pointer
    dq_empty: cute.Pointer
    dv_full: cute.Pointer
    dk_full: cute.Pointer


class Products:
    """S' = K Q', dP' = V dO', dV += P' dO and dK += dS' Q: each CTA has the rows of its own keys, and half of
    the second operand, by rows or by columns. dQ = dS K: each CTA has half of the queries as rows, and half
    of the columns of all the pair's keys. A CTA's 64 rows of dQ lie in tensor memory twice, the first half of
    the columns in 64 lanes and the second in the others."""

    def __init__(self, config: Config, kind: Any) -> None:
        self.config, self.kind = config, kind
        along, across = OperandMajorMode.K, OperandMajorMode.MN
        d, dv, keys = config.head_dim, config.head_dim_v, config.tile_n
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
        self.square = Product(kind, CTAS, keys, ROWS, False, False)
        """Of keys and queries."""
        self.to_dv = Product(kind, CTAS, keys, dv, True, True)
        self.to_dk = Product(kind, CTAS, keys, d, True, True)
        self.to_dq = Product(kind, CTAS, ROWS, d, False, True, a_along_rows=True)

    def tiled(self, a: Any, b: Any, tile: Tile) -> cute.TiledMma:
        group = tcgen05.CtaGroup.TWO
        return sm100.make_trivial_tiled_mma(self.kind, self.kind, a, b, Float32, group, tile[:2])

    def layouts(self) -> dict[str, Any]:
        """Swizzled shared-memory layouts by the names of Shared, whose last mode counts stages."""
        q_stages, do_stages = self.config.q_stages, self.config.do_stages

        def first(product: cute.TiledMma, tile: Tile) -> Any:
            return sm100.make_smem_layout_a(product, tile, self.kind, 1)

        def second(product: cute.TiledMma, tile: Tile, stages: int) -> Any:
            return sm100.make_smem_layout_b(product, tile, self.kind, stages)

        return {
            "q": second(self.scores, self.scores_tile, q_stages),
            "k": first(self.scores, self.scores_tile),
            "v": first(self.dprob, self.dprob_tile),
            "dout": second(self.dprob, self.dprob_tile, do_stages),
            "ds": first(self.dq, self.dq_tile),
            "q_t": second(self.dk, self.dk_tile, q_stages),
            "k_t": second(self.dq, self.dq_tile, 1),
            "dout_t": second(self.dv, self.dv_tile, do_stages),
        }


def operand_columns(firsts: tuple[int, int], apart: int) -> list[int]:
    """Where in tensor memory the first operand of each instruction begins: two queries in a column, and the
    fragments of a compute warpgroup so far apart."""
    steps = FRAGMENT // MMA_K
    return [
        firsts[fragment % 2] + fragment // 2 * apart + i * MMA_K // 2
        for fragment in range(FRAGMENTS)
        for i in range(steps)
    ]


def tensor_memory(storage: Any) -> TmemAllocator:
    """The first warp that computes allocates, and frees what all have read."""
    return TmemAllocator(
        storage.columns.ptr,
        barrier_for_retrieve=pipeline.NamedBarrier(ALLOCATED, TOUCH_TENSOR_MEMORY),
        allocator_warp_id=COMPUTE,
        is_two_cta=True,
        two_cta_tmem_dealloc_mbar_ptr=storage.freed.ptr,
    )
