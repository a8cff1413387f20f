"""The four warps of the softmax: two threads for a query row, each of which has the scores of half of a
tile's keys, and half of the columns of the output.

They agree on the maximum that both use: each tells the other one its own through shared memory. Probabilities
go to shared memory, as the A operand of the product with values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cutlass import Float32, Int32, cute

from fa4flex.kernels.common.arguments import Arguments
from fa4flex.kernels.common.barriers import sync
from fa4flex.kernels.common.gathered_key_values import CHUNK, swizzled
from fa4flex.kernels.common.hooks import Hooks
from fa4flex.kernels.common.packed_queries import copy_rows
from fa4flex.kernels.common.packed_rows import Row, Tile
from fa4flex.kernels.common.tensor_core import Blocks
from fa4flex.kernels.decode_sm100 import softmax as base
from fa4flex.kernels.decode_sm100.config import HELD, LANES
from fa4flex.kernels.decode_sm100.softmax import Mine, load_op, store_op
from fa4flex.kernels.fwd_sm100 import rows as packed
from fa4flex.kernels.mla_decode_sm100.config import BLOCK, ROWS, Config
from fa4flex.kernels.mla_decode_sm100.epilogue import Epilogue
from fa4flex.kernels.mla_decode_sm100.resources import Products, Shared
from fa4flex.kernels.mla_decode_sm100.roles import HALVES


@dataclass(frozen=True)
class Memory:
    """Tensor memory: a thread's scores, and the output by HELD columns. In shared memory, places of maxima,
    and of probabilities."""

    scores: Blocks
    taken: Blocks
    put: Blocks
    maxima: cute.Tensor
    probabilities: Int32
    thread: Int32
    kind: Any


class Softmax(base.Softmax):
    config: Config  # type: ignore[assignment]
    together = 7

    def __init__(self, config: Config, hooks: Hooks) -> None:
        self.config = config
        self.hooks = hooks
        self.held = config.held
        self.epilogue = Epilogue(config, hooks)  # type: ignore[arg-type]

    def queries(  # type: ignore[override]
        self,
        arguments: Arguments,
        tile: Tile,
        row: Row,
        shared: Shared,
        products: Products,
        first: cute.Pointer,
    ) -> None:
        """First columns to tensor memory, in both lanes of a row, and the others to shared memory."""
        self.hold(arguments, tile, row, products, first)
        rest = cute.domain_offset((0, 0, self.held), arguments.q[tile.b, None, None, None])
        copy_rows(rest, Int32(0), tile, shared.q, cute.arch.thread_idx()[0])

    def memory(  # type: ignore[override]
        self, shared: Shared, products: Products, first: cute.Pointer, thread: Int32
    ) -> Memory:
        part = self.config.part
        scores = cute.flat_divide(products.scores_at(first), (LANES, part))[None, None, 0, None]
        output = cute.flat_divide(products.output_at(first), (LANES, HELD))[None, None, 0, None]
        return Memory(
            Blocks.load(load_op(part), scores, thread),
            Blocks.load(load_op(HELD), output, thread),
            Blocks.store(store_op(HELD), output, thread),
            shared.maxima,
            Int32(shared.p_operand.iterator.toint()),
            thread,
            products.kind,
        )

    def scores(self, mine: Mine, memory: Memory) -> cute.Tensor:  # type: ignore[override]
        taken = cute.make_rmem_tensor((self.config.part,), Float32)
        memory.scores.take(0, taken)
        cute.arch.fence_view_async_tmem_load()
        return taken

    def largest(self, memory: Memory, row: packed.Row, phase: Int32) -> Float32:  # type: ignore[override]
        """The largest score of all of a tile's keys. Those of the tile before may still be read."""
        own, thread = packed.largest_of(row.numbers), memory.thread
        memory.maxima[thread, phase] = own
        sync(HALVES)
        return cute.arch.fmax(own, memory.maxima[thread ^ ROWS, phase])

    def put(self, mine: Mine, memory: Memory, words: cute.Tensor) -> None:  # type: ignore[override]
        """To the row's place of the operand, 16 bytes at a time: the swizzle keeps lanes in different
        banks."""
        span, half = 2 * BLOCK, 2 * self.config.part
        start = memory.thread % ROWS * span + mine.part * half
        for i in range(half // CHUNK):
            four = [Int32(x) for x in _four(words, i)]
            cute.arch.inline_ptx(
                "st.shared.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
                read_only_args=[memory.probabilities + swizzled(start + i * CHUNK, span), *four],
            )
        cute.arch.fence_proxy("async.shared", space="cta")


def _four(words: cute.Tensor, number: int) -> list[Any]:
    """Four words of registers, as integers."""
    whole = cute.recast_tensor(words, Int32)
    return [whole[4 * number + i] for i in range(4)]
