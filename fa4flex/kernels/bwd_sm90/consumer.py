"""A consumer warpgroup: 64 keys; it holds their dK and dV in registers while queries pass by.

Scores are transposed: S' = K Q' and dP' = V dO', so that P' and dS', in the registers they were made in, are
operands of dV += P' dO and dK += dS' Q. Only dQ = dS K needs all keys of a block together: dS goes through
shared memory, and dQ, a part per warpgroup, to the warp that adds it up (FlashAttention-3's backward; Shah et
al. 2024, section 3 and appendix B.1).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, const_expr, cute, pipeline, select_
from cutlass.cute.nvgpu import warpgroup
from cutlass.tensor_utils import LayoutEnum

from fa4flex.kernels.bwd_sm90.config import KEYS, Config
from fa4flex.kernels.bwd_sm90.dkv_epilogue import put, staged_sums, store_by_copies, store_by_threads
from fa4flex.kernels.bwd_sm90.resources import Mmas, Operands, Shared, dq_rows, transposed
from fa4flex.kernels.bwd_sm90.roles import DQ_EMPTY, DQ_FULL, SCORES, STORED, of_all
from fa4flex.kernels.bwd_sm90.steps import like_steps, mixed_steps
from fa4flex.kernels.bwd_sm90.warpgroup import LogSums, Made, Progress, Step, Warpgroup
from fa4flex.kernels.common import softpick
from fa4flex.kernels.common.backward import (
    BackwardArguments,
    BackwardTileScheduler,
    KeyGrid,
    KeyWork,
    QueryTiles,
    rows_of,
    written,
)
from fa4flex.kernels.common.barriers import Pipes, arrive, sync
from fa4flex.kernels.common.dropout import ColumnDropout, Columns
from fa4flex.kernels.common.fragment import (
    alike_in_warp,
    as_operand,
    computed_once,
    multiply,
    multiply_narrow,
    narrow,
    rows_and_columns,
)
from fa4flex.kernels.common.hooks import Hooks
from fa4flex.kernels.common.operand_gradients import Collector, sums_of, targets
from fa4flex.kernels.common.transfer import States, read_pair, release, stage_by_fours
from fa4flex.kernels.common.transposed import Slab, Slopes, apply_slopes

PARTS = (16, 12, 10, 8)
"""Columns of a tile that are turned into probabilities together, and whose log-sum-exps are read before they
are needed: the first of which a tile has a whole number. Registers for more there are not."""
DROPPED = (8,)
"""The same with dropout: the columns of 16 queries, of which two by two share hashes."""
SLOPED = 2
"""Columns turned into probabilities together where scores have slopes, for the same reason. Where warpgroups
have keys of their own, elementwise weights take no log-sum-exps with them, and the mask's intervals, which
each part computes anew, would take more."""


@dataclass(frozen=True)
class Tiles:
    """Operands of a warpgroup in shared memory, stages last: for scores, k and v (keys, width), q and dout
    (queries, width); for sums, q_t and dout_t (columns, queries)."""

    k: cute.Tensor
    v: cute.Tensor
    q: cute.Tensor
    dout: cute.Tensor
    q_t: cute.Tensor
    dout_t: cute.Tensor


class Consumer:
    alike = False
    """True if steps with a mask take nothing more than those without."""

    def __init__(self, config: Config, hooks: Hooks, scheduler: BackwardTileScheduler) -> None:
        self.config = config
        self.hooks = hooks
        self.scheduler = scheduler
        columns = config.queries // 4
        parts = PARTS if hooks.dropout is None else DROPPED
        few = hooks.slope is not None and not (hooks.elementwise and config.split == "keys")
        self.together = SLOPED if few else next(n for n in parts if columns % n == 0)
        self.shares = tuple(share for share in hooks.shares if share.rate != "copy")
        """Those of captured tensors that take something else than dS as it lies in shared memory."""
        self.along_keys = config.transposes_dq or len(self.shares) < len(hooks.shares)
        """True if dS lies there along the keys."""
        apart = config.persistent and config.dq_stages == 1
        self.batches: tuple[tuple[int, ...], ...] = ((0,), (1,)) if apart else ((0, 1),)
        """Groups of dK and dV that leave together: shared memory may hold one of them."""
        self.multiplies = hooks.weights == "softmax"
        """True if dS' is P' times dP' less its rows' sums."""
        self.late = any(not share.scaled for share in self.shares)
        """True if slopes come in after what modified scores add to captured tensors was taken."""

    @cute.jit
    def run(
        self,
        arguments: BackwardArguments,
        grid: KeyGrid,
        shared: cutlass.Constexpr[Shared],
        pipes: cutlass.Constexpr[Pipes],
        mmas: cutlass.Constexpr[Mmas],
        stores: cutlass.Constexpr[tuple[Any, ...]],
    ) -> None:
        """stores: of dK and dV, where they leave by the copy engine."""
        config = self.config
        thread = cute.arch.thread_idx()[0]
        warpgroup_index = self.warpgroup_index(thread)
        # Kept: the compiler would read the thread's number anew in each step, and all reads of shared memory
        # would wait for it. What is kept might be anything, so the remainder is said in bits.
        lane = computed_once(thread) & 127
        operands = self.operands(mmas, shared, lane, warpgroup_index)
        mine = Warpgroup(lane, warpgroup_index, shared, pipes, mmas, operands)
        q_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, config.q_stages)
        do_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, config.do_stages)

        @cute.jit
        def accumulate(work: KeyWork, phase: Int32, before: Progress) -> Progress:
            after = self.tile(arguments, work, mine, before, phase)
            if const_expr(config.persistent):
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(pipes.keys_empty)
            self.deliver(arguments, work, mine, stores, after.count - before.count, after.count)
            return after

        self.scheduler.walk(grid, arguments, pipes.next, accumulate, Progress(q_state, do_state, Int32(0)))
        if const_expr(config.persistent):
            # Shared memory must last until what leaves it was read.
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    def warpgroup_index(self, thread: Int32) -> Int32:
        """Number of a thread's warpgroup among consumers."""
        # Not from `thread - 128`, which might be negative: quotients and remainders would be more than bits.
        return cute.arch.make_warp_uniform(thread // 128 - 1)

    @cute.jit
    def tile(
        self,
        arguments: BackwardArguments,
        work: KeyWork,
        mine: cutlass.Constexpr[Warpgroup],
        progress: Progress,
        phase: Int32,
    ) -> Progress:
        """dK and dV of a tile of keys."""
        config = self.config
        mine.operands.dk.fill(0.0)
        mine.operands.dv.fill(0.0)
        heads = Int32(arguments.q.shape[-2])
        if const_expr(config.ctas > 1):
            # Once: other keys come where V was.
            self.await_keys(mine.pipes, phase)
            self.keep(mine)
            self.kept(mine.pipes)
        sums = sums_of(self.shares)
        for g in cutlass.range(work.group, unroll=1):
            h = work.part * work.group + g
            slab = self.slab(arguments, work, h, heads, mine)
            if const_expr(arguments.pulled is not None):
                slab = replace(slab, pulled=rows_of(arguments.pulled, work, h))
            queries = self.scheduler.queries(work, h, arguments)
            collector = self.collector(arguments, slab, sums, mine)
            collector.begin()
            # As late as can be: what a head begins with takes as long as keys take to come.
            if const_expr(config.ctas == 1):
                self.await_keys(mine.pipes, phase)
                self.keep(mine)
                if const_expr(config.persistent):
                    # dK and dV of the tile before have been read: others of the warpgroup meet this warp
                    # before they write there anew.
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
                    if const_expr(config.dk_by_ds):  # noqa: SIM102
                        if g == 0:
                            # And those of another one, where dS of all is.
                            self.meet_others()
            step = functools.partial(self.step, mine, collector)
            if const_expr(config.deterministic and config.masked and not self.alike):
                progress = mixed_steps(step, queries, progress)
            else:
                masked_count = self.masked_count(queries)
                progress = like_steps(step, queries, 0, masked_count, progress, True)
                if const_expr(self.alike or not config.one_body):
                    progress = like_steps(step, queries, masked_count, queries.count, progress, False)
            collector.finish()
        self.finish(mine, progress.count)
        return progress

    def masked_count(self, queries: QueryTiles) -> Int32 | int:
        """Number of steps that are taken with a mask, which come first."""
        if self.alike:
            return 0
        return queries.count if self.config.one_body else queries.masked_count

    def kept(self, pipes: Pipes) -> None:
        """Says that K or V is in registers: nobody waits for it here."""

    def finish(self, mine: Warpgroup, count: Int32) -> None:
        """Does what `count` steps so far left undone, once per tile of keys: nothing here."""

    def await_keys(self, pipes: Pipes, phase: Int32) -> None:
        phase = phase if self.config.persistent else 0
        cute.arch.mbarrier_wait(pipes.k_full, phase)
        cute.arch.mbarrier_wait(pipes.v_full, phase)

    def keep(self, mine: Warpgroup) -> None:
        """Takes what a warpgroup keeps of K or V in registers, once they are there: nothing here."""

    def operands(self, mmas: Mmas, shared: Shared, lane: Int32, w: Int32) -> Operands:
        scores, dprob = mmas.scores.get_slice(lane), mmas.dprob.get_slice(lane)
        dv, dk = mmas.dv.get_slice(lane), mmas.dk.get_slice(lane)
        tiles = self.tiles(shared, w)
        width, width_v = (cute.size(x, mode=[0]) for x in (tiles.q_t, tiles.dout_t))
        return Operands(
            mmas.scores.make_fragment_A(scores.partition_A(tiles.k)),
            mmas.scores.make_fragment_B(scores.partition_B(tiles.q)),
            mmas.dprob.make_fragment_A(dprob.partition_A(tiles.v)),
            mmas.dprob.make_fragment_B(dprob.partition_B(tiles.dout)),
            mmas.dv.make_fragment_B(dv.partition_B(tiles.dout_t)),
            mmas.dk.make_fragment_B(dk.partition_B(tiles.q_t)),
            self.for_dq(mmas, shared, lane, w),
            cute.make_rmem_tensor(dv.partition_shape_C((KEYS, width_v)), Float32),
            cute.make_rmem_tensor(dk.partition_shape_C((KEYS, width)), Float32),
        )

    def for_dq(self, mmas: Mmas, shared: Shared, lane: Int32, w: Int32) -> tuple[Any, ...]:
        """dS, by stage, and K of each product for dQ."""
        config, found = self.config, []
        for mma, shape, place in zip(mmas.dq, config.dq_shapes, config.dq_tiles(w), strict=True):
            ds = cute.local_tile(shared.ds, (shape[0], config.block_keys), (place[0], 0, None))
            k_t = cute.local_tile(transposed(shared.k), (shape[1], config.block_keys), (place[1], 0))
            a, b = (k_t, ds) if config.transposes_dq else (ds, k_t)
            one = mma.get_slice(lane)
            operands = mma.make_fragment_A(one.partition_A(a)), mma.make_fragment_B(one.partition_B(b))
            found.append(operands[::-1] if config.transposes_dq else operands)
        return tuple(found)

    def tiles(self, shared: Shared, w: Int32) -> Tiles:
        config = self.config
        k = cute.local_tile(shared.k, (KEYS, config.head_dim), (w, 0))
        v = cute.local_tile(shared.v, (KEYS, config.head_dim_v), (w, 0))
        return Tiles(k, v, shared.q, shared.dout, transposed(shared.q), transposed(shared.dout))

    def slab(
        self, arguments: BackwardArguments, work: KeyWork, h: Int32, heads: Int32, mine: Warpgroup
    ) -> Slab:
        """Lane l of a warpgroup holds keys l / 4 and l / 4 + 8 of its warp's 16, and of each 8 queries the
        two from 2 (l % 4) on."""
        at = self.scheduler.place(work, h, heads, arguments)
        if self.hooks.elementwise:
            at = at.but(uniform=tuple(map(alike_in_warp, at.uniform)))
        columns = tuple(8 * (c // 2) + c % 2 for c in range(self.config.queries // 4))
        first_key = self.first_key(work, mine.number, mine.lane)
        dropout = ColumnDropout.of(self.hooks.dropout, at, first_key)
        return Slab(at, first_key, (0, 8), columns, dropout=dropout)

    def first_key(self, work: KeyWork, w: Int32, lane: Int32) -> Int32:
        """The first of a thread's two."""
        return work.tile * self.config.tile_n + w * KEYS + lane // 32 * 16 + lane % 32 // 4

    def first_query(self, tile: Int32, w: Int32, lane: Int32) -> Int32:
        """The query of a thread's first column in a step."""
        return tile * self.config.tile_m + lane % 4 * 2

    def first_column(self, width: int, w: Int32) -> Int32 | int:
        """The first column of dK or dV that a warpgroup has."""
        return 0

    def my_rows(self, statistic: cute.Tensor, w: Int32) -> cute.Tensor:
        """The numbers of this warpgroup's queries, among those of a step."""
        return statistic

    def collector(
        self,
        arguments: BackwardArguments,
        slab: Slab,
        sums: tuple[cute.Tensor, ...],
        mine: Warpgroup,
    ) -> Collector:
        """A query head's shares in the gradients of captured tensors."""
        lane, w = mine.lane, mine.number
        number = cute.arch.block_idx()[0] * (4 * self.config.consumers) + 4 * w + lane // 32
        into = targets(tuple(arguments.gradients), number)
        return Collector(self.shares, slab, into, sums, lane % 32)

    @cute.jit
    def step(
        self,
        mine: cutlass.Constexpr[Warpgroup],
        collector: cutlass.Constexpr[Collector],
        states: States,
        at: Step,
        masked: cutlass.Constexpr[bool],
    ) -> None:
        """One tile of queries."""
        parity = at.count % 2
        made = self.score_step(mine, collector, states, at.tile, masked)
        self.products(mine, collector, made, states, at.count, parity)

    def await_step(self, pipes: Pipes, states: States) -> None:
        """Waits for Q and dO before products run: behind their operands, waits and reads of shared memory
        take long."""
        q_state, do_state = states
        q_there, do_there = pipes.q.consumer_try_wait(q_state), pipes.dout.consumer_try_wait(do_state)
        pipes.q.consumer_wait(q_state, q_there)
        pipes.dout.consumer_wait(do_state, do_there)

    def score_step(
        self, mine: Warpgroup, collector: Collector, states: States, tile: Int32, masked: bool
    ) -> Made:
        """P' and dS' of a warpgroup, once Q and dO are there."""
        config, shared, mmas, operands = self.config, mine.shared, mine.mmas, mine.operands
        lane, w = mine.lane, mine.number
        q_state, do_state = states
        scores = cute.make_rmem_tensor(mmas.scores.partition_shape_C((KEYS, config.queries)), Float32)
        dprob = cute.make_rmem_tensor(scores.shape, Float32)
        q_stage, do_stage = q_state.index, do_state.index
        self.await_step(mine.pipes, states)
        log_sums = self.log_sums(self.my_rows(shared.lse2[None, q_stage], w), lane)
        deltas = self.my_rows(shared.delta[None, do_stage], w)
        self.begin_dprob(dprob, deltas, lane)
        if collector.slab.dropout is not None or self.hooks.rectified:
            log_sums = log_sums._replace(deltas=deltas)
        depth, depth_v = config.depths
        begun = self.multiplies
        multiply(mmas.scores, scores, operands.k, operands.q[None, None, None, q_stage], False, depth)
        dout = operands.dout[None, None, None, do_stage]
        multiply(mmas.dprob, dprob, operands.v, dout, begun, depth_v)
        warpgroup.wait_group(1)
        q_first = self.first_query(tile, w, lane)
        early = collector.early(rows_and_columns(scores), q_first, masked)
        # Before exponentials are written down: dS' and its stores then pass between them.
        warpgroup.wait_group(0)
        p = cute.make_rmem_tensor(as_operand(scores).shape, shared.q.element_type)
        slopes = self.probabilities(Made(scores, dprob), p, collector.slab, log_sums, lane, q_first, masked)
        self.take_captured(collector, rows_and_columns(dprob), slopes, q_first, masked, early)
        return Made(p, self.narrowed(dprob, shared.q.element_type))

    def log_sums(self, rows: cute.Tensor, lane: Int32) -> LogSums:
        return LogSums(rows, self.statistics(rows, lane, 0, self.together))

    def products(
        self,
        mine: Warpgroup,
        collector: Collector,
        made: Made,
        states: States,
        count: Int32,
        parity: Int32,
    ) -> None:
        """Products of P' and dS' of a step. parity: the stage of shared memory where they lie."""
        mmas, operands, (p, ds), (q_state, do_state) = mine.mmas, mine.operands, made, states
        self.share(mine, mine.shared.ds[None, None, parity], mmas.scores, ds, self.along_keys)
        # Runs while all warpgroups meet.
        multiply(mmas.dv, operands.dv, p, operands.dout_t[None, None, None, do_state.index], True)
        self.meet()
        dq = [self.query_gradient(0, mine, parity)]
        warpgroup.wait_group(1)
        release(mine.pipes.dout, do_state)
        # Only now, in the registers that P' had.
        dq += [self.query_gradient(i, mine, parity) for i in range(1, len(mmas.dq))]
        multiply(mmas.dk, operands.dk, ds, operands.q_t[None, None, None, q_state.index], True)
        warpgroup.wait_group(1)
        self.hand_over(mine, collector, dq, count)
        warpgroup.wait_group(0)
        release(mine.pipes.q, q_state)

    def query_gradient(self, i: int, mine: Warpgroup, parity: Int32) -> cute.Tensor:
        """A warpgroup's part i of dQ, or of dQ', once its product is waited for."""
        mma, (rows, columns), (ds, k_t) = mine.mmas.dq[i], self.config.dq_shapes[i], mine.operands.for_dq[i]
        shape, a, b = (rows, columns), ds[None, None, None, parity], k_t
        if self.config.transposes_dq:
            shape, a, b = (columns, rows), b, a
        dq = cute.make_rmem_tensor(mma.partition_shape_C(shape), Float32)
        multiply(mma, dq, a, b, False)
        return dq

    def meet(self) -> None:
        """Waits until what all warpgroups have put into shared memory is there for all of their products."""
        cute.arch.fence_proxy("async.shared", space="cta")
        self.meet_others()

    def meet_others(self) -> None:
        sync(of_all(SCORES, self.config.consumers))

    def statistics(self, rows: cute.Tensor, lane: Int32, first: int, count: int) -> cute.Tensor:
        """Numbers of the queries of a thread's columns `first` to `first` + `count`, both even."""
        found = cute.make_rmem_tensor((2, count // 2), Float32)
        pairs = cute.logical_divide(rows, cute.make_layout(2))
        for c in range(count // 2):
            cute.autovec_copy(pairs[None, 2 * first + 4 * c + lane % 4], found[None, c])
        return cute.make_tensor(found.iterator, cute.make_layout(count))

    def probabilities(
        self,
        products: Made,
        p: cute.Tensor,
        slab: Slab,
        log_sums: LogSums,
        lane: Int32,
        q_first: Int32,
        masked: bool,
    ) -> Slopes:
        """P' as an operand, to `p`; returns the slopes that are still to come in. `products` are S' and dP'
        less its rows' sums, which becomes dS': P' times it, and times the score's slope."""
        lse2 = log_sums.first
        grid, ds = (rows_and_columns(x) for x in products)
        later: Slopes = {}
        factor = slab.at.scale_log2 if self.hooks.factor is None else self.hooks.factor(slab.at)
        columns = self.config.queries // 4
        together = self.together
        for first in range(0, columns, together):
            here = lse2
            if first + together < columns:
                lse2 = self.statistics(log_sums.rows, lane, first + together, together)
            part = slab.part(first, together)
            slopes = self.exponentials(grid, part, here, factor, q_first, masked)
            part.pull(grid, ds, q_first)
            if self.hooks.rectified:
                self.rectify(grid, ds, here, self.statistics(log_sums.deltas, lane, first, together), first)
            self.narrow_columns(products.p, p, first, together)
            if slab.dropout is not None:
                columns_here = Columns(first, q_first, part.queries)
                slab.dropout.apply(p, columns_here)
                deltas = self.statistics(log_sums.deltas, lane, first, together)
                slab.dropout.gradients(grid, ds, p, deltas, columns_here)
            if self.hooks.elementwise:
                slopes = self.show_pairs(grid, ds, slab.part(first, together), slopes, q_first, masked)
            elif self.multiplies and slab.dropout is None and not self.config.rounds_first:
                for c in range(first, first + together):
                    for r in range(2):
                        ds[r, c] = grid[r, c] * ds[r, c]
            if self.late:
                later |= slopes
            else:
                apply_slopes(ds, slopes)
        if self.config.rounds_first and self.multiplies:
            multiply_narrow(ds, p)
        return later

    def rectify(
        self, grid: cute.Tensor, ds: cute.Tensor, lse2: cute.Tensor, deltas: cute.Tensor, first: int
    ) -> None:
        """Softpick's weights, and gradients of scores, of the columns from `first` on, which hold u / total
        and dP'."""
        for c in range(cute.size(lse2)):
            base = softpick.base_of(lse2[c])
            for r in range(2):
                u = grid[r, first + c]
                power = softpick.power(u, base)
                ds[r, first + c] = softpick.gradient(power, ds[r, first + c], deltas[c])
                grid[r, first + c] = softpick.rectified(u)

    def show_pairs(
        self,
        grid: cute.Tensor,
        ds: cute.Tensor | None,
        part: Slab,
        slopes: Slopes,
        q_first: Int32,
        masked: bool,
    ) -> Slopes:
        """Write 1 to a part of `grid` for pairs that take part, and 0 for others, whose gradients and slopes
        become 0: dS' of elementwise weights is dP' times the slopes alone. Returns the slopes."""
        columns = range(part.first, part.first + len(part.queries))
        for c in columns:
            for r in range(2):
                grid[r, c] = Float32(1.0)
        if not masked:
            return slopes
        part.mask(self.hooks, grid, q_first)
        if ds is not None:
            for c in columns:
                for r in range(2):
                    ds[r, c] = select_(grid[r, c] > 0, ds[r, c], Float32(0.0))
        return {(r, c): select_(grid[r, c] > 0, x, Float32(0.0)) for (r, c), x in slopes.items()}

    def exponentials(
        self, grid: cute.Tensor, part: Slab, lse2: cute.Tensor, factor: Any, q_first: Int32, masked: bool
    ) -> Slopes:
        """Probabilities of a part of the columns, in place; returns slopes of its scores."""
        slopes = part.slopes(self.hooks, grid, q_first, masked) or {}
        part.modify(self.hooks, grid, q_first, masked)
        if not self.hooks.elementwise:
            for c in range(len(part.queries)):
                for r in range(2):
                    grid[r, part.first + c] = self.weight(grid[r, part.first + c] * factor, lse2[c])
        if masked:
            part.mask(self.hooks, grid, q_first)
        return slopes

    def weight(self, x: Float32, lse2: Float32) -> Float32:
        """The probability of a score in exponents of 2; of softpick, u over the total."""
        if self.hooks.rectified:
            return softpick.signed(x, lse2, softpick.base_of(lse2))
        return cute.math.exp2(x - lse2, fastmath=True)

    def narrow_columns(self, acc: cute.Tensor, target: cute.Tensor, first: int, count: int) -> None:
        """Columns of an accumulator to 16 bits. `target` is an operand: its registers have the same order."""
        layout = cute.make_layout(2 * count)
        source, narrowed = (cute.make_tensor(x.iterator + 2 * first, layout) for x in (acc, target))
        narrow(source, narrowed)

    def begin_dprob(self, dprob: cute.Tensor, deltas: cute.Tensor, lane: Int32) -> None:
        """The product for dP' starts from delta: read later, deltas would take registers of their own, and
        wait behind the products' operands, and exponentials behind them.

        Each of a thread's keys has its own read, so that nothing is to be computed before the product for S'.
        A copy for the second one would be made by the assembler between the products, which it waits for.
        """
        if not self.multiplies:  # nothing is summed over a row, or not all have part in it
            return
        grid = rows_and_columns(dprob)
        pairs = cute.logical_divide(deltas, cute.make_layout(2))
        for c in range(0, self.config.queries // 4, 2):
            for r in range(2):
                grid[r, c], grid[r, c + 1] = read_pair(pairs[None, 2 * c + lane % 4])

    def take_captured(
        self,
        collector: Collector,
        ds: cute.Tensor,
        slopes: Slopes,
        q_first: Int32,
        masked: bool,
        early: dict[int, Slopes],
    ) -> None:
        """Takes what a tile adds to captured tensors. ds (row, column), of modified scores, becomes that of
        scaled ones, where `slopes` were left for here."""
        collector.take(False, ds, q_first, masked, early)
        apply_slopes(ds, slopes)
        collector.take(True, ds, q_first, masked, early)

    def narrowed(self, acc: cute.Tensor, kind: Any) -> cute.Tensor:
        """16-bit numbers, as the A operand of a next product."""
        source = as_operand(acc)
        target = cute.make_rmem_tensor(source.shape, kind)
        narrow(source, target)
        return target

    def share(
        self, mine: Warpgroup, target: cute.Tensor, mma: cute.TiledMma, ds: cute.Tensor, along_keys: bool
    ) -> None:
        """dS' or P' of all warpgroups to shared memory, which holds it along the keys or the queries. Of its
        two stages, each is free when all warpgroups have met for the other one; and, where the writer copies
        it, when that is done with the dQ of the step before the last."""
        order = LayoutEnum.COL_MAJOR if along_keys else LayoutEnum.ROW_MAJOR
        atom = sm90.sm90_get_smem_store_op(order, target.element_type, Float32)
        copy = cute.make_tiled_copy_C(atom, mma).get_slice(mine.lane)
        tile = cute.local_tile(transposed(target), (KEYS, self.config.queries), self.score_tile(mine.number))
        cute.copy(copy, copy.retile(ds), copy.partition_D(tile))

    def score_tile(self, w: Int32) -> tuple[Int32, Int32]:
        """Position of a warpgroup's scores among all, by keys and queries."""
        return w, Int32(0)

    def hand_over(
        self, mine: Warpgroup, collector: Collector, parts: list[cute.Tensor], count: Int32
    ) -> None:
        """A warpgroup's parts of dQ of a step; finished, where they are stored."""
        if not self.config.stores_dq:
            return self.hand_sums(mine, parts, count)
        config, shared, w = self.config, mine.shared, mine.number
        (dq,), stage, kind = parts, count % config.dq_stages, shared.q.element_type
        dq.store(dq.load() * collector.slab.at.scale)
        narrowed = self.narrowed(dq, kind)
        sync(DQ_EMPTY, w, stage)
        rows = dq_rows(config, shared.dq[None, w, stage], kind)
        put(mine.mmas.dq[0], narrowed, rows, mine.lane, config.transposes_dq)
        cute.arch.fence_proxy("async.shared", space="cta")
        arrive(DQ_FULL, w, stage)

    def dq_number(self, mine: Warpgroup) -> Int32:
        """Number of a warpgroup among those that have parts of dQ."""
        return mine.number

    def hand_sums(self, mine: Warpgroup, parts: list[cute.Tensor], count: Int32) -> None:
        """A warpgroup's parts of dQ of a step, to be added up."""
        w, stage = self.dq_number(mine), count % self.config.dq_stages
        memory = mine.shared.dq[None, w, stage]
        sync(DQ_EMPTY, w, stage)
        stage_by_fours(parts, memory, mine.lane, 128)
        arrive(DQ_FULL, w, stage)

    @cute.jit
    def deliver(
        self,
        arguments: BackwardArguments,
        work: KeyWork,
        mine: cutlass.Constexpr[Warpgroup],
        stores: cutlass.Constexpr[tuple[Any, ...]],
        steps: Int32,
        count: Int32,
    ) -> None:
        """dK and dV to global memory, after `steps` of this tile of keys, and `count` of all so far."""
        mmas, operands, lane, w = mine.mmas, mine.operands, mine.lane, mine.number
        sums, products = (operands.dk, operands.dv), (mmas.dk, mmas.dv)
        operands.dk.store(operands.dk.load() * arguments.scale)
        staged = staged_sums(self.config, mine.shared, operands.dk, operands.dv, w)
        last = count % self.config.dq_stages
        if const_expr(not self.config.persistent):
            self.meet_others()
        elif steps > 0:
            if const_expr(self.config.dk_by_ds):
                # Products of all have read dS.
                self.meet_others()
            else:
                # The writer has read all of dQ.
                sync(DQ_EMPTY, w, 1 - last)
        elif const_expr(not self.config.dk_by_ds):
            # What the tile of keys before left there has been stored.
            sync(STORED, w)
        first_key = self.first_key(work, w, Int32(0))
        for batch in self.batches:
            if const_expr(batch != self.batches[0] and self.config.dk_by_ds):
                if steps > 0:
                    # The writer has read all of dQ.
                    sync(DQ_EMPTY, w, 1 - last)
            elif const_expr(batch != self.batches[0]):
                # What left before has been read.
                cute.arch.cp_async_bulk_wait_group(0, read=True)
                sync(STORED, w)
            for i in batch:
                put(products[i], self.narrowed(sums[i], staged[i].element_type), staged[i], lane)
            rows = tuple(staged[i] for i in batch)
            if const_expr(len(stores) > 0):
                some = tuple(stores[i] for i in batch)
                store_by_copies(self.config, some, rows, work, first_key // KEYS, lane, w)
            else:
                targets = tuple(written(arguments)[i] for i in batch)
                columns = tuple(self.first_column(cute.size(x, mode=[1]), w) for x in rows)
                store_by_threads(targets, rows, work, first_key, columns, lane, w)
