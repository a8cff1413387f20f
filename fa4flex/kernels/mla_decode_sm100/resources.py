"""Resources of the roles of the Blackwell kernel for latent rows: tensors of one block, and products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass.utils.blackwell_helpers as sm100
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05
from cutlass.tensor_utils import LayoutEnum

from fa4flex.kernels.common.tensor_core import Product
from fa4flex.kernels.common.transfer import tile_room
from fa4flex.kernels.decode_sm100.config import LANES
from fa4flex.kernels.mla_decode_sm100.config import BLOCK, ROWS, Config
from fa4flex.kernels.plan.problem import MMA_K

LANE = 1 << 16
"""Addresses from one lane of tensor memory to the next."""

NUMBERS = 2
"""Numbers of a thread that the other one of its row reads at the end: the shift and the sum."""


class Layouts(NamedTuple):
    """Swizzled shared-memory layouts: of q's columns there and of k as copies fill them, (64, columns) and
    (64, width, stage); as operands, of q, k, columns of k that meet q's, p and one product's values."""

    q: Any
    k: Any
    q_operand: Any
    k_operand: Any
    k_rest: Any
    p_operand: Any
    v_operand: Any


@dataclass(frozen=True)
class Shared:
    """Shared memory. q (64, columns that tensor memory does not hold) and k (64, width, stage), as copies
    fill them; v (width of values, 64, stage), another view of k; q_operand, k_operand, k_rest (what meets
    q_operand), p_operand and, for each product, v_operands are operands, (instruction, M or N, K, stage).
    Float32: statistics (128, 2), a thread's shift and sum; maxima (128, 2), of tiles in turn."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    q_operand: cute.Tensor
    k_operand: cute.Tensor
    k_rest: cute.Tensor
    p_operand: cute.Tensor
    v_operands: tuple[cute.Tensor, ...]
    statistics: cute.Tensor
    maxima: cute.Tensor


class Products:
    """S = q k^T, with columns of q from tensor memory and the others from shared memory, and O += p v, with p
    from there. Products of 64 rows that use all lanes of tensor memory are those of tcgen05.mma.ws."""

    def __init__(self, config: Config, kind: Any) -> None:
        self.config, self.kind = config, kind
        major, group, source = OperandMajorMode, tcgen05.CtaGroup.ONE, tcgen05.OperandSource.SMEM
        self.scores = sm100.make_trivial_tiled_mma(
            kind, kind, major.K, major.K, Float32, group, (ROWS, BLOCK), source
        )
        self.values = sm100.make_trivial_tiled_mma(
            kind, kind, major.K, major.MN, Float32, group, (ROWS, config.product_columns), source
        )
        self.held_product = Product(kind, 1, ROWS, BLOCK, True, False, stationary=True)
        self.scores_product = Product(kind, 1, ROWS, BLOCK, False, False, stationary=True)
        self.values_product = Product(kind, 1, ROWS, config.product_columns, False, True, stationary=True)

    def layouts(self) -> Layouts:
        config, kind, stages = self.config, self.kind, self.config.kv_stages
        scores = ROWS, BLOCK, config.head_dim
        rest = ROWS, BLOCK, config.head_dim - config.held
        values = ROWS, config.product_columns, BLOCK
        return Layouts(
            sm90.make_smem_layout_a(LayoutEnum.ROW_MAJOR, rest, kind, 1),
            sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, scores, kind, stages),
            sm100.make_smem_layout_a(self.scores, rest, kind, 1),
            sm100.make_smem_layout_b(self.scores, scores, kind, stages),
            sm100.make_smem_layout_b(self.scores, rest, kind, 1),
            sm100.make_smem_layout_a(self.values, values, kind, 1),
            sm100.make_smem_layout_b(self.values, values, kind, 1),
        )

    def scores_at(self, base: cute.Pointer) -> cute.Tensor:
        """Scores in tensor memory, (lane, key of its half)."""
        return _columns(base + self.config.memory.scores, self.config.part)

    def queries_at(self, base: cute.Pointer) -> list[cute.Pointer]:
        """Where the operand of each instruction begins that takes queries from tensor memory, where the same
        rows lie in both halves of the lanes."""
        first = base + self.config.memory.queries
        return [first + k * MMA_K // 2 for k in range(self.config.held // MMA_K)]

    def words_at(self, base: cute.Pointer, columns: int) -> cute.Tensor:
        """So many columns of 32 bits from there on, (lane, column)."""
        return _columns(base, columns)

    def output_at(self, base: cute.Pointer) -> cute.Tensor:
        """The output, (lane, column): of each product, a lane has half of the columns."""
        return _columns(base + self.config.memory.output, self.config.output_columns)


def _columns(first: cute.Pointer, count: int) -> cute.Tensor:
    return cute.make_tensor(first, cute.make_layout((LANES, count), stride=(LANE, 1)))


def storage_of(barriers: Any, layouts: Layouts, kind: Any) -> Any:
    """A block's shared memory."""
    members = {
        "barriers": barriers,
        "freed": Int64,
        "columns": Int32,
        "statistics": cute.struct.Align[cute.struct.MemRange[Float32, NUMBERS * LANES], 16],
        "maxima": cute.struct.Align[cute.struct.MemRange[Float32, 2 * LANES], 16],
        "queries": tile_room(kind, cute.cosize(layouts.q)),
        "keys": tile_room(kind, cute.cosize(layouts.k)),
        "probabilities": tile_room(kind, cute.cosize(layouts.p_operand)),
    }
    return cute.struct(type("Storage", (), {"__annotations__": members}))


def shared_of(storage: Any, layouts: Layouts, config: Config) -> Shared:
    def whole(room: Any, layout: Any) -> cute.Tensor:
        return room.get_tensor(layout.outer, swizzle=layout.inner)

    k = whole(storage.keys, layouts.k)
    stage = BLOCK * config.head_dim
    values = sm90.make_smem_layout_b(
        LayoutEnum.COL_MAJOR, (ROWS, config.head_dim_v, BLOCK), k.element_type, 1
    )
    every = [
        (k.iterator + i * config.product_columns * BLOCK, layouts.v_operand) for i in range(config.products)
    ]
    *v_operands, k_rest = (
        _staged(first, cute.slice_(layout.outer, (None, None, None, 0)), config.kv_stages, stage)
        for first, layout in (*every, (k.iterator + config.held * BLOCK, layouts.k_rest))
    )
    return Shared(
        whole(storage.queries, layouts.q)[None, None, 0],
        k,
        _staged(k.iterator, cute.slice_(values.outer, (None, None, 0)), config.kv_stages, stage),
        whole(storage.queries, layouts.q_operand),
        whole(storage.keys, layouts.k_operand),
        k_rest,
        whole(storage.probabilities, layouts.p_operand),
        tuple(v_operands),
        storage.statistics.get_tensor(cute.make_layout((LANES, NUMBERS), stride=(NUMBERS, 1))),
        storage.maxima.get_tensor(cute.make_layout((LANES, 2), stride=(1, LANES))),
    )


def _staged(first: cute.Pointer, one: cute.Layout, stages: int, apart: int) -> cute.Tensor:
    """The same layout in each stage, `apart` elements from one to the next."""
    return cute.make_tensor(first, cute.append(one, cute.make_layout(stages, stride=apart)))
