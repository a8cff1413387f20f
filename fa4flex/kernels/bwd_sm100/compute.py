"""Two warpgroups: from scores to probabilities, from their gradients to dS, and at last dK and dV.

Each thread has one key: its row of the transposed tiles in tensor memory. Each warpgroup has half of a step's
queries, all of its threads the same ones, so that rows' numbers are broadcast. Probabilities and dS go back
over the scores and dP that the same thread has read: no warp waits for another. dS goes to shared memory as
well, where it is the first operand of dQ = dS K.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, const_expr, cute, pipeline, select_
from cutlass.cute.nvgpu import tcgen05

from fa4flex.kernels.bwd_sm100.config import FRAGMENT, HALF, ROWS, Config
from fa4flex.kernels.bwd_sm100.operand_gradients import LaneCollector
from fa4flex.kernels.bwd_sm100.resources import Shared, in_columns, of_half
from fa4flex.kernels.bwd_sm100.roles import COMPUTE, COMPUTING
from fa4flex.kernels.common import softpick
from fa4flex.kernels.common.backward import (
    BackwardArguments,
    BackwardTileScheduler,
    KeyWork,
    needs_mask,
    query_tile_at,
    token_of,
    written,
)
from fa4flex.kernels.common.barriers import Pipes
from fa4flex.kernels.common.cluster import Cluster
from fa4flex.kernels.common.dropout import KeyDropout
from fa4flex.kernels.common.fragment import compute_before, computed_once, narrow, widened
from fa4flex.kernels.common.hooks import Hooks
from fa4flex.kernels.common.operand_gradients import sums_of, targets
from fa4flex.kernels.common.softmax import LOG2_E
from fa4flex.kernels.common.tensor_core import Blocks, arrive_once
from fa4flex.kernels.common.transposed import Slab

HOOKED = 8
"""Queries that hooks are called for at a time: they keep registers for each."""

STORED = 16
"""Columns of dK or dV that a thread takes at a time: half of the narrowest head."""

WIDE = 8
"""Elements of 16 bits that a thread stores at once."""


@dataclass(frozen=True)
class Head:
    """Constants over the steps of a query head: the block's memory and barriers; where hooks are called for,
    queries apart; by what the variant's scores are multiplied to be powers of two; and what becomes of
    captured gradients."""

    shared: Shared
    pipes: Pipes
    slab: Slab
    factor: Float32
    collector: LaneCollector
    dropout: KeyDropout | None


@dataclass(frozen=True)
class Place:
    """A thread's key in the block's tile, and the half of the queries of its warpgroup; that half of scores,
    probabilities, dP and dS in tensor memory, by fragment, and dS in shared memory, by eights."""

    row: Int32
    half: Int32
    scores: Blocks
    probabilities: Blocks
    dprob: Blocks
    ds: Blocks
    ds_row: cute.Tensor

    def number(self, f: int) -> Int32:
        """Number of fragment f of a warpgroup among those of a step."""
        return self.half * (HALF // FRAGMENT) + f

    def origin(self, tile: Int32) -> Int32:
        """Number of a tile of queries, or of a query, from which fragments' first queries follow."""
        return tile * ROWS + self.half * HALF

    def first_query(self, origin: Int32, f: int) -> Int32:
        """The first query of that fragment."""
        return origin + f * FRAGMENT


@dataclass(frozen=True)
class ApartPlace(Place):
    """Place of a thread whose warpgroup has fragments that do not follow each other. first: their first
    queries in a step."""

    first: tuple[Int32, ...]

    def number(self, f: int) -> Int32:
        return self.first[f] // FRAGMENT

    def origin(self, tile: Int32) -> Int32:
        return tile

    def first_query(self, origin: Int32, f: int) -> Int32:
        return origin * ROWS + self.first[f]


@dataclass(frozen=True)
class Step:
    """A tile of queries: its number, stages of its rows' log-sum-exps and deltas, and the phase of what is
    there once per step."""

    tile: Int32
    lse2: pipeline.PipelineState
    delta: pipeline.PipelineState
    phase: Int32


class Weighed(NamedTuple):
    """Scores of a step where they are needed again, what dP is multiplied by, by fragment, and bits of the
    pairs that dropout keeps."""

    scores: cute.Tensor
    weights: list[cute.Tensor]
    kept: list[Any]


@dataclass(frozen=True)
class Sums:
    """dK or dV: where in tensor memory it lies, the barrier that says it is complete, and its width."""

    columns: cute.Pointer
    full: cute.Pointer
    width: int


class Compute:
    fragments = HALF // FRAGMENT
    """Number of fragments of queries that a warpgroup has of a step."""

    def __init__(
        self, config: Config, hooks: Hooks, scheduler: BackwardTileScheduler, cluster: Cluster
    ) -> None:
        self.config = config
        self.hooks = hooks
        self.scheduler = scheduler
        self.cluster = cluster
        shares = hooks.shares
        late = hooks.rectified or any(not share.scaled for share in shares)
        self.late = hooks.slope is not None and late
        """True if slopes come in last: after what modified scores add to captured tensors was taken, and
        where the signs of factors say something."""
        weights = [share.weight for share in shares if share.weight is not None]
        self.again = self.late or any(weight.scored for weight in weights)
        """True if scores are asked for again when their gradients are there."""

    @cute.jit
    def run(
        self,
        arguments: BackwardArguments,
        work: KeyWork,
        shared: cutlass.Constexpr[Shared],
        pipes: cutlass.Constexpr[Pipes],
        base: cute.Pointer,
    ) -> None:
        config = self.config
        ordered = config.deterministic and config.masked
        place = self.place(shared, base)
        self.begin(arguments, work, place, pipes, base)
        lse2 = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, config.q_stages)
        delta = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, config.do_stages)
        heads = Int32(arguments.q.shape[-2])
        phase = Int32(0)
        sums = sums_of(self.hooks.shares)
        for g in cutlass.range(work.group, unroll=1):
            h = work.kv_head * work.group + g
            at = self.scheduler.place(work, h, heads, arguments)
            first = self.first_key(work) + place.row
            factor = at.scale * LOG2_E if self.hooks.factor is None else self.hooks.factor(at)
            slab = Slab(at, first, (0,), tuple(range(FRAGMENT)))
            dropout = KeyDropout.of(self.hooks.dropout, at, first)
            factor = computed_once(factor)
            head = Head(shared, pipes, slab, factor, self.collector(arguments, slab, sums), dropout)
            head.collector.begin()
            queries = self.scheduler.queries(work, h, arguments)
            for i in cutlass.range(0 if const_expr(ordered) else queries.masked_count, unroll=1):
                self.step(head, place, Step(query_tile_at(queries, i), lse2, delta, phase), True)
                lse2.advance()
                delta.advance()
                phase ^= 1
            for i in cutlass.range(queries.masked_count, queries.count, unroll=1):
                step = Step(query_tile_at(queries, i), lse2, delta, phase)
                if const_expr(ordered):
                    if needs_mask(queries.masked.at(i)):
                        self.step(head, place, step, True)
                    else:
                        self.step(head, place, step, False)
                else:
                    self.step(head, place, step, False)
                lse2.advance()
                delta.advance()
                phase ^= 1
            head.collector.finish()
        self.put_sums(arguments, work, place, pipes, base)

    def begin(
        self, arguments: BackwardArguments, work: KeyWork, place: Place, pipes: Pipes, base: cute.Pointer
    ) -> None:
        """Before the first step: nothing."""

    def put_sums(
        self, arguments: BackwardArguments, work: KeyWork, place: Place, pipes: Pipes, base: cute.Pointer
    ) -> None:
        """dV and dK of the block's keys to global memory."""
        some = self.scheduler.steps(work, arguments) > 0
        config, (to_dk, to_dv) = self.config, written(arguments)
        dv = Sums(base + config.memory.dv, pipes.dv_full, config.head_dim_v)
        dk = Sums(base + config.memory.dk, pipes.dk_full, config.head_dim)
        self.store(to_dv, work, place, dv, some, Float32(1.0))
        self.store(to_dk, work, place, dk, some, arguments.scale)

    def collector(
        self, arguments: BackwardArguments, slab: Slab, sums: tuple[cute.Tensor, ...]
    ) -> LaneCollector:
        """A query head's shares in the gradients of captured tensors."""
        warp = cute.arch.thread_idx()[0] // 32 - COMPUTE
        where = targets(tuple(arguments.gradients), cute.arch.block_idx()[0] * COMPUTING + warp)
        return LaneCollector(self.hooks.shares, slab, where, sums, cute.arch.lane_idx())

    def first_key(self, work: KeyWork) -> Int32:
        """The first key of this CTA."""
        return (work.tile * self.config.ctas + self.cluster.rank()) * ROWS

    def place(self, shared: Shared, base: cute.Pointer) -> Place:
        thread = cute.arch.thread_idx()[0] - 32 * COMPUTE
        half = cute.arch.make_warp_uniform(thread // ROWS)
        row = thread % ROWS
        memory = self.config.memory

        def fragments(first: Any, count: int) -> cute.Tensor:
            columns = in_columns(base, first, count * HALF // FRAGMENT)
            return cute.flat_divide(columns, (ROWS, count))[None, None, 0, None]

        load = tcgen05.Ld32x32bOp(tcgen05.Repetition(FRAGMENT))
        store = tcgen05.St32x32bOp(tcgen05.Repetition(FRAGMENT // 2))
        return Place(
            row,
            half,
            Blocks.load(load, fragments(memory.scores + half * HALF, FRAGMENT), row),
            Blocks.store(store, fragments(of_half(memory.probabilities, half), FRAGMENT // 2), row),
            Blocks.load(load, fragments(memory.dprob + half * HALF, FRAGMENT), row),
            Blocks.store(store, fragments(of_half(memory.ds, half), FRAGMENT // 2), row),
            cute.logical_divide(shared.ds_rows[(None, half), row], cute.make_layout(WIDE)),
        )

    @cute.jit
    def step(
        self,
        head: cutlass.Constexpr[Head],
        place: cutlass.Constexpr[Place],
        step: cutlass.Constexpr[Step],
        masked: cutlass.Constexpr[bool],
    ) -> None:
        """One tile of queries."""
        scores = cute.make_rmem_tensor((FRAGMENT, self.fragments), Float32)
        kept: list[Any] = []
        weights = self.weigh(head, place, step, scores, kept, masked)
        self.differentiate(head, place, step, Weighed(scores, weights, kept), masked)

    def weigh(
        self,
        head: Head,
        place: Place,
        step: Step,
        scores: cute.Tensor,
        kept: list[Any],
        masked: bool,
    ) -> list[cute.Tensor]:
        """Probabilities of a step's scores, to tensor memory. Returns what dP is multiplied by, by
        fragment."""
        pipes, lse2, weights = head.pipes, step.lse2, []
        origin, kind = place.origin(step.tile), head.shared.q.element_type
        cute.arch.mbarrier_wait(pipes.lse2_full + lse2.index, lse2.phase)
        self.await_scores(pipes, step)
        for f in range(self.fragments):
            rows = self.take(f, head, place, step, scores)
            p = self.to_change(scores[None, f])
            slopes = self.probabilities(head, p, rows, place.first_query(origin, f), masked)
            packed = used = self.operand(p, kind)
            if head.dropout is not None:
                used = self.dropped(head, p, place.first_query(origin, f), kept, kind)
            self.put(place, step, f, used)
            if self.hooks.rectified:
                self.to_powers(p, rows)
            weights.append(self.weights(p, packed, slopes, kind))
        self.tell_probabilities(pipes, step)
        arrive_once(pipes.lse2_empty + lse2.index)
        return weights

    def await_scores(self, pipes: Any, step: Step) -> None:
        cute.arch.mbarrier_wait(pipes.s_full, step.phase)

    def put(self, place: Place, step: Step, f: int, packed: cute.Tensor) -> None:
        """Probabilities of fragment f to tensor memory."""
        place.probabilities.put(f, packed)

    def tell_probabilities(self, pipes: Any, step: Step) -> None:
        cute.arch.fence_view_async_tmem_store()
        arrive_once(pipes.p_full, first=self.config.ctas > 1)

    def differentiate(self, head: Head, place: Place, step: Step, weighed: Weighed, masked: bool) -> None:
        """dS of a step's dP, to tensor memory and to shared memory; and what it adds to captured tensors."""
        shared, pipes, delta = head.shared, head.pipes, step.delta
        origin, kind, handed_on = place.origin(step.tile), shared.q.element_type, []
        cute.arch.mbarrier_wait(pipes.delta_full + delta.index, delta.phase)
        cute.arch.mbarrier_wait(pipes.dp_full, step.phase)
        for f in range(self.fragments):
            rows = self.numbers(shared.delta, delta.index, place.number(f))
            ds = cute.make_rmem_tensor((FRAGMENT,), Float32)
            place.dprob.take(f, ds)
            cute.arch.fence_view_async_tmem_load()
            if head.dropout is not None:
                self.scale(ds, head.dropout, weighed.kept[f])
            self.gradients(ds, rows, weighed.weights[f], kind)
            self.take_captured(head, ds, weighed.scores[None, f], place.first_query(origin, f), masked)
            handed_on.append(self.narrowed(ds, kind))
            place.ds.put(f, handed_on[f])
            self.share_fragment(place, handed_on[f], kind, f)
        cute.arch.fence_view_async_tmem_store()
        if self.config.ctas == 1:
            cute.arch.fence_proxy("async.shared", space="cta")
        arrive_once(pipes.ds_full, first=self.config.ctas > 1)
        arrive_once(pipes.delta_empty + delta.index)
        self.hand_on(place, handed_on, kind, pipes, step.phase)

    def take(self, f: int, head: Head, place: Place, step: Step, scores: cute.Tensor) -> cute.Tensor:
        """Scores of fragment f to registers. Returns its queries' log-sum-exps."""
        rows = self.numbers(head.shared.lse2, step.lse2.index, place.number(f))
        place.scores.take(f, scores[None, f])
        cute.arch.fence_view_async_tmem_load()
        return rows

    def share_fragment(self, place: Place, packed: cute.Tensor, kind: Any, f: int) -> None:
        self.share(place.ds_row, packed, kind, f)

    def hand_on(self, place: Any, fragments: list[cute.Tensor], kind: Any, pipes: Any, phase: Int32) -> None:
        """Hand on dS' of a step to another CTA: there is none."""

    def numbers(self, rows: cute.Tensor, stage: Int32, fragment: Int32) -> cute.Tensor:
        """Those of a fragment's queries."""
        found = cute.make_rmem_tensor((FRAGMENT,), Float32)
        pieces = cute.logical_divide(rows[None, stage], cute.make_layout(FRAGMENT))
        cute.autovec_copy(pieces[None, fragment], found)
        return found

    def probabilities(
        self, head: Head, scores: cute.Tensor, lse2: cute.Tensor, q_first: Int32, masked: bool
    ) -> dict[int, Float32]:
        """q.k of a fragment becomes its probability. Returns what gradients are multiplied by on their way to
        the scaled scores, where that is not 1."""
        factor = head.factor
        slopes: dict[int, Float32] = {}
        for start in range(0, FRAGMENT, HOOKED):
            slab = replace(head.slab, queries=tuple(range(start, start + HOOKED)))
            one = cute.make_tensor(scores.iterator + start, cute.make_layout((1, HOOKED)))
            found = slab.slopes(self.hooks, one, q_first, masked) or {}
            slopes |= {start + c: slope for (_, c), slope in found.items()}
            slab.modify(self.hooks, one, q_first, masked)
            if self.hooks.elementwise:
                slopes |= self.of_pairs(slab, start, slopes, q_first, masked)
            for c in range(start, start if self.hooks.elementwise else start + HOOKED, 2):
                if self.hooks.rectified:
                    scores[c], scores[c + 1] = (
                        softpick.signed(scores[i] * factor, lse2[i], softpick.base_of(lse2[i]))
                        for i in (c, c + 1)
                    )
                    continue
                shift = (-lse2[c], -lse2[c + 1])
                x = cute.arch.fma_packed_f32x2((scores[c], scores[c + 1]), (factor, factor), shift)
                scores[c], scores[c + 1] = (cute.math.exp2(y, fastmath=True) for y in x)
            if masked:
                slab.mask(self.hooks, one, q_first)
            hooked = self.hooks.score, self.hooks.start, self.hooks.mask if masked else None
            if any(hook is not None for hook in hooked):
                # What the next queries' hooks read would else be read now, and wait in registers.
                compute_before(scores[start + HOOKED - 1])
        return slopes

    def of_pairs(
        self, slab: Slab, start: int, slopes: dict[int, Float32], q_first: Int32, masked: bool
    ) -> dict[int, Float32]:
        """Factors of dP' for elementwise weights, of a part of a fragment: slopes, 1 where there are none or
        they are late, and 0 of what the mask hides. Nothing is multiplied by probabilities."""
        late = self.late
        found = {
            c: Float32(1.0) if late else slopes.get(c, Float32(1.0)) for c in range(start, start + HOOKED)
        }
        if not masked:
            return found
        shown = cute.make_rmem_tensor((1, HOOKED), Float32)
        shown.fill(1.0)
        slab.mask(self.hooks, shown, q_first)
        return {c: select_(shown[0, c - start] > 0, x, Float32(0.0)) for c, x in found.items()}

    def operand(self, p: cute.Tensor, kind: Any) -> cute.Tensor:
        """Probabilities of a fragment in 16 bits; of softpick, of what is not below 0."""
        if not self.hooks.rectified:
            return self.narrowed(p, kind)
        used = cute.make_rmem_tensor((FRAGMENT,), Float32)
        for c in range(FRAGMENT):
            used[c] = softpick.rectified(p[c])
        return self.narrowed(used, kind)

    def to_powers(self, u: cute.Tensor, lse2: cute.Tensor) -> None:
        """u over the total of a fragment becomes the factor of its gradients, with u's sign."""
        for c in range(FRAGMENT):
            u[c] = softpick.power(u[c], softpick.base_of(lse2[c]))

    def to_change(self, scores: cute.Tensor) -> cute.Tensor:
        """Registers with the scores of a fragment that may become something else."""
        if not self.again:
            return scores
        copied = cute.make_rmem_tensor((FRAGMENT,), Float32)
        copied.store(scores.load())
        return copied

    def weights(
        self, p: cute.Tensor, packed: cute.Tensor, slopes: dict[int, Float32], kind: Any
    ) -> cute.Tensor:
        """Factors of a fragment's dP' less their rows' sums: probabilities, times slopes where these are not
        late. In 16 bits, two in a register, where scores are kept in registers too."""
        if self.hooks.elementwise:
            for c, slope in slopes.items():
                p[c] = slope
        if self.hooks.weights != "softmax":
            return self.narrowed(p, kind) if self.again else p
        if not self.late:
            for c, slope in slopes.items():
                p[c] = p[c] * slope
        if not self.again:
            return p
        return packed if self.late or not slopes else self.narrowed(p, kind)

    def dropped(self, head: Head, p: cute.Tensor, q_first: Int32, kept: list[Any], kind: Any) -> cute.Tensor:
        """Probabilities of a fragment in 16 bits as dV has them: those of pairs that dropout keeps, whose
        bits `kept` gets."""
        assert head.dropout is not None
        used, word = head.dropout.apply(p, q_first)
        kept.append(word)
        return self.narrowed(used, kind)

    def scale(self, ds: cute.Tensor, dropout: KeyDropout, word: Any) -> None:
        """A fragment's dP', or 0 where weights are dropped; see ColumnDropout for dS."""
        for c in range(FRAGMENT):
            ds[c] = select_(dropout.stays(word, c), ds[c], Float32(0.0))

    def gradients(self, ds: cute.Tensor, deltas: cute.Tensor, weights: cute.Tensor, kind: Any) -> None:
        """A fragment's dP becomes its dS."""
        for c in range(0, FRAGMENT, 2):
            if self.hooks.elementwise:
                ds[c], ds[c + 1] = cute.arch.mul_packed_f32x2(
                    self.weight_pair(weights, c, kind), (ds[c], ds[c + 1])
                )
                continue
            if self.hooks.rectified:
                factors = self.weight_pair(weights, c, kind)
                ds[c], ds[c + 1] = (
                    softpick.gradient(x, ds[c + i], deltas[c + i]) for i, x in enumerate(factors)
                )
                continue
            moved = cute.arch.add_packed_f32x2((ds[c], ds[c + 1]), (deltas[c], deltas[c + 1]))
            ds[c], ds[c + 1] = cute.arch.mul_packed_f32x2(self.weight_pair(weights, c, kind), moved)

    def weight_pair(self, weights: cute.Tensor, c: int, kind: Any) -> tuple[Float32, Float32]:
        """Two neighbours of `weights`."""
        if not self.again:
            return weights[c], weights[c + 1]
        return widened(cute.recast_tensor(weights, Int32)[c // 2], kind)

    def take_captured(
        self, head: Head, ds: cute.Tensor, scores: cute.Tensor, q_first: Int32, masked: bool
    ) -> None:
        """Takes what a fragment adds to captured tensors. ds, of modified scores where slopes are late,
        becomes that of scaled ones; `scores` hold q.k where they are needed again."""
        if not self.hooks.shares:
            return
        grid = cute.make_layout((1, FRAGMENT))
        found, raw = (cute.make_tensor(x.iterator, grid) for x in (ds, scores))
        collector = head.collector
        early = collector.early(raw, q_first, masked)
        collector.take(False, found, q_first, masked, early)
        if self.late:
            for place, slope in (head.slab.slopes(self.hooks, raw, q_first, masked) or {}).items():
                changed = found[place] * slope
                if (
                    self.hooks.weights != "softmax" and masked
                ):  # of what the mask hides, slopes may be no numbers
                    changed = select_(found[place] == 0, Float32(0.0), changed)
                found[place] = changed
        collector.take(True, found, q_first, masked, early)

    def narrowed(self, source: cute.Tensor, kind: Any) -> cute.Tensor:
        """A fragment in 16 bits, two numbers in a register."""
        packed = cute.make_rmem_tensor((FRAGMENT // 2,), Float32)
        halves = cute.recast_ptr(packed.iterator, dtype=kind)
        narrow(source, cute.make_tensor(halves, cute.make_layout(FRAGMENT)))
        return packed

    def share(self, row: cute.Tensor, packed: cute.Tensor, kind: Any, fragment: int) -> None:
        """A thread's fragment of dS' to shared memory."""
        halves = cute.recast_ptr(packed.iterator, dtype=kind)
        for i in range(FRAGMENT // WIDE):
            eight = cute.make_tensor(halves + WIDE * i, cute.make_layout(WIDE))
            cute.autovec_copy(eight, row[None, fragment * (FRAGMENT // WIDE) + i])

    @cute.jit
    def store(
        self,
        target: cute.Tensor,
        work: KeyWork,
        place: cutlass.Constexpr[Place],
        sums: cutlass.Constexpr[Sums],
        some: Boolean,
        scale: Float32,
    ) -> None:
        """A half of the columns of dK or dV to global memory; 0 where no query was visited."""
        count = sums.width // STORED // 2
        mine = in_columns(sums.columns, place.half * (sums.width // 2), sums.width // 2)
        blocks = cute.flat_divide(mine, (ROWS, STORED))
        load = tcgen05.Ld32x32bOp(tcgen05.Repetition(STORED))
        found = Blocks.load(load, blocks[None, None, 0, None], place.row)
        if some:
            cute.arch.mbarrier_wait(sums.full, 0)
        for block in cutlass.range_constexpr(count):
            part = cute.make_rmem_tensor((STORED,), Float32)
            part.fill(0.0)
            if some:
                found.take(block, part)
                cute.arch.fence_view_async_tmem_load()
            halves = cute.make_rmem_tensor((STORED,), target.element_type)
            halves.store((part.load() * scale).to(target.element_type))
            key = self.first_key(work) + place.row
            if key < work.kv_len:
                first = (place.half * count + block) * STORED
                row = token_of(target, work.b, work.kv_offset, key, work.part)
                eights = cute.logical_divide(row, cute.make_layout(WIDE))
                for i in cutlass.range_constexpr(STORED // WIDE):
                    if first + WIDE * i < target.shape[-1]:
                        eight = cute.make_tensor(halves.iterator + WIDE * i, cute.make_layout(WIDE))
                        cute.autovec_copy(eight, eights[None, first // WIDE + i])
