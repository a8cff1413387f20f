"""Gradients on NVIDIA GPUs: q, k, v, sinks, captured tensors, and through the log-sum-exp.

What is decided once per look of a call is kept, as for the forward pass (engine.py). A launch runs three
kernels: rows' statistics, the products, and dQ into its own dtype and order; and one that adds up dK and dV
where query heads that share keys were taken in parts.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fa4flex.codegen.analyze.prove import proving
from fa4flex.codegen.analyze.reach import ANY, Extents, Reach, extents_of
from fa4flex.codegen.plan.arguments import BACKWARD
from fa4flex.codegen.plan.groups import Groups, groups_of
from fa4flex.codegen.plan.lengths import ROW_BLOCK, row_block
from fa4flex.contents import VALIDATE
from fa4flex.errors import Fa4flexError, UnsupportedError
from fa4flex.runtime.cuda import faults
from fa4flex.runtime.cuda.arguments import conversions_of, key_function, launch_function
from fa4flex.runtime.cuda.call import NO_LENGTHS, Call, SequenceLengths
from fa4flex.runtime.cuda.captured_sums import memory_of, result_of
from fa4flex.runtime.cuda.counter import counter
from fa4flex.runtime.cuda.device import require_not_capturing
from fa4flex.runtime.cuda.engine import Engine, given_of
from fa4flex.runtime.cuda.lengths import LengthsKernel, check_lengths, lengths_of
from fa4flex.runtime.cuda.signatures import signature_of
from fa4flex.runtime.cuda.tables import tables_of

if TYPE_CHECKING:
    from fa4flex.codegen.plan.captured_sums import CapturedSum
    from fa4flex.codegen.plan.pipeline import BackwardPlan
    from fa4flex.compiler.signature import Signature
    from fa4flex.lower import Given, Lowered


class Saved(NamedTuple):
    """Results of the forward pass, and the gradients that arrive: out, dout [B, H, S, D]; lse, dlse [B, H,
    S], dlse None where nothing depends on the log-sum-exp. Packed: [T, H, D] and [H, T]."""

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
    "call", "saved", "lse2", "delta", "dq_sum", "dq", "dk", "dv", "dk_parts", "dv_parts", "tables", "turns",
    "gradients", "counter", *SequenceLengths._fields,
)  # fmt: skip
"""Parameters of a backward launch function; other arguments are the same for all calls that look alike."""


@dataclass(frozen=True, eq=False)
class ReadyBackward:
    """A launch in which only pointers are missing.

    launch      a function of PARAMETERS
    width       of the tile that holds rows of q
    turn_rows   where sums are ordered, how many rows take turns together, else None
    counted     whether blocks take tiles of keys from a counter
    tables      makes or finds the block tables of a call, where the mask is told by them
    reach       extents of the calls that it serves
    sums        memory for the gradients of captured tensors
    groups      where query heads share keys: in how many parts they are taken
    lengths     what corrects the lengths of a ragged batch
    """

    launch: Callable[..., None]
    width: int
    row_block: int
    turn_rows: int | None
    counted: bool
    tables: Callable[[Call], Any] | None
    sums: tuple[CapturedSum, ...]
    reach: Reach
    lengths: LengthsKernel | None = None
    groups: Groups | None = None

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
        parts = None if self.groups is None else _parts(self.groups, call, dk, dv)
        if call.lengths.seqused_k is not None:  # keys that no sequence uses are not written
            for x in parts or (dk, dv):
                x.zero_()
        made = dq, dk, dv, *(parts or (None, None))
        sums = tuple([memory_of(one, q) for one in self.sums]) if self.sums else None
        tables, turns = None if self.tables is None else self.tables(call), None
        if self.turn_rows is not None:
            done = q.new_zeros(*of_heads, padded // self.turn_rows, dtype=torch.int32)
            tables, turns = None, (done, *(tables or (None, None, None)))
        lengths = NO_LENGTHS if self.lengths is None else self.lengths(call)[0]
        taken = counter(q.get_device()) if self.counted else None
        self.launch(call, saved, lse2, delta, dq_sum, *made, tables, turns, sums, taken, *lengths)
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


def _parts(groups: Groups, call: Call, dk: Tensor, dv: Tensor) -> Sequence[Tensor]:
    """Memory for dK and dV of parts of groups, which is that of dK and dV where there is one part each."""
    parts = groups.parts(*extents_of(call.extents()))
    if parts == 1:
        return dk, dv
    heads = -3 if call.heads_first and not call.packed else -2
    shape, widths = list(dk.shape), (dk.shape[-1], dv.shape[-1])
    shape[heads] *= parts
    shape[-1] = sum(widths)
    return dk.new_empty(shape).split(widths, -1)


def _of_sinks(sinks: Tensor, packed: bool, lse2: Tensor, delta: Tensor) -> Tensor:
    """Gradient of the sinks: d lse / d sink is the sink's own share of the denominator, which has no value to
    bring. Rows that are none, or see nothing, have lse2 inf."""
    share = (sinks.detach().float()[:, None] * math.log2(math.e) - lse2).exp2()
    return (share * delta).sum(-1 if packed else (0, 2)).to(sinks.dtype)


def run_backward(engine: Engine, call: Call, saved: Saved, needs: Sequence[int] = ()) -> Gradients | None:
    """`needs` are the slots of captured tensors whose gradients are wanted. None where there is no kernel for
    it: callers then compute it another way. Raises InputError for what an earlier call was wrong in."""
    faults.check()
    deterministic = _deterministic(engine)
    asked = tuple(needs), deterministic
    known = engine.recent_backward.find(call, saved, asked)
    if known is not None:
        return known(call, saved)
    if VALIDATE:
        check_lengths(call)
    found = engine.look(call)
    assert found is not None, "gradients are those of a call that was launched"
    look, extents = (found[0], _key_of_saved(saved), *asked), found[1]
    ready = engine.backward.find(look, extents, _UNKNOWN)
    if ready is _UNKNOWN:
        try:
            with proving():
                ready = _make_ready(engine, call, saved, needs, deterministic)
        except UnsupportedError:
            ready = None
        engine.backward.keep(look, extents, ready)
    if ready is None:
        check_lengths(call)  # the host reads them
        return None
    engine.recent_backward.remember(call, saved, asked, ready)
    return ready(call, saved)


def _deterministic(engine: Engine) -> bool:
    return engine.schedule.deterministic or torch.are_deterministic_algorithms_enabled()


_UNKNOWN = object()
_key_of_saved = key_function(BACKWARD, "saved")


def compile_ahead(engine: Engine, call: Call, dlse: bool) -> None:
    """Begin to compile for the gradients of a call, before its forward pass is. `dlse`: whether the
    log-sum-exp will have one. What is wrong with the call is left for the passes to say."""
    needs = [slot for slot, x in enumerate(call.operands) if x.requires_grad]
    with contextlib.suppress(Fa4flexError), proving():
        require_not_capturing()
        lowered, _, signature, _ = _lowered(engine, call, needs, dlse, _deterministic(engine))
        lowered.compile_ahead(signature)


def _lowered(
    engine: Engine, call: Call, needs: Sequence[int], dlse: bool, deterministic: bool
) -> tuple[Lowered, Given, Signature, Reach]:
    """Everything that decides the kernels, and the extents of other calls for which it is the same."""
    from fa4flex.lower import lower_backward

    given, reach = given_of(engine, call, replace(engine.schedule, deterministic=deterministic), True)
    return lower_backward(given, needs), given, signature_of(engine.kinds, call, ("dlse",) * dlse), reach


def _make_ready(
    engine: Engine, call: Call, saved: Saved, needs: Sequence[int], deterministic: bool
) -> ReadyBackward:
    lowered, given, signature, reach = _lowered(engine, call, needs, saved.dlse is not None, deterministic)
    captured = given.captured
    plan: BackwardPlan = lowered.plan
    kernel = lowered.compile(signature)
    by_tables = lowered.problem.mask_form in ("spans", "tables")
    of_one = by_tables or any(one.adding != "sum" for one in lowered.sums)
    if of_one or (lowered.sums and deterministic):
        reach = Reach.exactly(extents_of(given.inputs.extents))
    elif lowered.sums:
        reach = reach.within(_as_alone(extents_of(given.inputs.extents)))
    constants = {"scalars": captured.scalars or None}
    conversions = conversions_of(BACKWARD, call=call._replace(lengths=NO_LENGTHS), saved=saved)
    return ReadyBackward(
        launch_function(BACKWARD, kernel.launch, PARAMETERS, constants, conversions),
        plan.head_dim,
        row_block(plan.config().tile_m),
        plan.config().turn_rows if deterministic else None,
        plan.persistent,
        tables_of(engine.kinds, call, lowered, captured) if by_tables else None,
        lowered.sums,
        reach,
        lengths_of(engine.kinds, call, lowered),
        groups_of(given.inputs, plan),
    )


def _as_alone(extents: Extents) -> Reach:
    """The extents with one batch entry, or those with several: gradients of captured tensors are added up in
    other ways there (codegen/plan/captured_sums.py)."""
    least, most = (0, 1) if extents[0] <= 1 else (2, ANY)
    return Reach((least, 0, 0), (most, ANY, ANY))
