"""Gradients on NVIDIA GPUs: q, k, v, sinks, captured tensors, and through the log-sum-exp.

What is decided once per look of a call is kept, as for the forward pass (engine.py). A launch runs three
kernels: rows' statistics, the products, and dQ into its own dtype and order, if the second has not written it
so; and one that adds up dK and dV where query heads that share keys were taken in parts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from fa4flex import later
from fa4flex.codegen.analyze.extents import ANY, Extents, Reach, extents_of
from fa4flex.codegen.analyze.prove import proving
from fa4flex.compiler import ahead
from fa4flex.compiler.compile import prepare_ahead
from fa4flex.contents import VALIDATE
from fa4flex.errors import Fa4flexError, UnsupportedError
from fa4flex.kernels.plan.arguments import BACKWARD
from fa4flex.kernels.plan.groups import groups_of
from fa4flex.kernels.plan.lengths import row_block
from fa4flex.kernels.plan.sizes import NO_ANSWERS, Answers
from fa4flex.runtime.call import NO_LENGTHS, Call
from fa4flex.runtime.cuda.calls.arguments import conversions_of, key_function, launch_function
from fa4flex.runtime.cuda.calls.conversions import tma_able
from fa4flex.runtime.cuda.calls.launch_cache import MISSING
from fa4flex.runtime.cuda.calls.signatures import signature_of
from fa4flex.runtime.cuda.device import faults
from fa4flex.runtime.cuda.device.device import require_not_capturing
from fa4flex.runtime.cuda.engine import Engine, chip_of, described, lowered_for
from fa4flex.runtime.cuda.known import (
    Form,
    Known,
    Row,
    Shortlist,
    alignments_of,
    brought,
    checked,
    guard_of,
    nothing_alike,
    rows_of,
)
from fa4flex.runtime.cuda.launches.ready_backward import PARAMETERS, Gradients, ReadyBackward, Saved
from fa4flex.runtime.cuda.meanwhile import Described, meanwhile
from fa4flex.runtime.cuda.tables.lengths import check_lengths, lengths_kernel, lengths_of
from fa4flex.runtime.cuda.tables.tables import tables_kernel, tables_of
from ptxsim import active as simulated

if TYPE_CHECKING:
    from fa4flex.kernels.plan.pipeline import BackwardPlan


def run_backward(engine: Engine, call: Call, saved: Saved, needs: Sequence[int] = ()) -> Gradients | None:
    """`needs` are the slots of captured tensors whose gradients are wanted. None where there is no kernel for
    it: callers then compute it another way. Raises InputError for what an earlier call was wrong in."""
    if faults.pending.value or later.awaited:
        faults.check()
    deterministic, slots = _deterministic(engine), tuple(needs)
    compared = _compared(call, saved, (slots, deterministic, engine.stand))
    known = _known(engine.known_backward, call, saved, compared)
    if known is not None:
        return known(call, saved)
    if VALIDATE:
        check_lengths(call)
    result = engine.key(call)
    assert result is not None, "gradients are those of a call that was launched"
    key, extents = (result[0], _key_of_saved(saved), slots, deterministic), result[1]
    ready = engine.backward.find(key, extents)
    if ready is MISSING:
        try:
            with proving():
                alike = engine.backward.answers(key)
                ready = _make_ready(engine, call, saved, slots, deterministic, alike)
        except UnsupportedError:
            ready = None
        engine.backward.keep(key, extents, ready)
    elif ready is not None and not checked(call.kv, call.lengths):
        _remember(engine.known_backward, call, saved, ready, compared)
    if ready is None:
        check_lengths(call)  # the host reads them
        return None
    gradients: Gradients = ready(call, saved)
    return gradients


class Compared(NamedTuple):
    """A backward pass as it is compared with earlier ones: see Known. more: tensors of lengths."""

    form: Form
    more: tuple[Tensor, ...]
    others: tuple[Tensor, ...]
    tensors: tuple[Tensor, ...]


def _compared(call: Call, saved: Saved, asked: Form) -> Compared:
    q, kv, operands, sinks, lengths, _, scale, heads_first, statistics = call
    beside, more = brought(kv, lengths)
    out, _, dout, *_ = saved
    others = (*_of_rows(saved), *operands)
    if sinks is not None:
        others = *others, sinks
    gpu = simulated.gpu()
    absent = saved.dlse is None, saved.dentropy is None, sinks is None
    form = asked, beside, absent, scale > 0, heads_first, statistics, gpu
    return Compared(form, more, others, (q, kv.k, kv.v, *more, out, dout, *others))


def _of_rows(saved: Saved) -> list[Tensor]:
    """Statistics of rows and their gradients."""
    return [x for x in (saved.lse, *saved[3:]) if x is not None]


def _known(shortlist: Shortlist[Known], call: Call, saved: Saved, compared: Compared) -> ReadyBackward | None:
    """The launch of an earlier backward pass, if it serves this one."""
    form, _, others, tensors = compared
    for one in shortlist.kept:
        if one.form == form and one.guard(*tensors) and one.has(call.scalars):
            extents = one.serves(call, others, (saved.out, saved.dout))
            if extents is not None:
                if one.valid is not None and shortlist.recurs(one, extents):
                    guard = guard_of([*map(Row.of, tensors)]) or nothing_alike
                    shortlist.narrow(replace(one, guard=guard, valid=None, extents=extents, wide=one))
                ready: ReadyBackward = one.ready
                return ready
    return None


def _remember(
    shortlist: Shortlist[Known], call: Call, saved: Saved, ready: ReadyBackward, compared: Compared
) -> None:
    """`ready` was made for an earlier call. Where tensors of heads are copied at each launch, as a gradient
    of a sum is, which has strides of 0, it serves those of the very same shapes and strides."""
    form, more, others, tensors = compared
    if not shortlist.lacks(ready, form) or (ready.until is not None and ready.until.over):
        return
    rows, valid = [*map(Row.of, tensors)], None
    if all(map(tma_able, (call.q, call.kv.k, call.kv.v, saved.out, saved.dout))):
        free, of_rows = ((0,), (1,)) if call.packed else ((0, 2 if call.heads_first else 1), (0, 2))
        statistics = _of_rows(saved)
        rows = [
            *rows_of(call, call.kv, more),
            *[Row.of(x, free, unit=True) for x in (saved.out, saved.dout)],
            *[Row.of(x, of_rows, unit=True) for x in statistics],
            *map(Row.of, others[len(statistics) :]),
        ]
        valid = ready.reach
    guard, extents = guard_of(rows) or nothing_alike, extents_of(call.extents())
    shortlist.add(Known(ready, form, call.scalars, guard, valid, extents, alignments_of(others)))


def _deterministic(engine: Engine) -> bool:
    return engine.schedule.deterministic or torch.are_deterministic_algorithms_enabled()


_key_of_saved = key_function(BACKWARD, "saved")


def compile_ahead(engine: Engine, call: Call, dlse: bool) -> None:
    """Begin to compile all kernels of a call with gradients but that of its forward pass, which this process
    compiles meanwhile. `dlse`: whether the log-sum-exp will have a gradient; an entropy that was asked for
    has one. What is wrong with the call is left for the passes to say."""
    with contextlib.suppress(Fa4flexError), proving():
        require_not_capturing()
        prepare_ahead(chip_of(call).name)
        try:
            _compile_ahead(engine, call, dlse)
        finally:
            ahead.dismiss()


def _compile_ahead(engine: Engine, call: Call, dlse: bool) -> None:
    _, *before = described(engine, call).kernels
    needs = [slot for slot, x in enumerate(call.operands) if x.requires_grad]
    arriving = {"dlse": dlse, "dentropy": "entropy" in call.statistics}
    names = tuple([name for name, there in arriving.items() if there])
    longest, *others = _described(engine, call, needs, names, _deterministic(engine)).kernels
    for lowered, signature in (longest, *before, *others):
        lowered.compile_ahead(signature)


def _described(
    engine: Engine,
    call: Call,
    needs: Sequence[int],
    arriving: tuple[str, ...],
    deterministic: bool,
    answers: Answers = NO_ANSWERS,
) -> Described:
    """Everything that decides the launch of a backward pass. arriving: which of dlse and dentropy do;
    answers: of other calls, to questions about speed."""
    from fa4flex.lower import lower_backward

    schedule, entropy = replace(engine.schedule, deterministic=deterministic), "dentropy" in arriving
    lower = partial(lower_backward, needs=needs, entropy=entropy)
    lowered, value, reach = lowered_for(engine, call, schedule, lower, answers, queries=not deterministic)
    signature = signature_of(engine.kinds, call, (*arriving, *(("entropy",) if entropy else ())))
    lengths = lengths_kernel(engine.kinds, call, lowered)
    tables = tables_kernel(engine.kinds, call, lowered, value.captured)
    kernels = [asked for asked in ((lowered, signature), lengths, tables) if asked is not None]
    return Described(lowered, value, signature, reach, kernels)


def _make_ready(
    engine: Engine,
    call: Call,
    saved: Saved,
    needs: Sequence[int],
    deterministic: bool,
    answers: Sequence[Answers] = (),
) -> ReadyBackward:
    """answers: those of earlier calls that look like this one, to questions about speed."""
    arriving = tuple([x for x in ("dlse", "dentropy") if getattr(saved, x) is not None])
    describe = partial(_described, engine, call, needs, arriving, deterministic)
    chosen = describe()
    other = meanwhile(engine, chosen, answers, describe)
    if other is None:
        return _ready(engine, call, saved, chosen)
    made = _ready(engine, call, saved, other.serving)
    return replace(made, reach=made.reach.within(other.reach), until=other.awaited)


def _ready(engine: Engine, call: Call, saved: Saved, made: Described) -> ReadyBackward:
    lowered, value, reach = made.lowered, made.given, made.reach
    captured = value.captured
    plan: BackwardPlan = lowered.plan
    deterministic = lowered.problem.deterministic
    kernel = lowered.compile(made.signature)
    of_one = any(one.adding != "sum" for one in lowered.sums)
    if of_one or (lowered.sums and deterministic):
        reach = Reach.exactly(extents_of(value.inputs.extents))
    elif lowered.sums:
        reach = reach.within(_as_alone(extents_of(value.inputs.extents)))
    constants = {"scalars": captured.scalars or None}
    conversions = conversions_of(BACKWARD, call=call._replace(lengths=NO_LENGTHS), saved=saved)
    return ReadyBackward(
        launch_function(BACKWARD, kernel.launch, PARAMETERS, constants, conversions),
        plan.head_dim,
        row_block(plan.config().tile_m),
        plan.config().turn_rows if deterministic else None,
        plan.persistent,
        plan.stores_dq,
        plan.clears,
        tables_of(engine.kinds, call, lowered, captured, engine.counted),
        lowered.sums,
        reach,
        lengths_of(engine.kinds, call, lowered, engine.counted),
        groups_of(value.inputs, plan),
        value.inputs.shares,
        lowered.answers,
    )


def _as_alone(extents: Extents) -> Reach:
    """The extents with one batch entry, or those with several: gradients of captured tensors are added up in
    other ways there (kernels/plan/captured_sums.py)."""
    least, most = (0, 1) if extents[0] <= 1 else (2, ANY)
    return Reach((least, 0, 0), (most, ANY, ANY))
