"""A consumer warpgroup for wide heads: it has the same 64 keys as the others, and of their dK and dV, and of
dQ, a part of the columns.

The sums of 128 keys, or they and what else a variant keeps, take more registers than there are where heads or
values are wider than 128. Scores are shared out by queries, so that each is computed once; then P' and dS' go
through shared memory, because all columns need them all.
"""

from __future__ import annotations

from dataclasses import replace

from cutlass import Int32, cute
from cutlass.cute.nvgpu import warpgroup

from fa4flex.kernels.bwd_sm90.consumer import Collector, Consumer, Tiles
from fa4flex.kernels.bwd_sm90.resources import Mmas, Operands, Shared, transposed
from fa4flex.kernels.bwd_sm90.warpgroup import Made, Warpgroup
from fa4flex.kernels.common.backward import KeyWork
from fa4flex.kernels.common.fragment import multiply
from fa4flex.kernels.common.transfer import States, release


class ColumnConsumer(Consumer):
    def operands(self, mmas: Mmas, shared: Shared, lane: Int32, w: Int32) -> Operands:
        dv, dk = mmas.dv.get_slice(lane), mmas.dk.get_slice(lane)
        assert shared.p is not None
        return replace(
            super().operands(mmas, shared, lane, w),
            p_t=mmas.dv.make_fragment_A(dv.partition_A(transposed(shared.p))),
            ds_t=mmas.dk.make_fragment_A(dk.partition_A(transposed(shared.ds))),
        )

    def tiles(self, shared: Shared, w: Int32) -> Tiles:
        def rows(x: cute.Tensor) -> cute.Tensor:
            return cute.local_tile(x, (self.config.queries, cute.size(x, mode=[1])), (w, 0, None))

        def columns(x: cute.Tensor) -> cute.Tensor:
            width, queries = cute.size(x, mode=[1]) // self.config.consumers, self.config.tile_m
            return cute.local_tile(transposed(x), (width, queries), (w, 0, None))

        q, dout = shared.q, shared.dout
        return Tiles(shared.k, shared.v, rows(q), rows(dout), columns(q), columns(dout))

    def first_key(self, work: KeyWork, w: Int32, lane: Int32) -> Int32:
        return super().first_key(work, Int32(0), lane)

    def first_query(self, tile: Int32, w: Int32, lane: Int32) -> Int32:
        return super().first_query(tile, w, lane) + w * self.config.queries

    def first_column(self, width: int, w: Int32) -> Int32 | int:
        return w * width

    def my_rows(self, statistic: cute.Tensor, w: Int32) -> cute.Tensor:
        return cute.local_tile(statistic, (self.config.queries,), (w,))

    def score_tile(self, w: Int32) -> tuple[Int32, Int32]:
        return Int32(0), w

    def products(
        self,
        mine: Warpgroup,
        collector: Collector,
        made: Made,
        states: States,
        count: Int32,
        parity: Int32,
    ) -> None:
        shared, mmas, operands, (q_state, do_state) = mine.shared, mine.mmas, mine.operands, states
        assert shared.p is not None and operands.p_t is not None and operands.ds_t is not None
        self.share(mine, shared.p[None, None, parity], mmas.scores, made.p, False)
        self.share(mine, shared.ds[None, None, parity], mmas.scores, made.ds, self.along_keys)
        self.meet()
        p_t, ds_t = operands.p_t[None, None, None, parity], operands.ds_t[None, None, None, parity]
        multiply(mmas.dv, operands.dv, p_t, operands.dout_t[None, None, None, do_state.index], True)
        multiply(mmas.dk, operands.dk, ds_t, operands.q_t[None, None, None, q_state.index], True)
        dq = [self.query_gradient(0, mine, parity)]
        # dQ comes last: the next tiles of Q and dO come under its product, and there is room for few.
        warpgroup.wait_group(2)
        release(mine.pipes.dout, do_state)
        warpgroup.wait_group(1)
        release(mine.pipes.q, q_state)
        warpgroup.wait_group(0)
        self.hand_sums(mine, dq, count)
