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
from typing import TYPE_CHECKING

import torch

from fa4flex.codegen.analyze.extents import ANY, Extents, Reach, extents_of
from fa4flex.codegen.analyze.prove import proving
from fa4flex.contents import VALIDATE
from fa4flex.errors import Fa4flexError, UnsupportedError
from fa4flex.kernels.plan.arguments import BACKWARD
from fa4flex.kernels.plan.groups import groups_of
from fa4flex.kernels.plan.lengths import row_block
from fa4flex.runtime.call import NO_LENGTHS, Call
from fa4flex.runtime.cuda.calls.arguments import conversions_of, key_function, launch_function
from fa4flex.runtime.cuda.calls.signatures import signature_of
from fa4flex.runtime.cuda.device import faults
from fa4flex.runtime.cuda.device.device import require_not_capturing
from fa4flex.runtime.cuda.engine import UNSEEN, Engine, kernels_of, lowered_for
from fa4flex.runtime.cuda.launches.ready_backward import PARAMETERS, Gradients, ReadyBackward, Saved
from fa4flex.runtime.cuda.tables.lengths import check_lengths, lengths_kernel, lengths_of
from fa4flex.runtime.cuda.tables.tables import tables_kernel, tables_of

if TYPE_CHECKING:
    from fa4flex.compiler.signature import Signature
    from fa4flex.kernels.plan.pipeline import BackwardPlan
    from fa4flex.lower import Given, Lowered


def run_backward(engine: Engine, call: Call, saved: Saved, needs: Sequence[int] = ()) -> Gradients | None:
    """`needs` are the slots of captured tensors whose gradients are wanted. None where there is no kernel for
    it: callers then compute it another way. Raises InputError for what an earlier call was wrong in."""
    faults.check()
    deterministic = _deterministic(engine)
    asked = tuple(needs), deterministic, engine.bits
    known = engine.recent_backward.find(call, saved, asked)
    if known is not None:
        return known(call, saved)
    if VALIDATE:
        check_lengths(call)
    result = engine.look(call)
    assert result is not None, "gradients are those of a call that was launched"
    look, extents = (result[0], _key_of_saved(saved), *asked[:2]), result[1]
    ready = engine.backward.find(look, extents, UNSEEN)
    if ready is UNSEEN:
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


_key_of_saved = key_function(BACKWARD, "saved")


def compile_ahead(engine: Engine, call: Call, dlse: bool) -> None:
    """Begin to compile all kernels of a call with gradients but that of its forward pass, which this process
    compiles meanwhile. `dlse`: whether the log-sum-exp will have a gradient. What is wrong with the call is
    left for the passes to say."""
    with contextlib.suppress(Fa4flexError), proving():
        require_not_capturing()
        _, *before = kernels_of(engine, call)
        longest, *others = _kernels_of(engine, call, dlse)
        for lowered, signature in (longest, *before, *others):
            lowered.compile_ahead(signature)


def _kernels_of(engine: Engine, call: Call, dlse: bool) -> list[tuple[Lowered, Signature]]:
    """All kernels that `_make_ready` will have compiled, that of the pass first."""
    needs = [slot for slot, x in enumerate(call.operands) if x.requires_grad]
    lowered, value, signature, _ = _lowered(engine, call, needs, dlse, _deterministic(engine))
    lengths = lengths_kernel(engine.kinds, call, lowered)
    tables = tables_kernel(engine.kinds, call, lowered, value.captured)
    return [asked for asked in ((lowered, signature), lengths, tables) if asked is not None]


def _lowered(
    engine: Engine, call: Call, needs: Sequence[int], dlse: bool, deterministic: bool
) -> tuple[Lowered, Given, Signature, Reach]:
    """Everything that decides the kernels, and the extents of other calls for which it is the same."""
    from fa4flex.lower import lower_backward

    schedule = replace(engine.schedule, deterministic=deterministic)
    lower = partial(lower_backward, needs=needs)
    lowered, value, reach = lowered_for(engine, call, schedule, lower, queries=not deterministic)
    return lowered, value, signature_of(engine.kinds, call, ("dlse",) * dlse), reach


def _make_ready(
    engine: Engine, call: Call, saved: Saved, needs: Sequence[int], deterministic: bool
) -> ReadyBackward:
    lowered, value, signature, reach = _lowered(engine, call, needs, saved.dlse is not None, deterministic)
    captured = value.captured
    plan: BackwardPlan = lowered.plan
    kernel = lowered.compile(signature)
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
    )


def _as_alone(extents: Extents) -> Reach:
    """The extents with one batch entry, or those with several: gradients of captured tensors are added up in
    other ways there (kernels/plan/captured_sums.py)."""
    least, most = (0, 1) if extents[0] <= 1 else (2, ANY)
    return Reach((least, 0, 0), (most, ANY, ANY))
