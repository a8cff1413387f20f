"""A consumer warpgroup: all rows of a tile, the scores of half of its keys and half of the output's columns.

Probabilities of both halves lie in shared memory, in two buffers that take turns. What comes before a product
of tile j - 1 is written in the step before, and products of tile j - 1 run under the softmax of tile j.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.utils.hopper_helpers as sm90
from cutlass import Boolean, Float32, Int32, cute, pipeline, select_
from cutlass.cute.nvgpu import warpgroup
from cutlass.tensor_utils import LayoutEnum

from fa4flex.kernels.common.arguments import Arguments
from fa4flex.kernels.common.barriers import sync
from fa4flex.kernels.common.fragment import multiply, narrow
from fa4flex.kernels.common.hooks import Hooks
from fa4flex.kernels.common.keys import RowEnds
from fa4flex.kernels.common.products import ROWS, Mmas, Products
from fa4flex.kernels.common.same_rows import row_number, tell
from fa4flex.kernels.common.softmax import rescale
from fa4flex.kernels.common.tile_scheduler import TileScheduler
from fa4flex.kernels.common.transfer import States
from fa4flex.kernels.fwd_sm90 import consumer as forward
from fa4flex.kernels.fwd_sm90.consumer import Begun, Mine
from fa4flex.kernels.fwd_wide_sm90.config import Config
from fa4flex.kernels.fwd_wide_sm90.epilogue import Epilogue
from fa4flex.kernels.fwd_wide_sm90.resources import Shared
from fa4flex.kernels.fwd_wide_sm90.roles import MAXIMA, PROBABILITIES


@dataclass(frozen=True)
class Tile(forward.Tile):
    """With what a warpgroup hands on by; `group` is its number."""

    shared: Shared
    lane: Int32


class Consumer(forward.Consumer):
    config: Config

    def __init__(self, config: Config, hooks: Hooks, scheduler: TileScheduler) -> None:
        super().__init__(config, hooks, scheduler)
        self.epilogue = Epilogue(config, hooks)

    def row_group(self, group: Any) -> Any:
        """Both warpgroups have the same rows."""
        return 0

    @property
    def width(self) -> int:
        return self.config.keys

    def first_key(self, tile: forward.Tile, key_tile: Int32) -> Int32:
        return key_tile * self.config.tile_n + tile.group * self.config.keys

    def products(self, mma: Mmas, shared: Any, lane: Int32, group: Int32) -> Products:
        """Operands of a warpgroup: its keys of every stage, its columns of values, and all probabilities."""
        config, scores, values = self.config, mma.scores, mma.values
        n, stages = config.tile_n, config.kv_stages
        k = cute.local_tile(shared.k, (config.keys, config.head_dim, stages), (group, 0, 0))
        v = cute.local_tile(shared.v, (config.columns, n, stages), (group, 0, 0))
        one, two = scores.get_slice(lane), values.get_slice(lane)
        return Products(
            scores,
            values,
            scores.make_fragment_A(one.partition_A(shared.q[None, None, 0])),
            scores.make_fragment_B(one.partition_B(k)),
            values.make_fragment_A(two.partition_A(shared.p)),
            values.make_fragment_B(two.partition_B(v)),
            v,
            cute.make_rmem_tensor(two.partition_shape_C((ROWS, config.columns)), Float32),
        )

    def tile(self, mine: Mine, ends: RowEnds | None) -> forward.Tile:
        """Rows of a part without tiles of keys see none of the tile that stands for them."""
        if self.config.splits:
            some: Any = mine.keys
            seen = Int32(select_(some.some, mine.at.kv_len, Int32(0)))
            mine = replace(mine, at=mine.at.but(kv_len=seen))
        return super().tile(mine, ends)

    def told(self, tile: forward.Tile, mine: Mine, arguments: Arguments) -> Tile:
        shared: Any = mine.shared
        return Tile(**vars(tile), shared=shared, lane=mine.lane)

    @cute.jit
    def step(
        self,
        tile: cutlass.Constexpr[Any],
        key_tile: Int32,
        states: States,
        masked: cutlass.Constexpr[bool],
    ) -> States:
        """Scores of this key tile and values of the one before, which run under this tile's softmax."""
        (k_state, v_state), pipes, products = states, tile.pipes, tile.products
        begun = self.begin(tile, key_tile, masked)
        pipes.k.consumer_wait(k_state)
        self.multiply_queries(products, begun, products.k[None, None, None, k_state.index])
        self.start_values(tile, v_state)
        warpgroup.wait_group(1)
        pipes.k.consumer_release(k_state)
        self.modify(begun, tile, masked)
        raised = self.raise_maxima(tile, begun.grid)
        tile.softmax.exponentiate(begun.grid, is_finite=not masked and self.finite)
        self.take_values(tile, None, v_state)
        if raised:
            rescale(products.out, (tile.softmax,))
        self.hand(tile, begun, k_state)
        return self.following(tile, key_tile, k_state, masked)

    @cute.jit
    def last(self, tile: cutlass.Constexpr[Any], v_state: pipeline.PipelineState) -> None:
        """Values of the last key tile."""
        self.start_values(tile, v_state)
        self.take_values(tile, None, v_state)

    def start_values(self, tile: Any, v_state: pipeline.PipelineState) -> None:
        """Issue the product with a tile of values, once both warpgroups have written its probabilities."""
        sync(PROBABILITIES)
        tile.pipes.v.consumer_wait(v_state)
        products = tile.products
        p = products.p[None, None, None, self.buffer(v_state)]
        v = products.v[None, None, None, v_state.index]
        multiply(products.values, products.out, p, v, True)

    @cute.jit
    def raise_maxima(self, tile: cutlass.Constexpr[Any], grid: cute.Tensor) -> Boolean:
        """Raise the maxima in use if a tile's scores pass a ceiling: in both warpgroups, which have the same
        numbers."""
        highest = self.highest(tile, grid)
        raised = tile.softmax.passes(highest)
        if raised:
            tile.softmax.raise_maxima(highest)
        return raised

    def highest(self, tile: Any, grid: cute.Tensor) -> list[Float32]:
        """Largest scores of rows among all keys of a tile."""
        maxima, unit, softmax = tile.shared.maxima, tile.group, tile.softmax
        mine = [softmax.reduce(x, cute.arch.fmax) for x in softmax.maxima(grid)]
        tell(maxima, unit, tile.lane, mine)
        sync(MAXIMA)
        others = [maxima[1 - unit, row_number(tile.lane, r)] for r in range(len(mine))]
        return [cute.arch.fmax(x, y) for x, y in zip(mine, others, strict=True)]

    def buffer(self, state: pipeline.PipelineState) -> Int32:
        """Buffer of a tile's probabilities: even and odd tiles take turns."""
        return state.phase if self.config.kv_stages == 1 else state.index

    def hand(self, tile: Any, begun: Begun, k_state: pipeline.PipelineState) -> None:
        """Write probabilities to shared memory, as an operand of both warpgroups' products."""
        products, shared, config = tile.products, tile.shared, self.config
        kind = shared.p.element_type
        rounded = cute.make_rmem_tensor_like(begun.scores, kind)
        narrow(begun.scores, rounded)
        buffer = shared.p[None, None, self.buffer(k_state)]
        target = cute.local_tile(buffer, (ROWS, config.keys), (0, tile.group))
        atom = sm90.sm90_get_smem_store_op(LayoutEnum.ROW_MAJOR, kind, Float32)
        copy = cute.make_tiled_copy_C(atom, products.scores).get_slice(tile.lane)
        cute.copy(copy, copy.retile(rounded), copy.partition_D(target))
        cute.arch.fence_proxy("async.shared", space="cta")
