"""Rings whose stages are filled by warps that gather rows (cp.async): full when the copies of all lanes have
landed."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from cutlass import cute, pipeline

from fa4flex.kernels.plan.topology import WARP


class _Filled:
    """Producer's side: each lane arrives once its copies so far have landed."""

    def producer_acquire(self, state: pipeline.PipelineState) -> None:
        self.sync_object_empty.wait(state.index, state.phase)  # type: ignore[attr-defined]

    def producer_commit(self, state: pipeline.PipelineState) -> None:
        barrier = self.producer_get_barrier(state)  # type: ignore[attr-defined]
        cute.arch.cp_async_mbarrier_arrive_noinc(barrier)


class _Fenced(_Filled):
    """Consumer's side where products read stages: asynchronously, and such copies are writes of the generic
    proxy."""

    def consumer_wait(self, state: pipeline.PipelineState, *given: Any, **more: Any) -> None:
        super().consumer_wait(state, *given, **more)  # type: ignore[misc]
        cute.arch.fence_proxy("async.shared", space="cta")


@dataclass(frozen=True)
class GatheringRing(_Filled, pipeline.PipelineTmaAsync):
    """Stages that threads read."""


@dataclass(frozen=True)
class GatheringProductRing(_Fenced, pipeline.PipelineTmaAsync):
    """Stages that wgmma reads."""


@dataclass(frozen=True)
class GatheringTensorCoreRing(_Fenced, pipeline.PipelineTmaUmma):
    """Stages that tcgen05.mma reads."""


FilledRing = GatheringRing | GatheringProductRing | GatheringTensorCoreRing


def tile_ring(
    barriers: cute.Pointer,
    tile: cute.Tensor,
    readers: int,
    gather_warps: int = 0,
    kind: type = GatheringProductRing,
    tiles: int = 1,
) -> Any:
    """A ring on Hopper, whose stages TMA fills, or so many warps that gather rows, and `readers` warps free.
    tile: (rows, columns, stage). kind: of the ring where warps gather. tiles: of this size that a stage has,
    where TMA fills it."""
    thread = pipeline.Agent.Thread
    stage = cute.select(tile.layout, mode=[0, 1])
    ring = pipeline.PipelineTmaAsync.create(
        num_stages=cute.size(tile, mode=[2]),
        producer_group=lanes_of(gather_warps) if gather_warps else pipeline.CooperativeGroup(thread),
        consumer_group=pipeline.CooperativeGroup(thread, readers),
        tx_count=0 if gather_warps else tiles * cute.size_in_bytes(tile.element_type, stage),
        barrier_storage=barriers,
        defer_sync=True,
    )
    return gathering(ring, kind) if gather_warps else ring


def gathering(ring: Any, kind: type) -> Any:
    """The ring with the sides of this kind."""
    return kind(**{field.name: getattr(ring, field.name) for field in fields(ring)})


def lanes_of(warps: int) -> pipeline.CooperativeGroup:
    """All lanes of warps that gather."""
    return pipeline.CooperativeGroup(pipeline.Agent.Thread, WARP * warps)
