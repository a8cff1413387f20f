"""Tiles of blocks that have not started: cluster launch control (PTX ISA, "clusterlaunchcontrol").

The launch has a block, or a pair, per tile of queries. One that is done with its tile has the hardware cancel
one that waits for its turn, and computes that one's tile instead: queries, barriers and tensor memory are set
up once, and no counter has to be reset. Tiles of blocks that nobody cancels are computed by these themselves,
so that any answer is a right one.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, const_expr, cute
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

from fa4flex.kernels.common.arguments import Arguments
from fa4flex.kernels.common.cluster import Cluster, arrive_once
from fa4flex.kernels.common.hooks import Hooks
from fa4flex.kernels.common.next_tile import NextTile
from fa4flex.kernels.common.tile_scheduler import TileScheduler
from fa4flex.kernels.fwd_sm100.config import Config

ANSWER = 16
"""Bytes."""

NONE_LEFT = 0x7FFFFFFF
"""Passes for the index of a block, and is past the last tile."""


class Cancelling(TileScheduler):
    """The tiles of a block that takes over those of others. `number` of a NextTile is the answer, int32
    [4]."""

    def __init__(self, config: Config, hooks: Hooks, cluster: Cluster) -> None:
        super().__init__(config, hooks, config.ctas, looped=True)
        self.cluster = cluster

    @cute.jit
    def take(
        self, number: Int32, arguments: Arguments, next_tile: cutlass.Constexpr[NextTile], phase: Int32
    ) -> Int32:
        """One warp's: asks for another tile, once all have read the last answer. The first CTA of a pair asks
        for both; each awaits the answer at a barrier of its own."""
        if self.cluster.leads():
            cute.arch.mbarrier_wait(next_tile.empty, phase ^ 1)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(next_tile.full, ANSWER)
        if self.cluster.leads():
            with cute.arch.elect_one():
                cute.arch.issue_clc_query(next_tile.full, next_tile.number.iterator, self.ctas > 1)
        return self.receive(number, next_tile, phase)

    def publish(self, following: Int32, next_tile: NextTile, phase: Int32) -> None:
        """Nothing: the hardware answers all."""

    @cute.jit
    def receive(self, number: Int32, next_tile: cutlass.Constexpr[NextTile], phase: Int32) -> Int32:
        cute.arch.mbarrier_wait(next_tile.full, phase)
        block = cute.arch.make_warp_uniform(_cancelled(Int32(next_tile.number.iterator.toint())))
        # The next answer comes through the asynchronous proxy: it must not pass the reading of this one.
        cute.arch.fence_proxy("async.shared", space="cta")
        arrive_once(next_tile.empty, first=const_expr(self.ctas > 1))
        return block // self.ctas


@dsl_user_op
def _cancelled(answer: Int32, *, loc: Any = None, ip: Any = None) -> Int32:
    """First block of the cluster that was cancelled, or NONE_LEFT: what the answer at a shared address
    says."""
    query = "clusterlaunchcontrol.query_cancel"
    return Int32(
        llvm.inline_asm(
            T.i32(),
            [answer.ir_value(loc=loc, ip=ip)],
            "{ .reg .b128 answer; .reg .b64 low, high; .reg .pred some; "
            "ld.shared.v2.b64 {low, high}, [$1]; mov.b128 answer, {low, high}; "
            f"{query}.is_canceled.pred.b128 some, answer; mov.b32 $0, {NONE_LEFT:#x}; "
            f"@some {query}.get_first_ctaid::x.b32.b128 $0, answer; }}",
            "=r,r",
            has_side_effects=True,
            is_align_stack=False,
            asm_dialect=llvm.AsmDialect.AD_ATT,
        )
    )
