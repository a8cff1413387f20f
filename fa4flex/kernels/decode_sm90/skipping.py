"""Roles that leave out tiles of keys whose scores tell that they hold next to nothing, and do not bring their
values.

producer --[k ring]--> consumer --[asked: are values wanted?]--> producer --[v ring]--> consumer

Keys come as far ahead as their ring is deep. Values are asked for when a tile's scores are known, and
multiplied after the next tile's scores: they have that long to come. The stage of values that are not wanted
is handed over as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, const_expr, cute, pipeline
from cutlass.cute.nvgpu import warpgroup

from fa4flex.kernels.common.arguments import Arguments
from fa4flex.kernels.common.barriers import Pipes, any_of
from fa4flex.kernels.common.fragment import as_operand, multiply, narrow
from fa4flex.kernels.common.keys import tile_at
from fa4flex.kernels.common.packed_rows import Part, first_full, tile_of
from fa4flex.kernels.common.products import Mmas, Products, zero_past
from fa4flex.kernels.common.skipping import depth_of, highest_of, some_count
from fa4flex.kernels.common.softmax import passed, raise_maxima, rescale
from fa4flex.kernels.common.split_producer import Producer, Stages
from fa4flex.kernels.common.tensor_core import arrive_once
from fa4flex.kernels.common.transfer import States, Transfers
from fa4flex.kernels.decode_sm90.consumer import Consumer, Keys, Mine
from fa4flex.kernels.decode_sm90.resources import Shared
from fa4flex.kernels.decode_sm90.roles import WRITTEN


@dataclass(frozen=True)
class Asked:
    """Stages in which the consumer tells whether a tile's values are wanted: int32 [stages], 0 if not; and
    their barriers."""

    wanted: cute.Tensor
    full: cute.Pointer


@dataclass(frozen=True)
class Whole:
    """Constants over a part of the keys. last: [2], whether the last tile's values are wanted, and its
    number; depths: see depth_of, by row."""

    products: Products
    rows: tuple[Mine, ...]
    pipes: Pipes
    asked: Asked
    last: cute.Tensor
    depths: tuple[Float32, ...]


class AskedProducer(Producer):
    @cute.jit
    def run_asked(
        self,
        arguments: Arguments,
        part: Part,
        transfers: cutlass.Constexpr[Transfers],
        stages: cutlass.Constexpr[Stages],
        asked: cutlass.Constexpr[Asked],
    ) -> None:
        deep = self.config.kv_stages
        k_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, deep)
        v_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, deep)
        told = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, deep)
        tile = tile_of(part, arguments, self.hooks, self.config)
        key_values = self.key_values(arguments, tile, transfers, stages)
        for i in cutlass.range(tile.first, cutlass.min(tile.first + deep, tile.last), unroll=1):
            key_values.load_keys(k_state, tile_at(tile.keys, i))
            k_state.advance()
        for i in cutlass.range(tile.first, tile.last, unroll=1):
            cute.arch.mbarrier_wait(asked.full + told.index, told.phase)
            wanted = cute.arch.make_warp_uniform(asked.wanted[told.index])
            if wanted != 0:
                key_values.load_values(v_state, tile_at(tile.keys, i))
            else:
                stages.v_ring.sync_object_empty.wait(v_state.index, v_state.phase)
                arrive_once(stages.v_ring.producer_get_barrier(v_state))
            v_state.advance()
            told.advance()
            if i + deep < tile.last:
                key_values.load_keys(k_state, tile_at(tile.keys, i + deep))
            k_state.advance()


class AskingConsumer(Consumer):
    @cute.jit
    def run_asking(
        self,
        arguments: Arguments,
        part: Part,
        shared: cutlass.Constexpr[Shared],
        pipes: cutlass.Constexpr[Pipes],
        mma: cutlass.Constexpr[Mmas],
        asked: cutlass.Constexpr[Asked],
    ) -> None:
        lane = cute.arch.thread_idx()[0] - 128
        tile = tile_of(part, arguments, self.hooks, self.config)
        self.queries(arguments, tile, shared, lane)
        products = self.products(mma, shared, lane)
        rows = self.rows(arguments, tile, lane)
        for row in rows:
            row.softmax.state.clear()
        products.out.fill(0.0)
        last = cute.make_rmem_tensor((2,), Int32)
        last.fill(0)
        keys = (tile.last - tile.first) * self.config.tile_n
        depths = tuple(depth_of(row.softmax, keys, self.config.skip) for row in rows)
        whole = Whole(products, rows, pipes, asked, last, depths)
        k_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.config.kv_stages)
        v_state = k_state.clone()
        self.read_starts(rows, tile_at(tile.keys, tile.first), True)
        full = first_full(tile)
        for i in cutlass.range(tile.first, full, unroll=1):
            of_keys = self.keys_at(tile, i, True)
            k_state, v_state = self.next(whole, of_keys, i > tile.first, (k_state, v_state))
        for i in cutlass.range(full, tile.last, unroll=1):
            of_keys = self.keys_at(tile, i, False)
            k_state, v_state = self.next(whole, of_keys, i > tile.first, (k_state, v_state))
        if tile.first < tile.last:
            self.values(whole, v_state)
        self.epilogue.run(arguments, tile, products, rows, lane)

    @cute.jit
    def next(
        self,
        whole: cutlass.Constexpr[Whole],
        keys: cutlass.Constexpr[Keys],
        later: Boolean,
        states: States,
    ) -> States:
        """Scores of this key tile, then values of the one before, if there is one."""
        (k_state, v_state), rows, products = states, whole.rows, whole.products
        scores, grids = self.scores(products, rows, whole.pipes, keys, k_state)
        softmaxes = [mine.softmax for mine in rows]
        highest = [highest_of(one, grid) for one, grid in zip(softmaxes, grids)]
        count = Boolean(False)
        for one, mine, depth in zip(softmaxes, highest, whole.depths):
            one.note(mine)
            count = count | some_count(one, mine, depth)
        keep = any_of(WRITTEN, count)
        self.tell(whole.asked, k_state, keep)
        if later:
            self.values(whole, v_state)
        whole.last[0], whole.last[1] = Int32(keep), keys.tile
        if keep:
            if passed(softmaxes, highest):
                raise_maxima(softmaxes, highest)
                rescale(products.out, softmaxes)
            self.probabilities(rows, grids)
            narrow(as_operand(scores), products.p)
        v_state = k_state.clone()
        k_state.advance()
        return k_state, v_state

    @cute.jit
    def tell(self, asked: cutlass.Constexpr[Asked], state: pipeline.PipelineState, wanted: Boolean) -> None:
        """Tell the producer whether a tile's values are wanted."""
        if cute.arch.thread_idx()[0] == 128:
            asked.wanted[state.index] = Int32(wanted)
        arrive_once(asked.full + state.index)

    @cute.jit
    def values(self, whole: cutlass.Constexpr[Whole], v_state: pipeline.PipelineState) -> None:
        """Values of the last key tile, if they are wanted."""
        products, pipes = whole.products, whole.pipes
        pipes.v.consumer_wait(v_state)
        if whole.last[0] != 0:
            if const_expr(self.config.clears):
                end = whole.rows[0].fragment.at.kv_len - whole.last[1] * self.config.tile_n
                if end < self.config.tile_n:
                    zero_past(products.v_shared[None, None, v_state.index], end, Int32(WRITTEN.at()))
            v = products.v[None, None, None, v_state.index]
            multiply(products.values, products.out, products.p, v, True)
            warpgroup.wait_group(0)
        pipes.v.consumer_release(v_state)


def asked_of(storage: Any, stages: int, full: cute.Pointer) -> Asked:
    return Asked(storage.asked.get_tensor(cute.make_layout(stages)), full)
