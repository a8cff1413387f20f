"""The producer warp: keys and values of tiles of both kinds."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, const_expr, cute

from fa4flex.kernels.common.arguments import Arguments
from fa4flex.kernels.common.barriers import Pipes
from fa4flex.kernels.common.hooks import Hooks
from fa4flex.kernels.common.key_lookup import Order
from fa4flex.kernels.common.key_values import KeyValues
from fa4flex.kernels.common.keys import tile_at
from fa4flex.kernels.common.packed_rows import Tile
from fa4flex.kernels.common.transfer import READ_ONCE, States, warp_uniform
from fa4flex.kernels.common.work import Grid, Work
from fa4flex.kernels.fwd_sm90 import producer as forward
from fa4flex.kernels.fwd_sm90.producer import Block, Part
from fa4flex.kernels.mixed_sm90.config import Config
from fa4flex.kernels.mixed_sm90.few_rows import few_tile
from fa4flex.kernels.mixed_sm90.schedule import MixedScheduler
from fa4flex.kernels.mixed_sm90.sequences import Cut


class FewKeys(forward.Producer):
    """Producer that brings keys and values for tiles of few rows as well, between those of many."""

    config: Config
    hooks: Hooks

    def walk(self, load: Any, call: tuple[Arguments, Grid], block: Block, states: States) -> None:
        arguments, grid = call
        pipes = block[2]

        @cute.jit
        def load_few(work: Work, cut: Cut, phase: Int32, states: States) -> States:
            tile = few_tile(work, cut, arguments, self.hooks, self.config)
            key_values = self.few_keys(work, tile, arguments, block)
            states = self.run_of_keys(tile, key_values, pipes, phase ^ 1, warp_uniform(states))
            if const_expr(self.leads):  # noqa: SIM102  one is decided when compiled, one when run
                if tile.first >= tile.last:
                    self.hand_room(pipes, phase ^ 1)
            return states

        @cute.jit
        def load_many(work: Work, phase: Int32, states: States) -> States:
            return load(work, phase, warp_uniform(states))

        both = load_few, load_many
        self.scheduler.walk(grid, arguments, pipes.next, both, states, takes=self.leads)

    def check(self, arguments: Arguments, b: Int32) -> None:
        """Whoever counts sequences has told of such."""

    def few_keys(self, work: Work, tile: Tile, arguments: Arguments, block: Block) -> KeyValues:
        """Keys and values of a tile of few rows, each at a time. They are read once, and would drive those of
        chunks, which many tiles read, out of L2."""
        order = Order(tile.keys, tile.first)
        return self.paged(work, tile.kv_head, order, arguments, block, 0, READ_ONCE)

    @cute.jit
    def run_of_keys(
        self,
        tile: Tile,
        key_values: cutlass.Constexpr[KeyValues],
        pipes: cutlass.Constexpr[Pipes],
        phase: Int32,
        states: States,
    ) -> States:
        """All keys of a part; room for queries is handed over when the first of them are under way."""
        k_state, v_state = states
        for i in cutlass.range(tile.first, tile.last, unroll=1):
            key_tile = tile_at(tile.keys, i)
            key_values.turn_to(i)
            if const_expr(self.part != "values"):
                key_values.load_keys(k_state, key_tile)
                k_state.advance()
            if const_expr(self.part != "keys"):
                key_values.load_values(v_state, key_tile)
                v_state.advance()
            if const_expr(self.leads):  # noqa: SIM102  one is decided when compiled, one when run
                if i == tile.first:
                    self.hand_room(pipes, phase)
        return k_state, v_state

    @cute.jit
    def hand_room(self, pipes: cutlass.Constexpr[Pipes], phase: Int32) -> None:
        """Room for queries, to consumers, who copy few rows themselves: once both have let go of it."""
        for group in cutlass.range_constexpr(self.config.consumers):
            cute.arch.mbarrier_wait(pipes.q_empty + group, phase)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(pipes.q_full + group)


class Producer(FewKeys):
    def __init__(self, config: Config, hooks: Hooks, scheduler: MixedScheduler) -> None:
        super().__init__(config, scheduler)
        self.hooks = hooks


class Follower(Producer):
    """Producer of rows of keys and values, beside the one that leads."""

    leads, follows = False, True


class PartProducer(FewKeys, forward.PartProducer):
    """Producer of keys, and of queries, or of values."""

    def __init__(self, config: Config, hooks: Hooks, scheduler: MixedScheduler, part: Part) -> None:
        forward.PartProducer.__init__(self, config, scheduler, part)
        self.hooks = hooks
