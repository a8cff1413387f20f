"""TMA descriptors, and views of what they move."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from cutlass import Float32, Int32, Int64, cute, pipeline
from cutlass.cute.nvgpu import cpasync


@dataclass(frozen=True)
class Transfers:
    """TMA descriptors with the global tensors they move: q, k, out (S, D, H, B), v (D, S, H, B); packed
    tensors are (T, D, H) and (D, T, H)."""

    q: Any
    k: Any
    v: Any
    out: Any


Ring: TypeAlias = pipeline.PipelineTmaAsync | pipeline.PipelineTmaUmma
"""Pipeline that signals that a stage is full or free, on Hopper and on Blackwell."""
READ_ONCE = 0x12F0000000000000
"""Cache policy: the first to be evicted from L2 (createpolicy.fractional.L2::evict_first)."""

Views = tuple[cute.Tensor, cute.Tensor]
"""(shared, global): what a transfer moves, the last mode counting stages and tiles."""

States = tuple[pipeline.PipelineState, pipeline.PipelineState]
"""Pipeline states of a role in its two rings."""


def warp_uniform(states: States) -> States:
    """The same states, the same in all lanes of a warp. Where a loop over tiles has two bodies, the compiler
    does not see that, and moves numbers of stages from each lane's registers before every product."""
    k_state, v_state = (_warp_uniform(state) for state in states[:2])
    return k_state, v_state, *states[2:]


def _warp_uniform(state: pipeline.PipelineState) -> pipeline.PipelineState:
    count, index, phase = (cute.arch.make_warp_uniform(x) for x in (state.count, state.index, state.phase))
    return pipeline.PipelineState(state.stages, count, index, phase)


def tile_room(element: Any, size: int) -> Any:
    """Room of so many elements in shared memory, aligned as TMA swizzles: by 1024 bytes."""
    return cute.struct.Align[cute.struct.MemRange[element, size], 1024]


def partition(transfer: cpasync.TmaInfo, shared: cute.Tensor, tiles: cute.Tensor, modes: int = 2) -> Views:
    """Views whose first `modes` modes are one tile."""
    return cpasync.tma_partition(
        transfer.atom,
        0,
        cute.make_layout(1),
        cute.group_modes(shared, 0, modes),
        cute.group_modes(tiles, 0, modes),
    )


def load_stage(
    transfer: cpasync.TmaInfo,
    ring: Ring,
    state: pipeline.PipelineState,
    views: Views,
    tile: Int32,
    policy: int | None = None,
) -> None:
    """Copy a tile into the ring's next stage, once that is free. The caller advances `state`. `policy` says
    what the L2 cache keeps of it."""
    to_shared, from_global = views
    ring.producer_acquire(state)
    cute.copy(
        transfer.atom,
        from_global[None, tile],
        to_shared[None, state.index],
        tma_bar_ptr=ring.producer_get_barrier(state),
        **({} if policy is None else {"cache_policy": Int64(policy)}),
    )


def load_numbers(
    source: cute.Tensor, shared: cute.Tensor, ring: Ring, state: pipeline.PipelineState, tile: Int32
) -> None:
    """A warp's: copy a float32 per row of a tile into the stage that `load_stage` copies the tile to, on the
    same barrier; shared (row, stage)."""
    atom = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32)
    rows = cute.local_tile(source, (cute.size(shared, mode=[0]),), (tile,))
    with cute.arch.elect_one():
        cute.copy(atom, rows, shared[None, state.index], mbar_ptr=ring.producer_get_barrier(state))


def prefetch_descriptors(*transfers: cpasync.TmaInfo | None) -> None:
    """A warp's: have the descriptors of these copies at hand; None where rows are copied without one."""
    for transfer in transfers:
        if transfer is not None:
            cpasync.prefetch_descriptor(transfer.atom)


def load_once(transfer: cpasync.TmaInfo, views: Views, full: cute.Pointer) -> None:
    """A warp's: copy what stays; `views` are of one tile."""
    to_shared, from_global = views
    size = cute.size_in_bytes(to_shared.element_type, to_shared.layout)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(full, size)
    cute.copy(transfer.atom, from_global, to_shared, tma_bar_ptr=full)


def announce(transfer: cpasync.TmaInfo, views: Views) -> None:
    """A warp's: have the L2 cache bring what `load_once` is to copy later."""
    _, from_global = views
    with cute.arch.elect_one():
        cute.prefetch(transfer.atom, from_global)


def stage_by_fours(parts: Sequence[cute.Tensor], staged: cute.Tensor, lane: Int32, lanes: int) -> None:
    """Numbers of every lane to shared memory, part after part, four of each after four of the lane before,
    for the copy engine: no two lanes meet in a bank."""
    fours = cute.logical_divide(staged, cute.make_layout(4))
    pieces = [part.iterator + start for part in parts for start in range(0, cute.size(part), 4)]
    for j, piece in enumerate(pieces):
        four = cute.make_tensor(piece, cute.make_layout(4))
        cute.autovec_copy(four, fours[None, j * lanes + lane])
    cute.arch.fence_proxy("async.shared", space="cta")


def read_pair(two: cute.Tensor) -> tuple[Float32, Float32]:
    """Two float32 of shared memory, read here, and again where that is said again."""
    return cute.arch.inline_ptx(
        "ld.shared.v2.f32 {{$w0}, {$w1}}, [{$r0}];",
        write_only_types=[Float32, Float32],
        read_only_args=[two.iterator.toint()],
    )


def add_bulk(source: cute.Tensor, target: cute.Pointer, count: int | Int32) -> None:
    """Add `count` float32 of shared memory to global memory, in one operation of the copy engine."""
    cute.arch.inline_ptx(
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [{$r0}], [{$r1}], {$r2};",
        read_only_args=[target.toint(), source.iterator.toint(), Int32(count) * 4],
    )


def copy_to_peer(
    source: cute.Pointer, target: cute.Pointer, size: int, barrier: cute.Pointer, rank: Int32
) -> None:
    """Copy bytes of shared memory to that of another CTA of the cluster, where the barrier counts them.
    `target` and `barrier` are this CTA's, and the other one's are at the same places."""
    there, full = (cute.arch.map_dsmem_ptr(x, rank).toint() for x in (target, barrier))
    cute.arch.inline_ptx(
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes"
        " [{$r0}], [{$r1}], {$r2}, [{$r3}];",
        read_only_args=[there, source.toint(), Int32(size), full],
    )


def reordered(tensor: cute.Tensor, modes: list[int]) -> cute.Tensor:
    """The same memory with its modes in another order."""
    return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=modes))


class Tokens(NamedTuple):
    """Tokens of one head of one sequence: the first in packed tensors, their number, the head, and the batch
    entry of others."""

    offset: Int32
    length: Int32
    head: Int32
    b: Int32


def sequence(tensor: cute.Tensor, offset: Int32, head: Int32, b: Int32, axis: int = 0) -> cute.Tensor:
    """One head of one sequence, its tokens along `axis` starting at `offset`."""
    if cute.rank(tensor) == 4:
        return tensor[None, None, head, b]
    one = tensor[None, None, head]
    return cute.domain_offset((offset, 0) if axis == 0 else (0, offset), one)


LAP = 1 << 30
"""Rows of an `ending` tensor, more than a sequence has tokens."""
AROUND = 2**64 // LAP
"""Stride that leads around all of memory in one lap, of elements of any size."""
MOST_TOKENS = 2**31 - 1


def ending(tensor: cute.Tensor) -> cute.Tensor:
    """(S, D, H, B) or packed (T, D, H) as (LAP, D, H, lap, E), in which TMA finds the ends of sequences: at
    lap LAP, row LAP - n + i of end e is token e - n + i, since addresses are those modulo 2^64. Of a sequence
    of n tokens, what follows its end is past row LAP, and zeros are brought. A base before the tensor would
    do with one mode less, but TMA loads nothing by a base that is not mapped. The lap's extent tells how many
    tokens lie between entries of a batch, which have to be a whole number of them."""
    step, unit, head, *entry = tensor.stride
    between = Int32(entry[0] // step) if entry else 0
    shape = (LAP, *tensor.shape[1:3], LAP + 1 + between, MOST_TOKENS)
    return cute.make_tensor(
        tensor.iterator, cute.make_layout(shape, stride=(step, unit, head, AROUND - step, step))
    )


def ended(tensor: cute.Tensor, tokens: Tokens, axis: int = 0) -> cute.Tensor:
    """One head of one sequence of an `ending` tensor, or of one whose first two modes are exchanged: tokens
    follow each other along `axis`."""
    between = cute.size(tensor, mode=[3]) - (LAP + 1)
    end = tokens.offset + tokens.length + tokens.b * between
    one = tensor[(None, None, tokens.head, LAP, end)]
    before = LAP - tokens.length
    return cute.domain_offset((before, 0) if axis == 0 else (0, before), one)


def tokens_first(tensor: cute.Tensor, ragged: bool) -> cute.Tensor:
    """[B, S, H, D], or packed [T, H, D], as TMA moves it: (S, D, H, B) or (T, D, H); as `ending` has it where
    batches are `ragged`."""
    rows = reordered(tensor, [1, 3, 2, 0] if cute.rank(tensor) == 4 else [0, 2, 1])
    return ending(rows) if ragged else rows


def head_of(tensor: cute.Tensor, ragged: bool, tokens: Tokens, axis: int = 0) -> cute.Tensor:
    """One head of one sequence of a tensor that has its `tokens_first`, along `axis`. What follows the end of
    a ragged one is zeros, and is not written."""
    if ragged:
        return ended(tensor, tokens, axis)
    return sequence(tensor, tokens.offset, tokens.head, tokens.b, axis)


def release(ring: Any, state: Any) -> None:
    """A warp is done with a stage. A pipeline's own release asks each time which lane it runs on, and that,
    read from a special register, comes late where products keep shared memory busy."""
    cute.arch.sync_warp()  # all lanes have read
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(ring.consumer_get_barrier(state))
