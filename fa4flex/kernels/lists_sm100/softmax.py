"""The four warps of the softmax: those of few query rows, over keys each of which has an index of its own.

Which of a tile's keys a row sees is found before their scores are there, a bit for each.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import cutlass
from cutlass import Boolean, Int32, cute, pipeline

from fa4flex.kernels.common.arguments import Arguments
from fa4flex.kernels.common.barriers import Pipes
from fa4flex.kernels.common.bits import WORD
from fa4flex.kernels.common.hooks import Hooks
from fa4flex.kernels.common.packed_rows import Row
from fa4flex.kernels.common.pointwise import Words
from fa4flex.kernels.common.tensor_core import arrive_once
from fa4flex.kernels.decode_sm100 import softmax as base
from fa4flex.kernels.decode_sm100.softmax import Mine
from fa4flex.kernels.lists.fragment import Found, SeenFragment
from fa4flex.kernels.lists.tiles import ListTile, Walk, own_of
from fa4flex.kernels.lists_sm100.config import Config
from fa4flex.kernels.lists_sm100.epilogue import Epilogue, row_of
from fa4flex.kernels.lists_sm100.resources import Handed, Shared


class Softmax(base.Softmax):
    config: Config

    def __init__(self, config: Config, hooks: Hooks) -> None:
        super().__init__(config, hooks)
        self.epilogue = Epilogue(config, hooks)

    @cute.jit
    def visit(
        self,
        arguments: Arguments,
        tile: ListTile,
        walk: Walk,
        handed: cutlass.Constexpr[Handed],
        first: cute.Pointer,
    ) -> None:
        """All tiles of keys, and the results. first: column of tensor memory."""
        (shared, pipes, products), thread = handed, cute.arch.thread_idx()[0]
        mine = self.mine(arguments, tile, thread)
        mine.softmax.state.clear()
        if tile.first < tile.last:
            self.queries(arguments, tile, mine.row, shared, products, first)  # type: ignore[arg-type]
            arrive_once(pipes.q_full)
        memory = self.memory(shared, products, first, thread)
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.config.kv_stages)
        phase = Int32(0)
        for i in cutlass.range(tile.first, tile.last, unroll=1):
            found = self.found(mine, shared, pipes, state, i >= walk.listed)
            self.step(mine, memory, pipes, found, phase, i > tile.first, True)
            state.advance()
            phase ^= 1
        self.epilogue.run(arguments, tile, mine, shared, pipes, products.output_at(first))

    def mine(self, arguments: Arguments, tile: Any, thread: Int32) -> Mine:
        plain = super().mine(arguments, tile, thread)
        own = own_of(plain.row.q, tile, arguments, self.config)
        return replace(plain, fragment=SeenFragment.of(plain.fragment, *own, self.hooks))

    def query(self, arguments: Arguments, tile: Any, row: Row) -> cute.Tensor:
        return row_of(arguments.q, tile, row)

    def found(
        self, mine: Mine, shared: Shared, pipes: Pipes, state: pipeline.PipelineState, beside: Boolean
    ) -> Told:
        """Keys that the thread's copy of its row meets of a tile."""
        cute.arch.mbarrier_wait(pipes.ids_full + state.index, state.phase)
        lane, keys = cute.arch.lane_idx(), shared.ids[None, 0, state.index]
        own = tuple(keys[mine.part * self.config.part + n + lane] for n in range(0, self.config.part, WORD))
        told = []
        for n in range(self.config.told):
            numbers = cute.make_rmem_tensor((self.config.part,), Int32)
            parts = cute.logical_divide(shared.ids[None, n, state.index], cute.make_layout(self.config.part))
            cute.autovec_copy(parts[None, mine.part], numbers)
            told.append(tuple(numbers[i] for i in range(self.config.part)))
        arrive_once(pipes.ids_empty + state.index)
        rows = told[1] if self.config.united > 1 else None
        return Told(told[0], beside if self.config.beside else None, rows, own)

    def allowed(self, mine: Mine, found: Any) -> Words:
        """Bits of the keys that the row sees. Where rows see the same keys of a tile, lanes ask for one key
        each."""
        fragment: Any = mine.fragment
        if fragment.asks_more(self.hooks, found):
            words: Words = fragment.seen(self.hooks, found)
            return words
        if fragment.limited:
            return within(fragment, self.hooks, found)
        return (tuple(Int32(cute.arch.vote_ballot_sync(key >= 0)) for key in found.own),)


@dataclass(frozen=True)
class Told(Found):
    """Keys of a tile as they are told. own: the lane's one of each 32 of those that a warp's rows meet."""

    own: tuple[Int32, ...] = ()


@cute.jit
def within(
    fragment: cutlass.Constexpr[Any],
    hooks: cutlass.Constexpr[Hooks],
    found: cutlass.Constexpr[Told],
) -> Words:
    """Bits of the keys that the row's only span has. Most tiles have all of their keys within those of all
    rows of a warp: the least and the largest key then tell."""
    lowest = functools.reduce(cutlass.min, [cute.arch.warp_redux_sync(key, "min") for key in found.own])
    highest = functools.reduce(cutlass.max, [cute.arch.warp_redux_sync(key, "max") for key in found.own])
    words = cute.make_rmem_tensor((len(found.own),), Int32)
    words.fill(Int32(-1))
    # NOTHING is the least of all numbers, and in no span.
    if not cute.arch.vote_all_sync(fragment.has_all(Int32(lowest), Int32(highest))):
        (each,) = fragment.seen(hooks, found)
        for n in cutlass.range_constexpr(len(found.own)):
            words[n] = each[n]
    return (tuple(words[n] for n in range(len(found.own))),)
