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
from fa4flex.kernels.bwd_sm90.product_split import Given, KeyGradient, ValueGradient
from fa4flex.kernels.bwd_sm90.resources import Mmas, Operands, Shared, transposed
from fa4flex.kernels.bwd_sm90.roles import DS_FREE, DS_SHARED, SHARES, WEIGHTS_READ, of_all
from fa4flex.kernels.common.backward import KeyWork
from fa4flex.kernels.common.barriers import Pipes, arrive, sync
from fa4flex.kernels.common.cluster import Cluster
from fa4flex.kernels.common.fragment import multiply
from fa4flex.kernels.common.transfer import States, release

PAIR = Cluster(2)


class PairedValueGradient(ValueGradient):
    """S', P' and dV."""

    def first_key(self, work: KeyWork, w: Int32, lane: Int32) -> Int32:
        return super().first_key(work, w, lane) + PAIR.rank() * KEYS

    @cute.jit
    def step(
        self,
        given: cutlass.Constexpr[Given],
        shared: cutlass.Constexpr[Shared],
        pipes: cutlass.Constexpr[Pipes],
        states: States,
        places: tuple[Int32, Int32, Int32, Int32],
        masked: cutlass.Constexpr[bool],
    ) -> None:
        """One tile of queries. P' is read under the product for dV, and may then be overwritten."""
        mmas, operands, _ = given
        p = self.made(given, shared, pipes, states, places, masked)
        multiply(mmas.dv, operands.dv, p, operands.dout_t[None, None, None, states[1].index], True)
        sync(of_all(WEIGHTS_READ, self.config.consumers))
        warpgroup.wait_group(0)
        release(pipes.dout, states[1])


class PairedKeyGradient(KeyGradient):
    """dP', dS', dK and dQ."""

    def first_key(self, work: KeyWork, w: Int32, lane: Int32) -> Int32:
        return super().first_key(work, w, lane) + PAIR.rank() * KEYS

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
        given: cutlass.Constexpr[Given],
        shared: cutlass.Constexpr[Shared],
        pipes: cutlass.Constexpr[Pipes],
        states: States,
        places: tuple[Int32, Int32, Int32, Int32],
        masked: cutlass.Constexpr[bool],
    ) -> None:
        """One tile of queries, and dQ of the one before."""
        mmas, operands, _ = given
        _, lane, _, count = places
        q_t = operands.q_t[None, None, None, states[0].index]
        dprob = self.made(given, shared, pipes, states, lane)
        ds = self.weighed(dprob, shared, lane)
        arrive(of_all(WEIGHTS_READ, self.config.consumers))
        self.put(shared, mmas, ds, places)
        if count > 0:
            before = count - 1
            dq = self.pair_gradient((mmas, operands), pipes, before)
            multiply(mmas.dk, operands.dk, ds, q_t, True)
            warpgroup.wait_group(1)
            self.free(pipes, before)
            self.hand_sums([dq], shared, (lane, Int32(0), before))
            warpgroup.wait_group(0)
        else:
            multiply(mmas.dk, operands.dk, ds, q_t, True)
            # Once, under a product.
            cute.arch.mbarrier_wait(pipes.k_peer_full, 0)
            warpgroup.wait_group(0)
        release(pipes.q, states[0])

    @cute.jit
    def finish(
        self,
        given: cutlass.Constexpr[tuple[Mmas, Operands]],
        shared: cutlass.Constexpr[Shared],
        pipes: cutlass.Constexpr[Pipes],
        where: tuple[Int32, Int32],
    ) -> None:
        """dQ of the last tile of queries. Where there is none, keys are waited for that dV is not to meet."""
        lane, count = where
        if count == 0:
            cute.arch.mbarrier_wait(pipes.k_peer_full, 0)
        else:
            dq = self.pair_gradient(given, pipes, count - 1)
            warpgroup.wait_group(0)
            self.free(pipes, count - 1)
            self.hand_sums([dq], shared, (lane, Int32(0), count - 1))

    def put(
        self, shared: Shared, mmas: Mmas, ds: cute.Tensor, places: tuple[Int32, Int32, Int32, Int32]
    ) -> None:
        """dS' to shared memory, from where it is sent to the other CTA."""
        _, lane, w, count = places
        sync(DS_FREE)
        self.share(shared.ds[None, None, count % SHARES], mmas.dprob, ds, (lane, w), False)
        cute.arch.fence_proxy("async.shared", space="cta")
        arrive(DS_SHARED)

    def free(self, pipes: Pipes, step: Int32) -> None:
        """Tells the other CTA that its dS' of a step has been read."""
        barrier, other = pipes.ds_empty + step % SHARES, 1 - PAIR.rank()
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(barrier, other)

    def pair_gradient(self, given: tuple[Mmas, Operands], pipes: Pipes, step: Int32) -> cute.Tensor:
        """Half of the columns of dQ of a step, once its products are waited for. When dS' of the other CTA
        has come, this one's own is there too: who expects it has seen it."""
        mmas, operands = given
        mma, (shape,), stage = mmas.dq[0], self.config.dq_shapes, step % SHARES
        (ds, own), (_, others) = operands.for_dq
        cute.arch.mbarrier_wait(pipes.ds_full + stage, step // SHARES % 2)
        dq = cute.make_rmem_tensor(mma.partition_shape_C(shape), cutlass.Float32)
        multiply(mma, dq, ds[None, None, None, stage], own, False)
        multiply(mma, dq, ds[None, None, None, SHARES + stage], others, True)
        return dq
