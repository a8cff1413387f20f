"""Resources of the roles of both kernels: tensors and products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass.utils.blackwell_helpers as sm100
from cutlass import Float32, cute
from cutlass.cute.nvgpu import OperandMajorMode

from fa4flex.kernels.bwd_sm100.config import ROWS
from fa4flex.kernels.bwd_sm100.resources import Operand, Tile
from fa4flex.kernels.bwd_sm100.two_kernels.config import STEP, Config, ValuesConfig
from fa4flex.kernels.common.cluster import Cluster
from fa4flex.kernels.common.tensor_core import Product

ALONG, ACROSS = OperandMajorMode.K, OperandMajorMode.MN


@dataclass(frozen=True)
class ValuesShared:
    """Shared memory of the kernel for dV. As operands of products, (instruction, M or N, K, stage): q and
    dout; dout_t, the same bytes with rows and columns exchanged. float32: lse2 (64, stage)."""

    q: cute.Tensor
    dout: cute.Tensor
    dout_t: cute.Tensor
    lse2: cute.Tensor


class Operands:
    """Operands in shared memory by the names of Shared, and their layouts. ROWS keys and STEP queries."""

    config: Any
    kind: Any
    group: Any
    operands: dict[str, Operand]
    scores: cute.TiledMma

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


class Products(Operands):
    """S' = K Q' from shared memory; dP' = V dO' and dK += dS' Q with their first operand in tensor memory;
    and dQ' = K' dS' from shared memory, 128 columns of the head at a time, where dS lies along its
    queries."""

    def __init__(self, config: Config, kind: Any, cluster: Cluster) -> None:
        self.config, self.kind, self.group = config, kind, cluster.group
        d, dv = config.head_dim, config.head_dim_v
        scores_tile: Tile = (ROWS, STEP, d)
        dprob_tile: Tile = (ROWS, STEP, dv)
        dk_tile: Tile = (ROWS, d, STEP)
        self.scores = self.tiled(ALONG, ALONG, scores_tile)
        self.dprob = self.tiled(ALONG, ALONG, dprob_tile)
        self.dk = self.tiled(ALONG, ACROSS, dk_tile)
        self.dq = self.tiled(ACROSS, ACROSS, (ROWS, STEP, ROWS))
        dq_tile: Tile = (d, STEP, ROWS)
        self.operands = {
            "q": Operand(self.scores, scores_tile, False),
            "k": Operand(self.scores, scores_tile, True),
            "dout": Operand(self.dprob, dprob_tile, False),
            "ds": Operand(self.dq, dq_tile, False),
            "q_t": Operand(self.dk, dk_tile, False),
            "k_t": Operand(self.dq, dq_tile, True),
        }
        self.square = Product(kind, 1, ROWS, STEP, False, False)
        """Product of keys and queries."""
        self.held = Product(kind, 1, ROWS, STEP, True, False)
        """Product of what is in tensor memory and rows of queries."""
        self.to_dk = Product(kind, 1, ROWS, d, True, True)
        self.to_dq = Product(kind, 1, ROWS, STEP, False, True, a_along_rows=True)


class ValuesProducts(Operands):
    """S' = K Q' and dV += P' dO with their first operand in tensor memory."""

    def __init__(self, config: ValuesConfig, kind: Any, cluster: Cluster) -> None:
        self.config, self.kind, self.group = config, kind, cluster.group
        scores_tile: Tile = (ROWS, STEP, config.head_dim)
        dv_tile: Tile = (ROWS, config.head_dim_v, STEP)
        rows_tile: Tile = (ROWS, STEP, config.head_dim_v)
        self.scores = self.tiled(ALONG, ALONG, scores_tile)
        self.dv = self.tiled(ALONG, ACROSS, dv_tile)
        self.operands = {
            "q": Operand(self.scores, scores_tile, False),
            "dout": Operand(self.tiled(ALONG, ALONG, rows_tile), rows_tile, False),
            "dout_t": Operand(self.dv, dv_tile, False),
        }
        self.held = Product(kind, 1, ROWS, STEP, True, False)
        self.to_dv = Product(kind, 1, ROWS, config.head_dim_v, True, True)
