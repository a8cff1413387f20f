"""Tiles that persistent blocks take by the first counters of a launch, zero before and after it: how many
were taken, and how many blocks have run out of them."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Int32, cute

from fa4flex.kernels.common.work import Work


@dataclass(frozen=True)
class NextTile:
    """Slot in which the number of the next tile is handed over, int32 [1], between two barriers: it is there,
    and every warp has read it. Or the tile itself, as the numbers of a Work."""

    number: cute.Tensor
    full: cute.Pointer
    empty: cute.Pointer


@cute.jit
def take(counters: cute.Tensor, stride: Int32) -> Int32:
    """One warp's: the number of this block's next tile. The first `stride` tiles are those that blocks begin
    with."""
    taken = Int32(0)
    if cute.arch.lane_idx() == 0:
        taken = cute.arch.atomic_add(counters.iterator, Int32(1), sem="relaxed", scope="gpu")
    return stride + cute.arch.shuffle_sync(taken, 0)


@cute.jit
def publish(following: Int32, next_tile: cutlass.Constexpr[NextTile], phase: Int32) -> None:
    """The same warp's: hand the number to the others, once they have read the last one."""
    cute.arch.mbarrier_wait(next_tile.empty, phase)
    with cute.arch.elect_one():
        next_tile.number[0] = following
        cute.arch.mbarrier_arrive(next_tile.full)


@cute.jit
def receive(next_tile: cutlass.Constexpr[NextTile], phase: Int32) -> Int32:
    """The others': the number of this block's next tile."""
    cute.arch.mbarrier_wait(next_tile.full, phase)
    following = cute.arch.make_warp_uniform(next_tile.number[0])
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(next_tile.empty)
    return following


@cute.jit
def publish_work(work: Work, next_tile: cutlass.Constexpr[NextTile], phase: Int32) -> None:
    """Publish the tile itself, which takes searching, in place of its number."""
    cute.arch.mbarrier_wait(next_tile.empty, phase)
    with cute.arch.elect_one():
        for i, number in enumerate(work):
            next_tile.number[i] = Int32(number)
        cute.arch.mbarrier_arrive(next_tile.full)


@cute.jit
def receive_work(next_tile: cutlass.Constexpr[NextTile], phase: Int32) -> Work:
    """Receive what `publish_work` published."""
    cute.arch.mbarrier_wait(next_tile.full, phase)
    said = cute.make_rmem_tensor((len(Work._fields),), Int32)
    cute.autovec_copy(next_tile.number, said)
    *place, valid = (cute.arch.make_warp_uniform(said[i]) for i in range(len(Work._fields)))
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(next_tile.empty)
    return Work._make((*place, Boolean(valid != 0)))


@cute.jit
def finish(counters: cute.Tensor, blocks: Int32) -> None:
    """The taking warp's: the last block to run out of tiles leaves the counters as they were found."""
    if cute.arch.lane_idx() == 0:
        done = cute.arch.atomic_add(counters.iterator + 1, Int32(1), sem="acq_rel", scope="gpu")
        if done == blocks - 1:
            counters[0] = Int32(0)
            counters[1] = Int32(0)
