"""Resources of the roles of the Blackwell kernel for few query rows: tensors and products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass.utils.blackwell_helpers as sm100
from cutlass import Float32, cute
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05

from fa4flex.kernels.common.tensor_core import Product
from fa4flex.kernels.decode_sm100.config import LANES, Config


@dataclass(frozen=True)
class Shared:
    """Shared memory. k (tile_n, head_dim, stage) and v (head_dim_v, tile_n, stage), as copies fill them;
    k_operand and v_operand are the same as operands of products, (instruction, N, K, stage). Float32:
    statistics (128, 2 or 3), a thread's shift, sum and moment; merged (column, lane, buffer), over one of the
    rings."""

    k: cute.Tensor
    v: cute.Tensor
    k_operand: cute.Tensor
    v_operand: cute.Tensor
    statistics: cute.Tensor
    merged: cute.Tensor


class Products:
    """S = q k^T and O += p v, with q and p from tensor memory."""

    def __init__(self, config: Config, kind: Any) -> None:
        self.config, self.kind = config, kind
        major, group, source = OperandMajorMode, tcgen05.CtaGroup.ONE, tcgen05.OperandSource.TMEM
        self.scores = sm100.make_trivial_tiled_mma(
            kind, kind, major.K, major.K, Float32, group, self.scores_tile[:2], source
        )
        self.values = sm100.make_trivial_tiled_mma(
            kind, kind, major.K, major.MN, Float32, group, self.values_tile[:2], source
        )
        self.scores_product = Product(kind, 1, LANES, config.tile_n, True, False)
        self.values_product = Product(kind, 1, LANES, config.head_dim_v, True, True)

    @property
    def scores_tile(self) -> tuple[int, int, int]:
        return LANES, self.config.tile_n, self.config.head_dim

    @property
    def values_tile(self) -> tuple[int, int, int]:
        return LANES, self.config.head_dim_v, self.config.tile_n

    def layouts(self) -> tuple[Any, Any]:
        """Swizzled shared-memory layouts of k and v as operands, whose last mode counts stages."""
        stages = self.config.kv_stages
        return (
            sm100.make_smem_layout_b(self.scores, self.scores_tile, self.kind, stages),
            sm100.make_smem_layout_b(self.values, self.values_tile, self.kind, stages),
        )

    def scores_at(self, base: cute.Pointer) -> cute.Tensor:
        """Scores in tensor memory, (row, key)."""
        return _result(self.scores, self.scores_tile, base + self.config.memory.scores)

    def output_at(self, base: cute.Pointer) -> cute.Tensor:
        return _result(self.values, self.values_tile, base + self.config.memory.output)

    def queries_at(self, base: cute.Pointer) -> cute.Tensor:
        """Queries in tensor memory, as the A operand of the product with keys."""
        return self._left(self.scores, self.scores_tile, base + self.config.memory.queries)

    def probabilities_at(self, base: cute.Pointer) -> cute.Tensor:
        """Probabilities, likewise an A operand, over their scores."""
        return self._left(self.values, self.values_tile, base + self.config.memory.scores)

    def _left(self, mma: cute.TiledMma, tile: tuple[int, int, int], place: cute.Pointer) -> cute.Tensor:
        start = cute.recast_ptr(place, dtype=self.kind)
        layout = sm100.make_smem_layout_a(mma, tile, self.kind, 1).outer
        # The fragment itself starts at column 0, wherever its tensor does.
        fragment = mma.make_fragment_A(cute.make_tensor(start, layout))[None, None, None, 0]
        return cute.make_tensor(start, fragment.layout)

    def words_at(self, base: cute.Pointer, columns: int) -> cute.Tensor:
        """So many columns of 32 bits from there on, (lane, column)."""
        rows_and_keys = self.scores_at(base)
        words = cute.composition(rows_and_keys.layout, cute.make_layout((LANES, self.config.tile_n)))
        lanes, one = words.stride
        return cute.make_tensor(base, cute.make_layout((LANES, columns), stride=(lanes, one)))


def _result(mma: cute.TiledMma, tile: tuple[int, int, int], place: cute.Pointer) -> cute.Tensor:
    layout = mma.make_fragment_C(mma.partition_shape_C(tile[:2])).layout
    return cute.make_tensor(place, layout)[(None, None), 0, 0]
