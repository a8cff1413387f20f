"""The four warps of the softmax: those of few query rows, over keys each of which has an index of its own.

Which of a tile's keys a row sees is found before their scores are there, a bit for each.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cutlass
from cutlass import Boolean, Int32, cute, pipeline

from fa4flex.kernels.common.arguments import Arguments
from fa4flex.kernels.common.barriers import Pipes
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
    config: Config  # type: ignore[assignment]

    def __init__(self, config: Config, hooks: Hooks) -> None:
        super().__init__(config, hooks)  # type: ignore[arg-type]  # it has what is read of one
        self.epilogue = Epilogue(config, hooks)  # type: ignore[arg-type]

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
    ) -> Found:
        """Keys that the thread's copy of its row meets of a tile."""
        cute.arch.mbarrier_wait(pipes.ids_full + state.index, state.phase)
        told = []
        for n in range(self.config.told):
            numbers = cute.make_rmem_tensor((self.config.part,), Int32)
            parts = cute.logical_divide(shared.ids[None, n, state.index], cute.make_layout(self.config.part))
            cute.autovec_copy(parts[None, mine.part], numbers)
            told.append(tuple(numbers[i] for i in range(self.config.part)))
        arrive_once(pipes.ids_empty + state.index)
        return Found(told[0], beside if self.config.beside else None, *told[1:])

    def allowed(self, mine: Mine, found: Any) -> Words:
        fragment: Any = mine.fragment
        words: Words = fragment.seen(self.hooks, found)
        return words
