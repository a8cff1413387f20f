"""Two warpgroups in each kernel, as of narrower heads: a key per thread, half of a step's queries each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import tcgen05

from fa4flex.kernels.bwd_sm100 import compute as base
from fa4flex.kernels.bwd_sm100.compute import WIDE, Head, Step, Sums, Weighed
from fa4flex.kernels.bwd_sm100.config import FRAGMENT, ROWS
from fa4flex.kernels.bwd_sm100.resources import in_columns, of_half
from fa4flex.kernels.bwd_sm100.roles import COMPUTE
from fa4flex.kernels.bwd_sm100.two_kernels.config import HALF, PACKED, STEP, TAKEN
from fa4flex.kernels.common.backward import BackwardArguments, KeyWork, token_of, written
from fa4flex.kernels.common.barriers import Pipes
from fa4flex.kernels.common.tensor_core import Blocks, arrive_once


@dataclass(frozen=True)
class Place(base.Place):
    """Place of a thread whose warpgroup has one fragment of a step's queries."""

    def number(self, f: int) -> Int32:
        return self.half

    def origin(self, tile: Int32) -> Int32:
        return tile * STEP + self.half * HALF


class Compute(base.Compute):
    """For dK and dQ."""

    config: Any
    fragments = HALF // FRAGMENT

    def place(self, shared: Any, base: cute.Pointer) -> Place:
        thread = cute.arch.thread_idx()[0] - 32 * COMPUTE
        half = cute.arch.make_warp_uniform(thread // ROWS)
        row = thread % ROWS
        memory = self.config.memory
        load = tcgen05.Ld32x32bOp(tcgen05.Repetition(FRAGMENT))
        store = tcgen05.St32x32bOp(tcgen05.Repetition(PACKED))

        def one(first: Any, count: int) -> cute.Tensor:
            return cute.flat_divide(in_columns(base, first, count), (ROWS, count))[None, None, 0, None]

        return Place(
            row,
            half,
            Blocks.load(load, one(memory.scores + half * HALF, FRAGMENT), row),
            Blocks.store(store, one(of_half(memory.probabilities, half), PACKED), row),
            Blocks.load(load, one(memory.dprob + half * HALF, FRAGMENT), row),
            Blocks.store(store, one(of_half(memory.ds, half), PACKED), row),
            self.ds_row(shared, row),
        )

    def ds_row(self, shared: Any, row: Int32) -> Any:
        """A thread's key in dS in shared memory, by eights of queries."""
        return cute.logical_divide(shared.ds_rows[None, row], cute.make_layout(WIDE))

    @cute.jit
    def begin(
        self,
        arguments: BackwardArguments,
        work: KeyWork,
        place: cutlass.Constexpr[base.Place],
        pipes: cutlass.Constexpr[Pipes],
        base: cute.Pointer,
    ) -> None:
        if self.scheduler.steps(work, arguments) > 0:
            self.hold(arguments.v, work, place, base)
            arrive_once(pipes.v_full)

    def take(self, f: int, head: Head, place: base.Place, step: Step, scores: cute.Tensor) -> cute.Tensor:
        rows = super().take(f, head, place, step, scores)
        arrive_once(head.pipes.s_read)
        return rows

    def put(self, place: base.Place, step: Step, f: int, packed: cute.Tensor) -> None:
        """No product takes probabilities here."""

    def tell_probabilities(self, pipes: Any, step: Step) -> None:
        """Nobody waits for them."""

    def hold(self, source: cute.Tensor, work: KeyWork, place: base.Place, base: cute.Pointer) -> None:
        """A half of a thread's row of keys or values to tensor memory, two elements in a column. What lies
        past the row or the sequence is zero."""
        width = (self.config.held_width // 2) // 2  # columns of this half
        first = base + self.config.held + place.half * width
        blocks = cute.flat_divide(in_columns(first, 0, width), (ROWS, TAKEN))[None, None, 0, None]
        into = Blocks.store(tcgen05.St32x32bOp(tcgen05.Repetition(TAKEN)), blocks, place.row)
        key = self.first_key(work) + place.row
        self.copy_row(source, work, (key, place.half * (2 * width)), into)
        cute.arch.fence_view_async_tmem_store()

    @cute.jit
    def copy_row(
        self,
        source: cute.Tensor,
        work: KeyWork,
        at: tuple[Int32, Int32],
        into: cutlass.Constexpr[Blocks],
    ) -> None:
        """Elements of a key's row from a column on."""
        key, first = at
        row = token_of(source, work.b, work.kv_offset, key, work.kv_head)
        eights = cute.logical_divide(row, cute.make_layout(WIDE))
        for block in cutlass.range_constexpr(self.config.held_width // 4 // TAKEN):
            held = cute.make_rmem_tensor((2 * TAKEN,), source.element_type)
            held.fill(source.element_type(0.0))
            pieces = cute.logical_divide(held, cute.make_layout(WIDE))
            for i in cutlass.range_constexpr(2 * TAKEN // WIDE):
                column = first + (block * (2 * TAKEN) + i * WIDE)
                if (key < work.kv_len) & (column < source.shape[-1]):
                    cute.autovec_copy(eights[None, column // WIDE], pieces[None, i])
            into.put(block, cute.recast_tensor(held, Float32))

    def share_fragment(self, place: base.Place, packed: cute.Tensor, kind: Any, f: int) -> None:
        self.share(place.ds_row, packed, kind, place.half)

    def put_sums(
        self, arguments: BackwardArguments, work: KeyWork, place: base.Place, pipes: Pipes, base: cute.Pointer
    ) -> None:
        some = self.scheduler.steps(work, arguments) > 0
        dk = Sums(base + self.config.memory.dk, pipes.dk_full, self.config.head_dim)
        self.store(written(arguments)[0], work, place, dk, some, arguments.scale)


class ComputeForValues(Compute):
    """For dV: probabilities alone."""

    @cute.jit
    def begin(
        self,
        arguments: BackwardArguments,
        work: KeyWork,
        place: cutlass.Constexpr[base.Place],
        pipes: cutlass.Constexpr[Pipes],
        base: cute.Pointer,
    ) -> None:
        if self.scheduler.steps(work, arguments) > 0:
            self.hold(arguments.k, work, place, base)
            arrive_once(pipes.k_full)

    def ds_row(self, shared: Any, row: Int32) -> Any:
        return None

    def await_scores(self, pipes: Any, step: Step) -> None:
        cute.arch.mbarrier_wait(pipes.s_full + step.lse2.index, step.lse2.phase)

    def take(self, f: int, head: Head, place: base.Place, step: Step, scores: cute.Tensor) -> cute.Tensor:
        rows = self.numbers(head.shared.lse2, step.lse2.index, place.number(f))
        self.of_stage(place.scores, step).take(f, scores[None, f])
        cute.arch.fence_view_async_tmem_load()
        return rows

    def put(self, place: base.Place, step: Step, f: int, packed: cute.Tensor) -> None:
        self.of_stage(place.probabilities, step).put(f, packed)

    def of_stage(self, blocks: Blocks, step: Step) -> Blocks:
        return blocks.moved(step.lse2.index * self.config.score_columns)

    def tell_probabilities(self, pipes: Any, step: Step) -> None:
        cute.arch.fence_view_async_tmem_store()
        arrive_once(pipes.p_full + step.lse2.index)

    def differentiate(
        self, head: Head, place: base.Place, step: Step, weighed: Weighed, masked: bool
    ) -> None:
        """Left to the other kernel."""

    def put_sums(
        self, arguments: BackwardArguments, work: KeyWork, place: base.Place, pipes: Pipes, base: cute.Pointer
    ) -> None:
        some = self.scheduler.steps(work, arguments) > 0
        dv = Sums(base + self.config.memory.dv, pipes.dv_full, self.config.head_dim_v)
        self.store(written(arguments)[1], work, place, dv, some, Float32(1.0))
