"""Gradients on NVIDIA GPUs: q, k, v, sinks, captured tensors, and through the log-sum-exp.

What is decided once per look of a call is kept, as for the forward pass (engine.py). A launch runs three
kernels: rows' statistics, the products, and dQ into its own dtype and order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fa4flex.codegen.analyze.facts import Facts
from fa4flex.codegen.evaluate import Captured
from fa4flex.codegen.expr import const
from fa4flex.errors import UnsupportedError
from fa4flex.runtime.cuda.call import NO_LENGTHS, Call
from fa4flex.runtime.cuda.captured import CapturedSum, sums_of
from fa4flex.runtime.cuda.choose import look, prove
from fa4flex.runtime.cuda.compile import compile_kernel
from fa4flex.runtime.cuda.engine import (
    MOST_READY,
    NO_TENSORS,
    Engine,
    fixed,
    fixes_of,
    numbers_of,
    problem_of,
    signature_of,
    target_of,
    tma_able,
)
from fa4flex.runtime.cuda.rows import tabulate
from fa4flex.runtime.cuda.tables import BlockTables, dense_tables

if TYPE_CHECKING:
    from fa4flex.codegen.emit import Source
    from fa4flex.codegen.plan.problem import Problem
    from fa4flex.codegen.plan.target import Target

ROW_BLOCK = 128
"""What rows are padded to: see codegen/kernels/common/backward.py."""


class Saved(NamedTuple):
    """What the forward pass left, and the gradients that arrive: out, dout [B, H, S, D]; lse, dlse [B, H, S],
    dlse None where nothing depends on the log-sum-exp."""

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
    """A launch in which only pointers are missing. `width`: of the tile that holds rows of q."""

    launch: Callable[..., None]
    fixes: dict[int, Callable[[Tensor], Tensor]]
    width: int
    tables: BlockTables | None
    rows: tuple[Tensor, ...]
    scalars: tuple[int | float, ...] | None
    sums: tuple[CapturedSum, ...]

    def __call__(self, call: Call, saved: Saved) -> Gradients:
        q, k, v, sinks, lengths, operands = fixed(call, self.fixes)
        dout = saved.dout if tma_able(saved.dout) else saved.dout.contiguous()
        batch, heads, q_len = saved.lse.shape
        padded = -(-q_len // ROW_BLOCK) * ROW_BLOCK
        lse2, delta = q.new_empty(2, batch, heads, padded, dtype=torch.float32)
        dq_sum = q.new_zeros(batch, heads, padded * self.width, dtype=torch.float32)
        dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        sums = tuple(one.memory(q) for one in self.sums)
        self.launch(
            q, k, v, saved.out, dout, saved.lse, saved.dlse, lse2, delta, dq_sum, dq, dk, dv,
            *lengths[2:], self.tables, operands + self.rows or None, self.scalars, call.scale,
            sums or None,
        )  # fmt: skip
        dsinks = None
        if sinks is not None:
            # d lse / d sink is the sink's own share of the denominator, which has no value to bring.
            share = (sinks.float()[:, None] - saved.lse).exp()
            dsinks = -(share * delta[..., :q_len]).sum((0, 2)).to(call.sinks.dtype)  # type: ignore[union-attr]
        captured = tuple(one.result(x, call.operands) for one, x in zip(self.sums, sums, strict=True))
        return Gradients(dq, dk, dv, dsinks, captured)


def run_backward(engine: Engine, call: Call, saved: Saved, needs: Sequence[int] = ()) -> Gradients | None:
    """`needs` are the slots of captured tensors whose gradients are wanted. None where there is no kernel for
    it: callers then compute it another way."""
    if engine.schedule.deterministic or call.lengths is not NO_LENGTHS:
        return None
    seen = engine.watched_tensors(call)
    key = (engine.key(call, seen), look(saved.dout), saved.dlse is None, tuple(needs))
    if key not in engine.backward:
        while len(engine.backward) >= MOST_READY:
            engine.backward.pop(next(iter(engine.backward)))
        try:
            with torch.device("cpu"):
                engine.backward[key] = _make_ready(engine, call, saved, needs)
        except UnsupportedError:
            engine.backward[key] = None
    ready = engine.backward[key]
    return None if ready is None else ready(call, saved)


def _make_ready(engine: Engine, call: Call, saved: Saved, needs: Sequence[int]) -> ReadyBackward:
    target = target_of(call.q.device)
    numbers = numbers_of(engine, call)
    shape, captured = call.extents(), Captured(call.operands, numbers)
    proved = prove(engine.facts, shape, captured)
    facts, rows = engine.facts, NO_TENSORS
    if proved.mask_form == "spans":
        facts, rows = tabulate(facts, shape, captured, call.q.device)
    problem = problem_of(engine, call, proved, rows, target)
    problem = replace(problem, sloped=facts.gradient.by_score is not const(1.0))
    sums = sums_of(engine.facts, call, problem, needs)
    problem = replace(problem, gradients=tuple((one.slot, one.adding) for one in sums))
    plan, source = program(facts, problem, target)
    signature = replace(signature_of(engine, call, rows), dlse=saved.dlse is not None)
    kernel = compile_kernel(source, problem, signature, target.name)
    tables = None
    if problem.mask_form != "none":
        tables = dense_tables(engine.facts, shape, captured, plan.tile, call.q.device, by_keys=True)
    return ReadyBackward(kernel.launch, fixes_of(call), plan.head_dim, tables, rows, numbers or None, sums)


@lru_cache(maxsize=256)
def program(facts: Facts, problem: Problem, target: Target) -> tuple[Any, Source]:
    """The plan and the generated source, without the user's lines: equal programs are one kernel."""
    from fa4flex.codegen.emit import emit_backward
    from fa4flex.codegen.plan.backward import plan_backward

    plan = plan_backward(problem, target)
    return plan, emit_backward(facts, plan)
