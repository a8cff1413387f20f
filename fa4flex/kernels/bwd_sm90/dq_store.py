"""The warp that brings each warpgroup's part of dQ to global memory, to be added to sums, or stored as it is
where a block has all keys; and copies tiles of dS to the captured gradients that are dS."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, const_expr, cute

from fa4flex.kernels.bwd_sm90.clearing import Clearer, Clearing
from fa4flex.kernels.bwd_sm90.config import EIGHT, Config
from fa4flex.kernels.bwd_sm90.resources import Shared, dq_rows
from fa4flex.kernels.bwd_sm90.roles import DQ_EMPTY, DQ_FULL
from fa4flex.kernels.bwd_sm90.zero_fill import clear_queries
from fa4flex.kernels.common.backward import (
    BackwardArguments,
    BackwardTileScheduler,
    KeyGrid,
    KeyWork,
    QueryTile,
    await_rank,
    counter_of,
    pass_turn,
    query_tile_at,
    rows_of,
    seen,
    turn_at,
)
from fa4flex.kernels.common.barriers import Pipes, arrive, sync
from fa4flex.kernels.common.cluster import Cluster
from fa4flex.kernels.common.hooks import Share
from fa4flex.kernels.common.transfer import Views, add_bulk, partition, sequence

UNSEEN = -1
"""Number of tiles of keys that have added, where nobody has looked."""


@dataclass(frozen=True)
class Moved:
    """Descriptors of what the warp moves: dq, if it is stored, and the captured gradients of `copied`; and
    which sums another warp clears, if any."""

    dq: Any | None
    copies: tuple[Any, ...]
    clearing: Clearing | None = None


class Stages(NamedTuple):
    """The stages of shared memory that dQ and dS of the next step come into."""

    dq: Int32
    ds: Int32


class Turn(NamedTuple):
    """A tile of queries, how many tiles of keys add to it before this one, and how many had when somebody
    looked."""

    tile: Int32
    rank: Int32
    done: Int32


class DqStore:
    def __init__(
        self,
        config: Config,
        copied: tuple[Share, ...],
        scheduler: BackwardTileScheduler,
        clearer: Clearer,
    ) -> None:
        self.config = config
        self.copied = copied
        self.scheduler = scheduler
        self.clearer = clearer
        self.takes_turns = config.deterministic and not config.stores_dq

    @cute.jit
    def run(
        self,
        arguments: BackwardArguments,
        grid: KeyGrid,
        shared: cutlass.Constexpr[Shared],
        pipes: cutlass.Constexpr[Pipes],
        moved: cutlass.Constexpr[Moved],
    ) -> None:
        config = self.config
        for w in cutlass.range_constexpr(config.dq_parts):
            arrive(DQ_EMPTY, w, 0)

        @cute.jit
        def store(work: KeyWork, phase: Int32, stages: Stages) -> Stages:
            if const_expr(moved.clearing is not None):
                self.clearer.wait(arguments, grid, moved.clearing, work)
            stages, steps = self.tile(arguments, work, shared, moved, stages)
            if const_expr(config.persistent):
                if steps > 0:
                    # The other stage is free too, for dK and dV.
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
                    for w in cutlass.range_constexpr(config.consumers):
                        arrive(DQ_EMPTY, w, 1 - stages.dq)
            else:
                # Shared memory must last until all was read. The grid's end waits for what is under way then.
                cute.arch.cp_async_bulk_wait_group(0, read=True)
            return stages

        self.scheduler.walk(grid, arguments, pipes.next, store, Stages(Int32(0), Int32(0)))

    @cute.jit
    def tile(
        self,
        arguments: BackwardArguments,
        work: KeyWork,
        shared: cutlass.Constexpr[Shared],
        moved: cutlass.Constexpr[Moved],
        stages: Stages,
    ) -> tuple[Stages, Int32]:
        """The parts of dQ that a tile of keys makes, and the number of its steps."""
        config, copies = self.config, moved.copies
        stage, parity = stages
        steps, rank = Int32(0), Cluster(config.ctas).rank()
        for g in cutlass.range(work.group, unroll=1):
            h = work.part * work.group + g
            queries = self.scheduler.queries(work, h, arguments)
            steps += queries.count
            if const_expr(config.stores_dq and config.masked):
                clear_queries(arguments.dq, work, h, queries, config.tile_m)
            views = self.views(arguments, work, h, shared, copies)
            turn = Turn(Int32(0), Int32(0), Int32(UNSEEN))
            if const_expr(self.takes_turns):
                first = turn_at(arguments, work, queries, Int32(0))
                turn = Turn(first[0], first[1], Int32(UNSEEN))
            for i in cutlass.range(queries.count, unroll=1):
                tile, turn_rank, done = turn
                if const_expr(self.takes_turns):
                    counter = counter_of(arguments, work, QueryTile(h, tile), config, rank)
                    await_rank(counter, turn_rank, done)
                    # Read from tables while dQ is waited for.
                    following = turn_at(arguments, work, queries, i + 1)
                else:
                    tile = query_tile_at(queries, i)
                for w in cutlass.range_constexpr(config.dq_parts):
                    sync(DQ_FULL, w, stage)
                    if const_expr(w == 0 and len(copies) > 0):
                        # There is dQ, so all warpgroups have met: all of dS is there.
                        self.copy(copies, views, parity, tile, work.tile)
                    part, at = shared.dq[None, w, stage], QueryTile(h, tile)
                    if const_expr(config.stores_dq):
                        self.store(moved.dq, w, part, shared.q.element_type, work, at)
                    else:
                        self.add(w if config.ctas == 1 else rank, part, arguments, work, at)
                    cute.arch.cp_async_bulk_commit_group()
                stage = (stage + 1) % config.dq_stages
                if const_expr(len(copies) > 0):
                    parity = 1 - parity
                # Of its other stage, all but this step's additions have been read; and so has dS, which is
                # written anew two steps on: after warpgroups have waited for this stage.
                for w in cutlass.range_constexpr(config.dq_parts):
                    pending = config.dq_parts if config.dq_stages == 2 else config.dq_parts - 1 - w
                    cute.arch.cp_async_bulk_wait_group(pending, read=True)
                    arrive(DQ_EMPTY, w, stage)
                if const_expr(self.takes_turns):
                    # The next turn is looked for while sums are on their way, and not waited for before this
                    # one is passed on: a trip to memory less between two turns.
                    done = Int32(UNSEEN)
                    if i + 1 < queries.count:
                        done = seen(counter_of(arguments, work, QueryTile(h, following[0]), config, rank))
                    cute.arch.cp_async_bulk_wait_group(0)
                    pass_turn(counter)
                    turn = Turn(following[0], following[1], done)
        return Stages(stage, parity), steps

    def store(self, dq: Any, w: int, part: cute.Tensor, kind: Any, work: KeyWork, at: QueryTile) -> None:
        """Store a warpgroup's part of a tile of dQ, of this dtype. What lies past the end is not written."""
        config = self.config
        ((rows, columns),), ((down, across),) = config.dq_shapes, config.dq_tiles(w)
        whole = sequence(dq.tma_tensor, work.q_offset, at.head, work.b)
        staged = dq_rows(config, part, kind)
        staged = cute.make_tensor(staged.iterator, cute.append(staged.layout, cute.make_layout(1)))
        from_shared, to_global = partition(dq, staged, cute.local_tile(whole, (rows, columns), (None, None)))
        down = at.tile * (config.tile_m // rows) + down
        cute.copy(dq.atom, from_shared[None, 0], to_global[(None, down, across)])

    @cute.jit
    def add(
        self,
        w: cutlass.Constexpr[Any],
        part: cute.Tensor,
        arguments: BackwardArguments,
        work: KeyWork,
        at: QueryTile,
    ) -> None:
        """Add a warpgroup's part of a tile of dQ, or that of a CTA of a pair, to sums. Where dQ is
        transposed, eight rows lie together, and those past the end of the sequence are left out; so are
        columns that heads are padded with."""
        config, tile, done = self.config, at.tile, 0
        sums = rows_of(arguments.dq_sum, work, at.head, config.head_dim)
        end = work.q_len - tile * config.tile_m
        whole = cute.local_tile(sums, (config.tile_m * config.head_dim,), (tile,))
        for (start, count), added, first, (rows, _) in zip(
            config.dq_numbers(w), config.dq_added(w), config.dq_rows(w), config.dq_shapes, strict=True
        ):
            source, target = cute.domain_offset((done,), part), whole.iterator + start
            if const_expr(config.transposes_dq):
                eights = cutlass.min((end - first + (EIGHT - 1)) // EIGHT, rows // EIGHT)
                if eights > 0:
                    with cute.arch.elect_one():
                        add_bulk(source, target, eights * (count * EIGHT // rows))
            elif const_expr(added > 0):
                with cute.arch.elect_one():
                    add_bulk(source, target, added)
            done += count

    def copy(
        self,
        copies: tuple[Any, ...],
        views: tuple[Views, ...],
        stage: Int32,
        q_tile: Int32,
        kv_tile: Int32,
    ) -> None:
        """Copy a tile of dS. What lies past the ends of a gradient is not written."""
        for copy, (from_shared, to_global) in zip(copies, views, strict=True):
            cute.copy(copy.atom, from_shared[None, stage], to_global[(None, q_tile, kv_tile)])
        cute.arch.cp_async_bulk_commit_group()

    def views(
        self,
        arguments: BackwardArguments,
        work: KeyWork,
        h: Int32,
        shared: Shared,
        copies: tuple[Any, ...],
    ) -> tuple[Views, ...]:
        """Stages of dS, and the tiles (queries, keys) of a head's captured gradients."""
        if not copies:
            return ()
        heads, zero = Int32(arguments.q.shape[-2]), Int32(0)
        at = self.scheduler.place(work, h, heads, arguments).but(q=zero, kv=zero)
        found = []
        for share, copy in zip(self.copied, copies, strict=True):
            place = share.place.element(at)
            rest = [place[i] for i in others(share, arguments.gradients[share.which])]
            whole = copy.tma_tensor[(None, None, *rest)]
            tiles = cute.local_tile(whole, (self.config.tile_m, self.config.tile_n), (None, None))
            found.append(partition(copy, shared.ds, tiles))
        return tuple(found)


def others(share: Share, gradient: cute.Tensor) -> list[int]:
    """The axes of a captured tensor, whose gradient is [copies, shape...], besides queries and keys."""
    return [i for i in range(cute.rank(gradient) - 1) if i not in share.axes]
