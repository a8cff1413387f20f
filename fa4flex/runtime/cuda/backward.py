"""Gradients on NVIDIA GPUs: q, k, v, sinks, captured tensors, and through the log-sum-exp.

What is decided once per look of a call is kept, as for the forward pass (engine.py). A launch runs three
kernels: rows' statistics, the products, and dQ into its own dtype and order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fa4flex.codegen.analyze.domain import READS
from fa4flex.codegen.analyze.facts import Facts
from fa4flex.codegen.analyze.hoist import read_by_pairs
from fa4flex.codegen.expr import TRUE, const, nodes
from fa4flex.codegen.kernels.common.lengths import ROW_BLOCK, row_block
from fa4flex.errors import UnsupportedError
from fa4flex.runtime.cuda.call import NO_LENGTHS, Call
from fa4flex.runtime.cuda.captured import CapturedSum, separate, sums_of
from fa4flex.runtime.cuda.choose import ProvedQueries, look, prove_queries, proving, read_queries
from fa4flex.runtime.cuda.compile import compile_kernel
from fa4flex.runtime.cuda.counter import counter
from fa4flex.runtime.cuda.engine import (
    Engine,
    fixed,
    fixes_of,
    maps_of,
    settle,
    signature_of,
    tma_able,
)
from fa4flex.runtime.cuda.graphs import hold_if_captured
from fa4flex.runtime.cuda.lengths import check_lengths
from fa4flex.runtime.cuda.tables import BlockTables, TurnTables, to_device, turns_to_device

if TYPE_CHECKING:
    from fa4flex.codegen.emit import Source
    from fa4flex.codegen.plan.problem import Problem
    from fa4flex.codegen.plan.target import Target


class Saved(NamedTuple):
    """What the forward pass left, and the gradients that arrive: out, dout [B, H, S, D]; lse, dlse [B, H, S],
    dlse None where nothing depends on the log-sum-exp. Packed: [T, H, D] and [H, T]."""

    out: Tensor
    lse: Tensor
    dout: Tensor
    dlse: Tensor | None


class Gradients(NamedTuple):
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dsinks: Tensor | None
    captured: tuple[Tensor, ...]
    """Of the captured tensors asked for, in their dtypes."""


@dataclass(frozen=True, eq=False)
class ReadyBackward:
    """A launch in which only pointers are missing. width: of the tile that holds rows of q; turn_rows: where
    sums are ordered, how many rows take turns together, else None; counted: whether blocks take tiles of keys
    from a counter."""

    launch: Callable[..., None]
    fixes: dict[int, Callable[[Tensor], Tensor]]
    width: int
    row_block: int
    turn_rows: int | None
    counted: bool
    tables: BlockTables | TurnTables | None
    rows: tuple[Tensor, ...]
    scalars: tuple[int | float, ...] | None
    sums: tuple[CapturedSum, ...]

    def __call__(self, call: Call, saved: Saved) -> Gradients:
        q, k, v, sinks, lengths, operands = fixed(call, self.fixes)
        dout = saved.dout if tma_able(saved.dout) else saved.dout.contiguous()
        *of_heads, rows = saved.lse.shape
        padded = -(-rows // self.row_block) * self.row_block
        if call.packed:
            padded = (rows // ROW_BLOCK + call.extents().batch) * ROW_BLOCK
        lse2, delta = q.new_empty(2, *of_heads, padded, dtype=torch.float32)
        dq_sum = q.new_empty(*of_heads, padded * self.width, dtype=torch.float32)
        dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        if call.lengths[3] is not None:  # keys that no sequence uses are not written
            dk.zero_()
            dv.zero_()
        sums = tuple(one.memory(q) for one in self.sums)
        tables, turns = self.tables, None
        if self.turn_rows is not None:
            done = q.new_zeros(*of_heads, padded // self.turn_rows, dtype=torch.int32)
            tables, turns = None, (done, *(tables or (None, None, None)))
        if self.rows or self.tables is not None:
            hold_if_captured(q.get_device(), self)
        self.launch(
            q, k, v, saved.out, dout, saved.lse, saved.dlse, lse2, delta, dq_sum, dq, dk, dv,
            *lengths, tables, turns, operands + self.rows or None, self.scalars, call.scale,
            sums or None, counter(q.get_device()) if self.counted else None,
        )  # fmt: skip
        dsinks = None
        if sinks is not None:
            # d lse / d sink is the sink's own share of the denominator, which has no value to bring. Of rows
            # that are none, or see nothing, lse2 is inf.
            share = (sinks.float()[:, None] * math.log2(math.e) - lse2).exp2()
            found = (share * delta).sum(-1 if call.packed else (0, 2))
            dsinks = found.to(call.sinks.dtype)  # type: ignore[union-attr]
        captured = tuple(one.result(x, call.operands) for one, x in zip(self.sums, sums, strict=True))
        return Gradients(dq, dk, dv, dsinks, captured)


def run_backward(engine: Engine, call: Call, saved: Saved, needs: Sequence[int] = ()) -> Gradients | None:
    """`needs` are the slots of captured tensors whose gradients are wanted. None where there is no kernel for
    it: callers then compute it another way."""
    deterministic = engine.schedule.deterministic or torch.are_deterministic_algorithms_enabled()
    if call.lengths is not NO_LENGTHS:
        check_lengths(call)
    seen = _decisive(engine, call, deterministic)
    key = (engine.key(call), look(saved.dout), saved.dlse is None, tuple(needs), deterministic)
    ready = engine.backward.get(key, seen, _UNKNOWN)
    if ready is _UNKNOWN:
        try:
            with proving():
                ready = _make_ready(engine, call, saved, needs, deterministic)
        except UnsupportedError:
            ready = None
        engine.backward.keep(key, seen, ready)
    return None if ready is None else ready(call, saved)


_UNKNOWN = object()


def _decisive(engine: Engine, call: Call, deterministic: bool) -> Sequence[Tensor]:
    """Tensors whose contents decide what is launched: most masks are tables here, which follow lengths."""
    seen = list(engine.watched_tensors(call))
    if call.lengths is NO_LENGTHS or engine.facts.mask is TRUE or engine.watched.lengths:
        return seen
    if not deterministic and read_queries(engine.facts) and engine.facts.queries.certain:  # type: ignore[union-attr]
        return seen
    return seen + [x for x in call.lengths if x is not None]


def _make_ready(
    engine: Engine, call: Call, saved: Saved, needs: Sequence[int], deterministic: bool
) -> ReadyBackward:
    target, problem, facts, rows, captured, numbers = settle(engine, call)
    sloped = facts.gradient.by_score is not const(1.0)
    many_keys = 0 < target.many_keys < _keys(call) and _met_alike(engine.facts, problem)
    problem = replace(
        problem,
        sloped=sloped,
        deterministic=deterministic,
        many_keys=many_keys,
        long_scores=_long_scores(engine.facts),
        pair_reads=any(map(read_by_pairs, nodes(engine.facts.score))),
        long_masks=_long_masks(engine.facts),
    )
    if not deterministic:
        queries = prove_queries(engine.facts, call.extents(), captured)
        if queries is not None:
            facts, rows, problem = engine.facts, (), by_queries(problem, queries, len(call.operands))
    sums = sums_of(engine.facts, call, problem, target, needs)
    problem = replace(problem, gradients=tuple((one.slot, one.adding) for one in sums))
    plan, source = program(facts, problem, target)
    signature = replace(signature_of(engine, call, rows), dlse=saved.dlse is not None)
    kernel = compile_kernel(source, problem, signature, target.name)
    tables: BlockTables | TurnTables | None = None
    if problem.mask_form in ("spans", "tables"):
        maps = [one.transposed() for one in maps_of(engine, call, captured, plan.tile)]
        tables = (turns_to_device if deterministic else to_device)(maps, call.extents(), call.q.device)
    return ReadyBackward(
        kernel.launch,
        fixes_of(call),
        plan.head_dim,
        row_block(plan.config().tile_m),
        plan.config().turn_rows if deterministic else None,
        plan.persistent,
        tables,
        rows,
        numbers or None,
        separate(sums, engine.facts, call, plan) if deterministic else sums,
    )


def by_queries(problem: Problem, proved: ProvedQueries, operands: int) -> Problem:
    """The same problem, its mask computed by query intervals, without the tables of key intervals that follow
    `operands` captured tensors."""
    return replace(
        problem,
        mask_form="queries",
        operands=problem.operands[:operands],
        wide_index=problem.wide_index or proved.wide_index,
        in_range=problem.in_range and proved.in_range,
    )


def _keys(call: Call) -> int:
    """Of a sequence: of packed ones on average, and of padded ones half of the padded length. Lengths
    themselves may change from call to call of the same look."""
    extents = call.extents()
    if call.packed:
        return extents.kv_len // max(extents.batch, 1)
    return extents.kv_len if call.lengths[3] is None else extents.kv_len // 2


def _long_scores(facts: Facts) -> bool:
    """Whether tensors are read for a score by query or key, or its derivative is another one for each."""
    read = {name for node in nodes(facts.score) if node.op in READS for name in node.free}
    return not {"q", "kv", "score"}.isdisjoint(read | facts.gradient.by_score.free)


def _long_masks(facts: Facts) -> bool:
    """Whether query intervals take divisions, or elements of captured tensors."""
    bounds = () if facts.queries is None else (bound for span in facts.queries.spans for bound in span)
    return any(node.op in (*READS, "floordiv", "mod") for bound in bounds for node in nodes(bound))


def _met_alike(facts: Facts, problem: Problem) -> bool:
    """Whether keys next to each other meet nearly the same queries: all of them, or those from some one on,
    as under a causal mask."""
    if problem.mask_form == "spans" and facts.keys is not None:
        return all(lo is const(0) for lo, _ in facts.keys.spans)
    return problem.mask_form == "none"


@lru_cache(maxsize=256)
def program(facts: Facts, problem: Problem, target: Target) -> tuple[Any, Source]:
    """The plan and the generated source, without the user's lines: equal programs are one kernel."""
    from fa4flex.codegen.emit import emit_backward
    from fa4flex.codegen.plan.backward import plan_backward

    plan = plan_backward(problem, target)
    return plan, emit_backward(facts, plan)
