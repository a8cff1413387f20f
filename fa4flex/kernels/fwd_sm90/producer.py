"""The producer warp: brings queries, keys and values from global into shared memory by TMA. Where keys lie in
pages, two of them, one of which brings the values; where pages are of few keys, four, which copy rows."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import cutlass
from cutlass import Int32, const_expr, cute, pipeline

from fa4flex.kernels.common.arguments import Arguments
from fa4flex.kernels.common.barriers import Pipes
from fa4flex.kernels.common.boxes import box_views
from fa4flex.kernels.common.gathered_key_values import gathered
from fa4flex.kernels.common.key_lengths import check_length
from fa4flex.kernels.common.key_loader import Wanted
from fa4flex.kernels.common.key_lookup import KeyLookup, Order
from fa4flex.kernels.common.key_values import ContiguousKeyValues, KeyValues, kv_head_of, tokens_of
from fa4flex.kernels.common.keys import KeyTiles, tile_at
from fa4flex.kernels.common.paged_key_values import PagedKeyValues
from fa4flex.kernels.common.tile_scheduler import TileScheduler
from fa4flex.kernels.common.transfer import States, Transfers, partition
from fa4flex.kernels.common.work import Grid, Work
from fa4flex.kernels.fwd_sm90.config import Config
from fa4flex.kernels.fwd_sm90.resources import QueryRing, Shared, Turn
from fa4flex.kernels.fwd_sm90.rows import rows_of
from fa4flex.kernels.plan.memory import block_bytes


class Block(NamedTuple):
    """Constants over the tiles of a block."""

    transfers: Transfers
    shared: Shared
    pipes: Pipes


Part = Literal["keys", "values"]
"""Copies of one of two producer warps; with keys come queries."""


class Producer:
    part: Part | None = None
    """None: it brings both."""

    leads: bool = True
    """True for the one that takes tiles and brings queries."""

    follows: bool = False
    """True if all further warps are such."""

    def __init__(self, config: Config, scheduler: TileScheduler) -> None:
        self.config = config
        self.scheduler = scheduler
        self.ring = QueryRing(config.q_stages)
        self.rows = rows_of(config)

    @cute.jit
    def run(
        self,
        arguments: Arguments,
        grid: Grid,
        transfers: cutlass.Constexpr[Transfers],
        shared: cutlass.Constexpr[Shared],
        pipes: cutlass.Constexpr[Pipes],
    ) -> None:
        k_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.config.kv_stages)
        v_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.config.kv_stages)

        @cute.jit
        def load(work: Work, phase: Int32, states: States) -> States:
            k_state, v_state = states[0], states[1]
            at = self.scheduler.place(work, grid, arguments)
            keys = self.scheduler.keys(at, work, arguments)
            kv_head = self.rows.kv_head(work, grid, arguments)
            if const_expr(self.config.paged):
                key_values = self.pages(work, kv_head, keys, arguments, Block(transfers, shared, pipes))
            else:
                key_values = self.contiguous(work, kv_head, arguments, Block(transfers, shared, pipes))
            tile = tile_at(keys, Int32(0))
            key_values.turn_to(Int32(0))
            key_values.load_keys(k_state, tile)
            k_state.advance()
            if const_expr(self.leads):
                self.queries(work, transfers, shared, pipes, self.ring.turn(phase, states))
            # Keys run one tile ahead of values, as the consumers use them.
            for i in cutlass.range(1, keys.count, unroll=1):
                coming = tile_at(keys, i)
                key_values.turn_to(i)
                key_values.load_keys(k_state, coming)
                k_state.advance()
                key_values.load_values(v_state, tile)
                v_state.advance()
                tile = coming
            key_values.turn_to(keys.count)
            key_values.load_values(v_state, tile)
            v_state.advance()
            return self.ring.carry(phase, states, (k_state, v_state))

        begun = self.ring.open((k_state, v_state))
        self.walk(load, arguments, grid, Block(transfers, shared, pipes), begun)

    def walk(self, load: Any, arguments: Arguments, grid: Grid, block: Block, states: States) -> None:
        """Tile after tile of a block."""
        self.scheduler.walk(grid, arguments, block.pipes.next, load, states, takes=self.leads)

    def contiguous(self, work: Work, kv_head: Int32, arguments: Arguments, block: Block) -> KeyValues:
        config, (transfers, shared, pipes) = self.config, block
        k, v = tokens_of(work, kv_head, transfers)
        k_tiles = cute.local_tile(k, (config.tile_n, config.head_dim), (None, 0))
        k_views = partition(transfers.k, shared.k, k_tiles)
        v_tiles = cute.local_tile(v, (config.head_dim_v, config.tile_n), (0, None))
        v_views = partition(transfers.v, shared.v, v_tiles)
        return ContiguousKeyValues(transfers, pipes.k, pipes.v, k_views, v_views)

    def pages(
        self,
        work: Work,
        kv_head: Int32,
        keys: KeyTiles,
        arguments: Arguments,
        block: Block,
        behind: int = 1,
    ) -> KeyValues:
        """Values are copied `behind` tiles behind keys."""
        return self.paged(work, kv_head, Order(keys, Int32(0)), arguments, block, behind)

    def paged(
        self,
        work: Work,
        kv_head: Int32,
        order: Order,
        arguments: Arguments,
        block: Block,
        behind: int,
        policy: int | None = None,
    ) -> KeyValues:
        """Keys and values in pages. `policy` says what the L2 cache keeps of boxes."""
        boxes, config, (transfers, shared, pipes) = self.config.boxes, self.config, block
        assert boxes is not None
        self.check(arguments, work.b)
        loader = arguments.loader.of(arguments, Wanted(work.b, kv_head, work.tile, work.kv_len))
        if config.gathers:
            warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
            lookup = KeyLookup(loader, work.kv_len, order, 1, config.tile_n, behind, config.producers, warp)
            lookup.begin()
            k, v = ((width, block_bytes(width)) for width in (config.head_dim, config.head_dim_v))
            tiles = shared.k, shared.v
            return gathered(arguments, kv_head, lookup, (pipes.k, pipes.v), tiles, (k, v))
        views = box_views(transfers, (shared.k, shared.v), arguments, kv_head, boxes)
        lookup = KeyLookup(loader, work.kv_len, order, boxes.rows, config.tile_n, behind)
        lookup.begin()
        alone = self.part is not None
        return PagedKeyValues(transfers, pipes.k, pipes.v, *views, lookup, policy, alone=alone)

    def check(self, arguments: Arguments, b: Int32) -> None:
        """Tell of a length that is not possible."""
        if self.leads:
            check_length(arguments, b)

    @cute.jit
    def queries(
        self,
        work: Work,
        transfers: cutlass.Constexpr[Transfers],
        shared: cutlass.Constexpr[Shared],
        pipes: cutlass.Constexpr[Pipes],
        turn: cutlass.Constexpr[Turn],
    ) -> None:
        """Each warpgroup's 64 rows, as soon as that warpgroup has let go of those before in their stage."""
        tiles = self.rows.tiles(transfers.q, work, self.config.head_dim)
        q_to, q_from = partition(transfers.q, shared.q, tiles)
        size = cute.size_in_bytes(shared.q.element_type, cute.select(shared.q.layout, mode=[0, 1]))
        for group in cutlass.range_constexpr(self.config.consumers):
            place = self.ring.place(group, turn)
            cute.arch.mbarrier_wait(pipes.q_empty + place, turn.phase ^ 1)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(pipes.q_full + place, size)
            cute.copy(
                transfers.q.atom,
                q_from[None, work.tile * self.config.consumers + group],
                q_to[None, place],
                tma_bar_ptr=pipes.q_full + place,
            )


class PartProducer(Producer):
    """Producer of keys, and of queries, from pages, or of their values. The first one takes tiles."""

    def __init__(self, config: Config, scheduler: TileScheduler, part: Part) -> None:
        super().__init__(config, scheduler)
        self.part = part
        self.leads = part == "keys"

    @cute.jit
    def run(
        self,
        arguments: Arguments,
        grid: Grid,
        transfers: cutlass.Constexpr[Transfers],
        shared: cutlass.Constexpr[Shared],
        pipes: cutlass.Constexpr[Pipes],
    ) -> None:
        k_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.config.kv_stages)

        @cute.jit
        def load(work: Work, phase: Int32, states: States) -> States:
            at = self.scheduler.place(work, grid, arguments)
            keys = self.scheduler.keys(at, work, arguments)
            kv_head = kv_head_of(work, grid, arguments)
            pages = self.pages(work, kv_head, keys, arguments, Block(transfers, shared, pipes), 0)
            both = states[0], states[1]
            # One loop, and the queries within it: copies that are written out twice are code to wait for.
            for i in cutlass.range(0, keys.count, unroll=1):
                both = self.tile(pages, keys, i, both)
                if const_expr(self.leads):  # noqa: SIM102  one is decided when compiled, one when run
                    if i == 0:
                        self.queries(work, transfers, shared, pipes, self.ring.turn(phase, states))
            return self.ring.carry(phase, states, both)

        begun = self.ring.open((k_state, k_state.clone()))
        self.walk(load, arguments, grid, Block(transfers, shared, pipes), begun)

    def tile(self, pages: KeyValues, keys: KeyTiles, number: Int32, states: States) -> States:
        """This warp's part of a tile of keys; the other state is not used."""
        k_state, v_state = states
        tile = tile_at(keys, number)
        pages.turn_to(number)
        if self.part == "keys":
            pages.load_keys(k_state, tile)
            k_state.advance()
        else:
            pages.load_values(v_state, tile)
            v_state.advance()
        return k_state, v_state


class Follower(Producer):
    """Producer of rows of keys and values, beside the one that leads."""

    leads, follows = False, True
