"""Resources of the roles of the Blackwell forward kernel: tensors and products of one block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass.utils.blackwell_helpers as sm100
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05
from cutlass.tensor_utils import LayoutEnum

from fa4flex.kernels.common.cluster import Cluster
from fa4flex.kernels.common.tensor_core import Product
from fa4flex.kernels.common.work import Work
from fa4flex.kernels.fwd_sm100.config import ROWS, Config, staged_columns


@dataclass(frozen=True)
class Shared:
    """Shared memory. q, k, v as operands of products, (instruction, M or N, K, tile or stage); out (128,
    columns, stage). Both float32 (128, query tile): what a row's output is to be multiplied by, `scales` for
    the next key tile, `finals` after the last; `scales` is (128, stage) where scores have stages. `tiles`,
    where keys lie in pages: k and v, laid out as Products.tile_layouts says."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    out: cute.Tensor | None
    scales: cute.Tensor
    finals: cute.Tensor
    tiles: tuple[cute.Tensor, cute.Tensor] | None = None


class Products:
    """S = q k^T from shared memory, and O += p v with p from tensor memory."""

    sums: Any = Float32
    """Dtype of scores in tensor memory."""
    value_major = OperandMajorMode.MN

    def __init__(self, config: Config, kind: Any, cluster: Cluster) -> None:
        self.config, self.kind = config, kind
        self.value_kind = self.kind_of_values(kind)
        major, group, values = OperandMajorMode, cluster.group, (self.value_kind, self.value_kind)
        self.scores = sm100.make_trivial_tiled_mma(
            kind, kind, major.K, major.K, self.sums, group, self.scores_tile[:2]
        )
        majors, size = (major.K, self.value_major), self.values_tile[:2]
        self.values = sm100.make_trivial_tiled_mma(
            *values, *majors, Float32, group, size, tcgen05.OperandSource.TMEM
        )

        (m, n, _), (_, dv, _) = self.scores_tile, self.values_tile
        along_columns = self.value_major == major.MN
        self.scores_product = Product(kind, config.ctas, m, n, False, False)
        self.values_product = Product(self.value_kind, config.ctas, m, dv, True, along_columns)

    def kind_of_values(self, kind: Any) -> Any:
        """Dtype of values and of probabilities, where queries have this one."""
        return kind

    @property
    def scores_tile(self) -> tuple[int, int, int]:
        return ROWS * self.config.ctas, self.config.tile_n, self.config.head_dim

    @property
    def values_tile(self) -> tuple[int, int, int]:
        return ROWS * self.config.ctas, self.config.head_dim_v, self.config.tile_n

    def layouts(self) -> tuple[Any, Any, Any]:
        """Swizzled shared-memory layouts of q, k and v, whose last mode counts tiles or stages."""
        k_stages, v_stages = self.config.kv_stages
        return (
            sm100.make_smem_layout_a(self.scores, self.scores_tile, self.kind, self.config.q_tiles),
            sm100.make_smem_layout_b(self.scores, self.scores_tile, self.kind, k_stages),
            sm100.make_smem_layout_b(self.values, self.values_tile, self.value_kind, v_stages),
        )

    def tile_layouts(self) -> tuple[Any, Any]:
        """The layouts of k and v as (keys, columns, stage) and (columns, keys, stage). Blocks of columns
        follow each other, each with all keys of a tile, which is how both chips multiply them."""
        (_, n, d), (_, dv, _) = self.scores_tile, self.values_tile
        k_stages, v_stages = self.config.kv_stages
        return (
            sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, (64, n, d), self.kind, k_stages),
            sm90.make_smem_layout_b(LayoutEnum.COL_MAJOR, (64, dv, n), self.kind, v_stages),
        )

    def scores_at(self, base: cute.Pointer, tile: Any) -> cute.Tensor:
        """Scores of a query tile in tensor memory, as accumulators."""
        layout = self.scores.make_fragment_C(self.scores.partition_shape_C(self.scores_tile[:2])).layout
        return cute.make_tensor(base + column(self.config.memory.scores, tile), layout)

    def outputs_at(self, base: cute.Pointer, tile: Any) -> cute.Tensor:
        layout = self.values.make_fragment_C(self.values.partition_shape_C(self.values_tile[:2])).layout
        return cute.make_tensor(base + column(self.config.memory.outputs, tile), layout)

    def probabilities_at(self, base: cute.Pointer, tile: int) -> cute.Tensor:
        """Probabilities of a query tile in tensor memory, as the A operand of the product with values."""
        start = cute.recast_ptr(base + self.config.memory.probabilities[tile], dtype=self.value_kind)
        layout = sm100.make_smem_layout_a(self.values, self.values_tile, self.value_kind, 1).outer
        # The fragment itself starts at column 0, wherever its tensor does.
        fragment = self.values.make_fragment_A(cute.make_tensor(start, layout))[None, None, None, 0]
        return cute.make_tensor(start, fragment.layout)


def chunk_columns(config: Config, kind: Any) -> int:
    """Columns of a staged chunk of an output whose elements are of this kind."""
    return staged_columns(config.head_dim_v, kind.width // 8)


def first_row(config: Config, work: Work, tile: Any, rank: Any) -> Int32:
    """The query that the first row of a CTA's tile holds."""
    return work.tile * config.tile_m + (tile * config.ctas + rank) * ROWS


def stage_column(config: Config, stage: Any) -> Any:
    """Columns to a stage of scores, and of probabilities, from the first one."""
    return stage * config.memory.apart


def column(columns: tuple[int, ...], tile: Any) -> Any:
    """The one of a query tile, whose number may be known only when the kernel runs."""
    if isinstance(tile, int):
        return columns[tile]
    return columns[0] + tile * (columns[-1] - columns[0])
