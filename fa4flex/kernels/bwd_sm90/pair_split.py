"""Consumer warpgroups of a pair of CTAs, which have 64 keys each and share out products as one CTA does
(product_split.py), but dQ: each CTA multiplies half of its columns, for the keys of both.

What is added up in the L2 cache is half as much then, and that is what limits wide heads. Each CTA sends its
dS' to the other, and those columns of the other's keys lie where V was, which registers keep. dQ of a step is
multiplied in the next one: dS' of the other CTA comes meanwhile.
"""

from __future__ import annotations

import cutlass
from cutlass import Int32, cute
from cutlass.cute.nvgpu import warpgroup

from fa4flex.kernels.bwd_sm90.config import KEYS
from fa4flex.kernels.bwd_sm90.product_split import KeyGradient, ValueGradient
from fa4flex.kernels.bwd_sm90.resources import Mmas, Shared, transposed
from fa4flex.kernels.bwd_sm90.roles import DS_FREE, DS_SHARED, SHARES, WEIGHTS_READ, of_all
from fa4flex.kernels.bwd_sm90.warpgroup import Step, Warpgroup
from fa4flex.kernels.common.backward import KeyWork
from fa4flex.kernels.common.barriers import Pipes, arrive, sync
from fa4flex.kernels.common.cluster import Cluster
from fa4flex.kernels.common.fragment import multiply
from fa4flex.kernels.common.operand_gradients import Collector
from fa4flex.kernels.common.transfer import States, release

PAIR = Cluster(2)


class PairedValueGradient(ValueGradient):
    """S', P' and dV."""

    def first_key(self, work: KeyWork, w: Int32, lane: Int32) -> Int32:
        return super().first_key(work, w, lane) + PAIR.rank() * KEYS

    @cute.jit
    def step(
        self,
        mine: cutlass.Constexpr[Warpgroup],
        collector: cutlass.Constexpr[Collector],
        states: States,
        at: Step,
        masked: cutlass.Constexpr[bool],
    ) -> None:
        """One tile of queries. P' is read under the product for dV, and may then be overwritten."""
        operands, (_, do_state) = mine.operands, states
        p = self.made(mine, collector, states, at.tile, masked)
        multiply(mine.mmas.dv, operands.dv, p, operands.dout_t[None, None, None, do_state.index], True)
        sync(of_all(WEIGHTS_READ, self.config.consumers))
        warpgroup.wait_group(0)
        release(mine.pipes.dout, do_state)


class PairedKeyGradient(KeyGradient):
    """dP', dS', dK and dQ."""

    def first_key(self, work: KeyWork, w: Int32, lane: Int32) -> Int32:
        return super().first_key(work, w, lane) + PAIR.rank() * KEYS

    def dq_number(self, mine: Warpgroup) -> Int32:
        return Int32(0)

    def kept(self, pipes: Pipes) -> None:
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(pipes.v_kept)

    def for_dq(
        self, mmas: Mmas, shared: Shared, lane: Int32, w: Int32
    ) -> tuple[tuple[cute.Tensor, ...], ...]:
        """dS, by stage, and columns of K: of this CTA's keys, and of the other's."""
        ((rows, columns),), mma = self.config.dq_shapes, mmas.dq[0]
        one = mma.get_slice(lane)
        own = cute.local_tile(transposed(shared.k), (columns, KEYS), (PAIR.rank(), 0))
        assert shared.k_peer is not None
        ds = mma.make_fragment_A(one.partition_A(cute.local_tile(shared.ds, (rows, KEYS), (0, 0, None))))
        keys = (own, transposed(shared.k_peer))
        return tuple((ds, mma.make_fragment_B(one.partition_B(k_t))) for k_t in keys)

    @cute.jit
    def step(
        self,
        mine: cutlass.Constexpr[Warpgroup],
        collector: cutlass.Constexpr[Collector],
        states: States,
        at: Step,
        masked: cutlass.Constexpr[bool],
    ) -> None:
        """One tile of queries, and dQ of the one before."""
        mmas, operands, (q_state, _) = mine.mmas, mine.operands, states
        q_t = operands.q_t[None, None, None, q_state.index]
        dprob = self.dprob(mine, states)
        ds = self.weighed(dprob, mine)
        arrive(of_all(WEIGHTS_READ, self.config.consumers))
        self.put(mine, ds, at.count)
        if at.count > 0:
            before = at.count - 1
            dq = self.pair_gradient(mine, before)
            multiply(mmas.dk, operands.dk, ds, q_t, True)
            warpgroup.wait_group(1)
            self.free(mine.pipes, before)
            self.hand_sums(mine, [dq], before)
            warpgroup.wait_group(0)
        else:
            multiply(mmas.dk, operands.dk, ds, q_t, True)
            # Once, under a product.
            cute.arch.mbarrier_wait(mine.pipes.k_peer_full, 0)
            warpgroup.wait_group(0)
        release(mine.pipes.q, q_state)

    @cute.jit
    def finish(self, mine: cutlass.Constexpr[Warpgroup], count: Int32) -> None:
        """dQ of the last tile of queries. Where there is none, keys are waited for that dV is not to meet."""
        if count == 0:
            cute.arch.mbarrier_wait(mine.pipes.k_peer_full, 0)
        else:
            dq = self.pair_gradient(mine, count - 1)
            warpgroup.wait_group(0)
            self.free(mine.pipes, count - 1)
            self.hand_sums(mine, [dq], count - 1)

    def put(self, mine: Warpgroup, ds: cute.Tensor, count: Int32) -> None:
        """dS' to shared memory, from where it is sent to the other CTA."""
        sync(DS_FREE)
        self.share(mine, mine.shared.ds[None, None, count % SHARES], mine.mmas.dprob, ds, False)
        cute.arch.fence_proxy("async.shared", space="cta")
        arrive(DS_SHARED)

    def free(self, pipes: Pipes, step: Int32) -> None:
        """Tells the other CTA that its dS' of a step has been read."""
        barrier, other = pipes.ds_empty + step % SHARES, 1 - PAIR.rank()
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(barrier, other)

    def pair_gradient(self, mine: Warpgroup, step: Int32) -> cute.Tensor:
        """Half of the columns of dQ of a step, once its products are waited for. When dS' of the other CTA
        has come, this one's own is there too: who expects it has seen it."""
        mma, (shape,), stage = mine.mmas.dq[0], self.config.dq_shapes, step % SHARES
        (ds, own), (_, others) = mine.operands.for_dq
        cute.arch.mbarrier_wait(mine.pipes.ds_full + stage, step // SHARES % 2)
        dq = cute.make_rmem_tensor(mma.partition_shape_C(shape), cutlass.Float32)
        multiply(mma, dq, ds[None, None, None, stage], own, False)
        multiply(mma, dq, ds[None, None, None, SHARES + stage], others, True)
        return dq
