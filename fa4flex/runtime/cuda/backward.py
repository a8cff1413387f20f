"""Gradients on NVIDIA GPUs: q, k, v, sinks, captured tensors, and through the log-sum-exp.

What is decided once per look of a call is kept, as for the forward pass (engine.py). A launch runs three
kernels: rows' statistics, the products, and dQ into its own dtype and order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from fa4flex.codegen.analyze.prove import proving, read_queries
from fa4flex.codegen.analyze.reach import ANY, Extents, Reach, extents_of
from fa4flex.codegen.expr import TRUE
from fa4flex.codegen.plan.arguments import BACKWARD
from fa4flex.codegen.plan.lengths import ROW_BLOCK, row_block
from fa4flex.errors import UnsupportedError
from fa4flex.runtime.cuda.arguments import INTERVALS, conversions_of, key_function, launch_function
from fa4flex.runtime.cuda.block_tables import BlockTables, TurnTables, to_device, turns_to_device
from fa4flex.runtime.cuda.call import NO_LENGTHS, Call
from fa4flex.runtime.cuda.captured_sums import memory_of, result_of
from fa4flex.runtime.cuda.counter import counter
from fa4flex.runtime.cuda.engine import Engine, given_of, maps_of, signature_of
from fa4flex.runtime.cuda.families import look_of
from fa4flex.runtime.cuda.graphs import hold_if_captured
from fa4flex.runtime.cuda.interval_tables import interval_tables
from fa4flex.runtime.cuda.lengths import check_lengths

if TYPE_CHECKING:
    from fa4flex.codegen.plan.captured_sums import CapturedSum
    from fa4flex.codegen.plan.pipeline import BackwardPlan


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
    """Gradients of the captured tensors asked for, in their dtypes."""


PARAMETERS = (
    "call", "saved", "lse2", "delta", "dq_sum", "dq", "dk", "dv", "tables", "turns", "gradients", "counter"
)  # fmt: skip
"""Parameters of a backward launch function; other arguments are the same for all calls that look alike."""


@dataclass(frozen=True, eq=False)
class ReadyBackward:
    """A launch in which only pointers are missing.

    launch      a function of PARAMETERS
    owns        whether it reads tensors that are no one else's, which captured graphs must keep
    width       of the tile that holds rows of q
    turn_rows   where sums are ordered, how many rows take turns together, else None
    counted     whether blocks take tiles of keys from a counter
    reach       extents of the calls that it serves
    sums        memory for the gradients of captured tensors
    """

    launch: Callable[..., None]
    owns: bool
    width: int
    row_block: int
    turn_rows: int | None
    counted: bool
    tables: BlockTables | TurnTables | None
    sums: tuple[CapturedSum, ...]
    reach: Reach

    def __call__(self, call: Call, saved: Saved) -> Gradients:
        q, k, v = call.q, call.k, call.v
        *of_heads, rows = saved.lse.shape
        padded = self.padded(call, rows)
        statistics = *of_heads, padded
        lse2 = q.new_empty(statistics, dtype=torch.float32)
        delta = q.new_empty(statistics, dtype=torch.float32)
        dq_sum = q.new_empty((*of_heads, padded * self.width), dtype=torch.float32)
        # torch.empty_like would have to be told that q, k and v may lie in memory otherwise.
        dq, dk, dv = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
        if call.lengths.seqused_k is not None:  # keys that no sequence uses are not written
            dk.zero_()
            dv.zero_()
        sums = tuple([memory_of(one, q) for one in self.sums]) if self.sums else None
        tables, turns = self.tables, None
        if self.turn_rows is not None:
            done = q.new_zeros(*of_heads, padded // self.turn_rows, dtype=torch.int32)
            tables, turns = None, (done, *(tables or (None, None, None)))
        if self.owns:
            hold_if_captured(q.get_device(), self)
        taken = counter(q.get_device()) if self.counted else None
        self.launch(call, saved, lse2, delta, dq_sum, dq, dk, dv, tables, turns, sums, taken)
        dsinks = None if call.sinks is None else _of_sinks(call.sinks, call.packed, lse2, delta)
        if sums is None:
            return Gradients(dq, dk, dv, dsinks, ())
        captured = tuple(result_of(one, x, call.operands) for one, x in zip(self.sums, sums, strict=True))
        return Gradients(dq, dk, dv, dsinks, captured)

    def padded(self, call: Call, rows: int) -> int:
        """Rows of a head's statistics and sums: whole blocks, of each sequence of a packed batch."""
        if call.packed:
            return (rows // ROW_BLOCK + call.extents().batch) * ROW_BLOCK
        return -(-rows // self.row_block) * self.row_block


def _of_sinks(sinks: Tensor, packed: bool, lse2: Tensor, delta: Tensor) -> Tensor:
    """Gradient of the sinks: d lse / d sink is the sink's own share of the denominator, which has no value to
    bring. Rows that are none, or see nothing, have lse2 inf."""
    share = (sinks.detach().float()[:, None] * math.log2(math.e) - lse2).exp2()
    return (share * delta).sum(-1 if packed else (0, 2)).to(sinks.dtype)


def run_backward(engine: Engine, call: Call, saved: Saved, needs: Sequence[int] = ()) -> Gradients | None:
    """`needs` are the slots of captured tensors whose gradients are wanted. None where there is no kernel for
    it: callers then compute it another way."""
    deterministic = engine.schedule.deterministic or torch.are_deterministic_algorithms_enabled()
    asked = tuple(needs), deterministic
    known = engine.recent_backward.find(call, saved, asked)
    if known is not None:
        return known(call, saved)
    if call.lengths is not NO_LENGTHS:
        check_lengths(call)
    seen = _decisive(engine, call, deterministic)
    found = look_of(call)
    assert found is not None, "gradients are those of a call that was launched"
    look, extents = (found[0], _key_of_saved(saved), *asked), found[1]
    ready = engine.backward.find(look, extents, seen, _UNKNOWN)
    if ready is _UNKNOWN:
        try:
            with proving():
                ready = _make_ready(engine, call, saved, needs, deterministic)
        except UnsupportedError:
            ready = None
        engine.backward.keep(look, extents, seen, ready)
    if ready is None:
        return None
    if not seen:
        engine.recent_backward.remember(call, saved, asked, ready)
    return ready(call, saved)


_UNKNOWN = object()
_key_of_saved = key_function(BACKWARD, "saved")


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
    from fa4flex.lower import lower_backward

    given, reach = given_of(engine, call, replace(engine.schedule, deterministic=deterministic), True)
    lowered, captured = lower_backward(given, needs), given.captured
    plan: BackwardPlan = lowered.plan
    rows = interval_tables(lowered.tabulated.ends, given.inputs.extents, captured, call.q.device)
    kernel = lowered.compile(signature_of(engine, call, rows, ("dlse",) if saved.dlse is not None else ()))
    tables: BlockTables | TurnTables | None = None
    if lowered.problem.mask_form in ("spans", "tables"):
        maps = [one.transposed() for one in maps_of(engine, call, captured, plan.tile)]
        tables = (turns_to_device if deterministic else to_device)(maps, call.extents(), call.q.device)
    of_one = tables is not None or any(one.adding != "sum" for one in lowered.sums)
    if of_one or (lowered.sums and deterministic):
        reach = Reach.exactly(extents_of(given.inputs.extents))
    elif lowered.sums:
        reach = reach.within(_as_alone(extents_of(given.inputs.extents)))
    constants = {"scalars": captured.scalars or None, INTERVALS: rows}
    conversions = conversions_of(BACKWARD, call=call, saved=saved)
    return ReadyBackward(
        launch_function(BACKWARD, kernel.launch, PARAMETERS, constants, conversions),
        bool(rows) or tables is not None,
        plan.head_dim,
        row_block(plan.config().tile_m),
        plan.config().turn_rows if deterministic else None,
        plan.persistent,
        tables,
        lowered.sums,
        reach,
    )


def _as_alone(extents: Extents) -> Reach:
    """The extents with one batch entry, or those with several: gradients of captured tensors are added up in
    other ways there (codegen/plan/captured_sums.py)."""
    least, most = (0, 1) if extents[0] <= 1 else (2, ANY)
    return Reach((least, 0, 0), (most, ANY, ANY))
