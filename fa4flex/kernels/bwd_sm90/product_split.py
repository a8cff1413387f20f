"""Consumer warpgroups for wide heads, which have the same 64 keys and share out products: the first one has
S' and dV, the other dP' and dK.

So the sums of 64 keys take half of the registers of each, and what both sums multiply lies in registers as it
was made: P' of one warpgroup, dS' of the other. Of the registers that are left, K and V, which are the first
operands of every step's scores, take as many as they are wide. P' goes to the other warpgroup through shared
memory in 32 bits, weighed by the slopes of scores: only the first one knows the variant. dQ needs dS alone,
and each has half of its columns.
"""

from __future__ import annotations

import cutlass
from cutlass import Int32, cute
from cutlass.cute.nvgpu import warp, warpgroup

from fa4flex.kernels.bwd_sm90.config import KEYS, Config
from fa4flex.kernels.bwd_sm90.consumer import Collector, Consumer, Tiles
from fa4flex.kernels.bwd_sm90.resources import Shared, transposed
from fa4flex.kernels.bwd_sm90.roles import SCORES, WEIGHED, of_all
from fa4flex.kernels.bwd_sm90.warpgroup import LogSums, Step, Warpgroup
from fa4flex.kernels.common.backward import BackwardTileScheduler, KeyWork
from fa4flex.kernels.common.barriers import Pipes, arrive, sync
from fa4flex.kernels.common.fragment import as_operand, multiply, rows_and_columns
from fa4flex.kernels.common.hooks import Hooks
from fa4flex.kernels.common.transfer import States, release
from fa4flex.kernels.common.transposed import Slab
from fa4flex.kernels.plan.topology import WARP, WARPGROUP

LANES = WARP * WARPGROUP
"""Threads of a warpgroup."""


class ProductConsumer(Consumer):
    """Consumer of one of the products' halves. number: which warpgroup it is; sums: which of (dK, dV) it
    has."""

    number: int
    sums: int

    def __init__(self, config: Config, hooks: Hooks, scheduler: BackwardTileScheduler) -> None:
        super().__init__(config, hooks, scheduler)
        self.batches = ((self.sums,),)

    def warpgroup_index(self, thread: Int32) -> Int32:
        return Int32(self.number)

    def tiles(self, shared: Shared, w: Int32) -> Tiles:
        q, dout = shared.q, shared.dout
        return Tiles(shared.k, shared.v, q, dout, transposed(q), transposed(dout))

    def first_key(self, work: KeyWork, w: Int32, lane: Int32) -> Int32:
        return super().first_key(work, Int32(0), lane)

    def score_tile(self, w: Int32) -> tuple[Int32, Int32]:
        return Int32(0), Int32(0)

    def scores_of(self, mma: cute.TiledMma) -> cute.Tensor:
        """Registers of S' or dP'."""
        return cute.make_rmem_tensor(mma.partition_shape_C((KEYS, self.config.queries)), cutlass.Float32)

    def keep_rows(self, mma: cute.TiledMma, rows: cute.Tensor, kept: cute.Tensor, lane: Int32) -> None:
        """Rows of K or V to registers, as the first operand of a product."""
        atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transpose=False, num_matrices=4), rows.element_type)
        copy = cute.make_tiled_copy_A(atom, mma).get_slice(lane)
        cute.copy(copy, copy.partition_S(rows), copy.retile(kept))

    def fours(
        self, acc: cute.Tensor, shown: cute.Tensor, lane: Int32
    ) -> list[tuple[cute.Tensor, cute.Tensor]]:
        """Registers of S' or dP' by fours, and where a lane's are in shared memory: no two lanes meet in a
        bank."""
        places = cute.logical_divide(shown, cute.make_layout(4))
        layout = cute.make_layout(4)
        count = cute.size(acc) // 4
        return [
            (cute.make_tensor(acc.iterator + 4 * j, layout), places[None, j * LANES + lane])
            for j in range(count)
        ]


class ValueGradient(ProductConsumer):
    """S', P' and dV."""

    number = 0
    sums = 1

    def await_keys(self, pipes: Pipes, phase: Int32) -> None:
        """Waits for K alone, which comes first."""
        cute.arch.mbarrier_wait(pipes.k_full, phase if self.config.persistent else 0)

    def keep(self, mine: Warpgroup) -> None:
        if self.config.keeps_k:
            self.keep_rows(mine.mmas.scores, mine.shared.k, mine.operands.k, mine.lane)

    @cute.jit
    def step(
        self,
        mine: cutlass.Constexpr[Warpgroup],
        collector: cutlass.Constexpr[Collector],
        states: States,
        at: Step,
        masked: cutlass.Constexpr[bool],
    ) -> None:
        """One tile of queries. P' is shown before dV is multiplied, so that dS' is made meanwhile."""
        operands, (_, do_state) = mine.operands, states
        p = self.made(mine, collector, states, at.tile, masked)
        multiply(mine.mmas.dv, operands.dv, p, operands.dout_t[None, None, None, do_state.index], True)
        # Without a fence: what this warpgroup has written, no product reads.
        sync(of_all(SCORES, self.config.consumers))
        dq = [self.query_gradient(0, mine, at.count % 2)]
        warpgroup.wait_group(1)
        release(mine.pipes.dout, do_state)
        warpgroup.wait_group(0)
        self.hand_sums(mine, dq, at.count)

    def made(
        self, mine: Warpgroup, collector: Collector, states: States, tile: Int32, masked: bool
    ) -> cute.Tensor:
        """P' as an operand, which the other warpgroup has been told of."""
        mmas, operands, (q_state, _) = mine.mmas, mine.operands, states
        self.await_step(mine.pipes, states)
        log_sums = self.log_sums(mine.shared.lse2[None, q_state.index], mine.lane)
        scores = self.scores_of(mmas.scores)
        q = operands.q[None, None, None, q_state.index]
        multiply(mmas.scores, scores, operands.k, q, False, self.config.depths[0])
        warpgroup.wait_group(0)
        q_first = self.first_query(tile, mine.number, mine.lane)
        p = self.shown(mine, scores, collector.slab, log_sums, q_first, masked)
        release(mine.pipes.q, q_state)
        arrive(of_all(WEIGHED, self.config.consumers))
        return p

    def shown(
        self,
        mine: Warpgroup,
        scores: cute.Tensor,
        slab: Slab,
        log_sums: LogSums,
        q_first: Int32,
        masked: bool,
    ) -> cute.Tensor:
        """P' as an operand; to shared memory, for dS', P' times the slopes of scores; of elementwise weights
        the slopes alone."""
        shared, lane, lse2 = mine.shared, mine.lane, log_sums.first
        grid, together = rows_and_columns(scores), self.together
        p = cute.make_rmem_tensor(as_operand(scores).shape, shared.v.element_type)
        factor = slab.at.scale_log2 if self.hooks.factor is None else self.hooks.factor(slab.at)
        assert shared.p is not None
        fours = self.fours(scores, shared.p, lane)
        columns = self.config.queries // 4
        for first in range(0, columns, together):
            here = lse2
            if first + together < columns:
                lse2 = self.statistics(log_sums.rows, lane, first + together, together)
            slopes = self.exponentials(grid, slab.part(first, together), here, factor, q_first, masked)
            self.narrow_columns(scores, p, first, together)
            if self.hooks.elementwise:
                part = slab.part(first, together)
                slopes = self.show_pairs(grid, None, part, slopes, q_first, masked)
            for (r, c), slope in slopes.items():
                grid[r, c] = grid[r, c] * slope
            for registers, place in fours[first // 2 : (first + together) // 2]:
                cute.autovec_copy(registers, place)
        return p


class KeyGradient(ProductConsumer):
    """dP', dS' and dK."""

    number = 1
    sums = 0
    alike = True

    def keep(self, mine: Warpgroup) -> None:
        self.keep_rows(mine.mmas.dprob, mine.shared.v, mine.operands.v, mine.lane)

    @cute.jit
    def step(
        self,
        mine: cutlass.Constexpr[Warpgroup],
        collector: cutlass.Constexpr[Collector],
        states: States,
        at: Step,
        masked: cutlass.Constexpr[bool],
    ) -> None:
        """One tile of queries. P' has been read when all have met, and is then written anew."""
        mmas, operands, (q_state, _) = mine.mmas, mine.operands, states
        parity = at.count % 2
        dprob = self.dprob(mine, states)
        ds = self.weighed(dprob, mine)
        self.share(mine, mine.shared.ds[None, None, parity], mmas.dprob, ds, self.along_keys)
        self.meet()
        dq = [self.query_gradient(0, mine, parity)]
        multiply(mmas.dk, operands.dk, ds, operands.q_t[None, None, None, q_state.index], True)
        warpgroup.wait_group(1)
        self.hand_sums(mine, dq, at.count)
        warpgroup.wait_group(0)
        release(mine.pipes.q, q_state)

    def dprob(self, mine: Warpgroup, states: States) -> cute.Tensor:
        """dP', less its rows' sums."""
        mmas, operands, (_, do_state) = mine.mmas, mine.operands, states
        self.await_step(mine.pipes, states)
        dprob = self.scores_of(mmas.dprob)
        self.begin_dprob(dprob, mine.shared.delta[None, do_state.index], mine.lane)
        dout = operands.dout[None, None, None, do_state.index]
        begun = not self.hooks.elementwise
        multiply(mmas.dprob, dprob, operands.v, dout, begun, self.config.depths[1])
        warpgroup.wait_group(0)
        release(mine.pipes.dout, do_state)
        return dprob

    def weighed(self, dprob: cute.Tensor, mine: Warpgroup) -> cute.Tensor:
        """dS' as an operand: dP', less its rows' sums, times what the other warpgroup shows."""
        shared = mine.shared
        assert shared.p is not None
        sync(of_all(WEIGHED, self.config.consumers))
        for registers, place in self.fours(dprob, shared.p, mine.lane):
            weights = cute.make_rmem_tensor((4,), cutlass.Float32)
            cute.autovec_copy(place, weights)
            for i in range(4):
                registers[i] = registers[i] * weights[i]
        return self.narrowed(dprob, shared.k.element_type)
