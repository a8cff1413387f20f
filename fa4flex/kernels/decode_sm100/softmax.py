"""The four warps of the softmax: a query row per thread, and of each tile the keys that the thread's copy of
it meets, so that no lane needs another's numbers before the end.

Scores come from tensor memory and probabilities go back over them, as the A operand of the product with
values: those of keys that another copy meets are zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, const_expr, cute
from cutlass.cute.nvgpu import tcgen05

from fa4flex.kernels.common.arguments import Arguments
from fa4flex.kernels.common.barriers import Pipes
from fa4flex.kernels.common.bits import WORD, consecutive
from fa4flex.kernels.common.hooks import Hooks
from fa4flex.kernels.common.keys import tile_at
from fa4flex.kernels.common.packed_rows import Part, Row, Tile, first_full, place_of, tile_of
from fa4flex.kernels.common.pointwise import Fragment, Words, prepare_rows
from fa4flex.kernels.common.softmax import LaneSoftmax, running
from fa4flex.kernels.common.tensor_core import Blocks, arrive_once
from fa4flex.kernels.common.weights import weights_of
from fa4flex.kernels.decode_sm100.config import HELD, Config
from fa4flex.kernels.decode_sm100.epilogue import Epilogue
from fa4flex.kernels.decode_sm100.resources import Products, Shared
from fa4flex.kernels.fwd_sm100 import rows as packed
from fa4flex.kernels.fwd_sm100.config import Exponential

SPECIAL = Exponential(count=0)
"""All exponentials on special-function units: they are not what such a kernel waits for."""

WIDE = 8
"""Elements of 16 bits that a thread loads at once."""


@dataclass(frozen=True)
class Mine:
    """A thread's row, and which of a tile's parts its copy meets: what stays the same over its key tiles."""

    row: Row
    part: Int32
    fragment: Fragment
    softmax: LaneSoftmax


@dataclass(frozen=True)
class Memory:
    """Tensor memory: scores and probabilities by parts of a tile, the output by HELD columns."""

    scores: Blocks
    probabilities: Blocks
    taken: Blocks
    put: Blocks
    kind: Any


class Softmax:
    together = 1
    """Blocks of HELD columns of queries whose loads are under way at a time."""

    def __init__(self, config: Config, hooks: Hooks) -> None:
        self.config = config
        self.hooks = hooks
        self.held = config.head_dim
        self.epilogue = Epilogue(config, hooks)

    @cute.jit
    def run(
        self,
        arguments: Arguments,
        part: Part,
        shared: cutlass.Constexpr[Shared],
        pipes: cutlass.Constexpr[Pipes],
        products: cutlass.Constexpr[Products],
        base: cute.Pointer,
    ) -> None:
        thread = cute.arch.thread_idx()[0]
        tile = tile_of(part, arguments, self.hooks, self.config)
        mine = self.mine(arguments, tile, thread)
        mine.softmax.state.clear()
        if tile.first < tile.last:
            self.queries(arguments, tile, mine.row, shared, products, base)
            arrive_once(pipes.q_full)
        memory = self.memory(shared, products, base, thread)
        phase = Int32(0)
        full = first_full(tile)
        for i in cutlass.range(tile.first, full, unroll=1):
            self.step(mine, memory, pipes, self.first_key(tile, i), phase, i > tile.first, True)
            phase ^= 1
        for i in cutlass.range(full, tile.last, unroll=1):
            self.step(mine, memory, pipes, self.first_key(tile, i), phase, i > tile.first, False)
            phase ^= 1
        self.epilogue.run(arguments, tile, mine, shared, pipes, products.output_at(base))

    def first_key(self, tile: Tile, i: Int32) -> Int32:
        """First key of tile number i."""
        return tile_at(tile.keys, i) * self.config.tile_n

    def mine(self, arguments: Arguments, tile: Tile, thread: Int32) -> Mine:
        part = cute.arch.make_warp_uniform(thread // self.config.rows)
        row = tile.row(thread % self.config.rows)
        at = place_of(row, tile, arguments, self.hooks)
        terms = prepare_rows(self.hooks, at, row.q, (0,))
        state = running(1, self.config.statistics)
        softmax = weights_of(self.hooks, at, self.config.rescale_threshold, state, lanes=True)
        columns = tuple(range(self.config.part))
        fragment = Fragment(at, terms, (0,), columns, row.q, part * self.config.part, consecutive)
        return Mine(row, part, fragment, softmax)

    def queries(
        self,
        arguments: Arguments,
        tile: Tile,
        row: Row,
        shared: Shared,
        products: Products,
        base: cute.Pointer,
    ) -> None:
        """Bring the tile's queries to where products read them."""
        self.hold(arguments, tile, row, products, base)

    def query(self, arguments: Arguments, tile: Tile, row: Row) -> cute.Tensor:
        """A row of the queries."""
        return arguments.q[tile.b, row.q, row.h, None]

    @cute.jit
    def hold(
        self,
        arguments: Arguments,
        tile: Tile,
        row: Row,
        products: cutlass.Constexpr[Products],
        base: cute.Pointer,
    ) -> None:
        """The first `held` columns of the thread's row to its lane of tensor memory, two elements in a column
        there. Tiles may be wider than the tensor, and have zeros there."""
        q, width = arguments.q, arguments.q.shape[-1]
        words = products.words_at(base + self.config.memory.queries, self.held // 2)
        blocks = cute.flat_divide(words, (128, HELD))[None, None, 0, None]
        into = Blocks.store(store_op(HELD), blocks, cute.arch.thread_idx()[0])
        eights = cute.logical_divide(self.query(arguments, tile, row), cute.make_layout(WIDE))
        count = self.held // 2 // HELD
        for first in cutlass.range_constexpr(0, count, self.together):
            run = range(first, min(first + self.together, count))
            every = [cute.make_rmem_tensor((2 * HELD,), q.element_type) for _ in run]
            for block, held in zip(run, every):
                pieces = cute.logical_divide(held, cute.make_layout(WIDE))
                for i in cutlass.range_constexpr(2 * HELD // WIDE):
                    piece = block * (2 * HELD // WIDE) + i
                    if const_expr(piece * WIDE < width):
                        cute.autovec_copy(eights[None, piece], pieces[None, i])
                    else:
                        pieces[None, i].fill(q.element_type(0.0))
            for block, held in zip(run, every):
                into.put(block, cute.recast_tensor(held, Float32))
        cute.arch.fence_view_async_tmem_store()

    def memory(self, shared: Shared, products: Products, base: cute.Pointer, thread: Int32) -> Memory:
        part, scores = self.config.part, products.scores_at(base)
        words = products.words_at(base + self.config.memory.scores, self.config.tile_n // 2)
        output = cute.flat_divide(products.output_at(base), (128, HELD))[None, None, 0, None]
        return Memory(
            Blocks.load(load_op(part), cute.flat_divide(scores, (128, part))[None, None, 0, None], thread),
            Blocks.store(
                store_op(part // 2), cute.flat_divide(words, (128, part // 2))[None, None, 0, None], thread
            ),
            Blocks.load(load_op(HELD), output, thread),
            Blocks.store(store_op(HELD), output, thread),
            products.kind,
        )

    @cute.jit
    def step(
        self,
        mine: cutlass.Constexpr[Mine],
        memory: cutlass.Constexpr[Memory],
        pipes: cutlass.Constexpr[Pipes],
        kv_first: Int32,
        phase: Int32,
        later: Boolean,
        masked: cutlass.Constexpr[bool],
    ) -> None:
        """The key tile from this key on, whose scores come in this phase. `later`: there is an output of
        earlier ones."""
        bits = self.allowed(mine, kv_first) if const_expr(masked) else None
        cute.arch.mbarrier_wait(pipes.s_full, phase)
        row = packed.Row(self.scores(mine, memory))
        mine.fragment.change(self.hooks, row, kv_first, masked)
        if const_expr(masked):
            mine.fragment.mask(row, kv_first, bits)
        softmax = mine.softmax
        if const_expr(softmax.online):
            self.take_maximum(mine, memory, self.largest(memory, row, phase), later)
        pairs, weights = self.weighed(softmax, row.numbers)
        self.put(mine, memory, packed.narrowed(weights, memory.kind))
        cute.arch.fence_view_async_tmem_store()
        arrive_once(pipes.p_full)
        if const_expr(softmax.online):
            softmax.state.total[0] = packed.total_of(pairs, softmax.state.total[0])

    def scores(self, mine: Mine, memory: Memory) -> cute.Tensor:
        """Scores of the thread's keys, which are there; none of its row's are needed in tensor memory after
        this."""
        taken = cute.make_rmem_tensor((self.config.part,), Float32)
        memory.scores.take(mine.part, taken)
        cute.arch.fence_view_async_tmem_load()
        self.clear_others(mine, memory)
        return taken

    def largest(self, memory: Memory, row: packed.Row, phase: Int32) -> Float32:
        """The largest score that the thread's output is relative to: that of its own keys."""
        return packed.largest_of(row.numbers)

    def put(self, mine: Mine, memory: Memory, words: cute.Tensor) -> None:
        """Store the thread's probabilities, two in a word, for the product with values."""
        memory.probabilities.put(mine.part, words)

    def weighed(self, softmax: Any, row: list[Float32]) -> tuple[list[packed.Pair], list[packed.Pair]]:
        """Terms of the total of a row, and its weights."""
        if self.hooks.rectified:
            return packed.softpicked(softmax, row)
        found = self.probabilities(softmax, row)
        return found, found

    def probabilities(self, softmax: Any, row: list[Float32]) -> list[packed.Pair]:
        """Probabilities of a row; elementwise weights as they are."""
        if not softmax.online:
            return packed.paired(row)
        moment = softmax.state.moment
        moments = None if moment is None else packed.Moments()
        pairs = packed.exponentiate(row, softmax.factor, softmax.state.shift[0], SPECIAL, 0, moments)
        if moments is not None:
            moment[0] = moment[0] + moments.total
        return pairs

    def allowed(self, mine: Mine, kv_first: Int32) -> Words:
        """Bits of the keys of this tile that the row sees."""
        if self.hooks.mask is None:
            return (tuple(mine.fragment.inside(kv_first, -(-self.config.part // WORD))),)
        return mine.fragment.asked(self.hooks, kv_first)

    def clear_others(self, mine: Mine, memory: Memory) -> None:
        """Probabilities of keys that other copies meet, now that scores are read."""
        zeros = cute.make_rmem_tensor((self.config.part // 2,), Float32)
        zeros.fill(0.0)
        for other in range(1, self.config.copies):
            memory.probabilities.put((mine.part + other) % self.config.copies, zeros)

    @cute.jit
    def take_maximum(
        self,
        mine: cutlass.Constexpr[Mine],
        memory: cutlass.Constexpr[Memory],
        largest: Float32,
        later: Boolean,
    ) -> None:
        """Raise the running maxima to this tile's, and rescale the output, where a score of the warp's rows
        passes a ceiling."""
        mine.softmax.note([largest])
        if mine.softmax.passes([largest]):
            mine.softmax.raise_maxima([largest])
            if later:
                self.rescale(memory, mine.softmax.state.scale[0])

    @cute.jit
    def rescale(self, memory: cutlass.Constexpr[Memory], scale: Float32) -> None:
        """Rescale the output. Its stores need no wait: that for the probabilities is for both."""
        if cute.arch.vote_any_sync(scale < 1.0):
            for block in cutlass.range_constexpr(self.config.output_columns // HELD):
                held = cute.make_rmem_tensor((HELD,), Float32)
                memory.taken.take(block, held)
                cute.arch.fence_view_async_tmem_load()
                packed.multiply(held, scale)
                memory.put.put(block, held)


def load_op(columns: int) -> Any:
    return tcgen05.Ld32x32bOp(tcgen05.Repetition(columns))


def store_op(columns: int) -> Any:
    return tcgen05.St32x32bOp(tcgen05.Repetition(columns))
