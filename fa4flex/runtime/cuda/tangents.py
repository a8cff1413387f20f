"""Attention and its tangents on NVIDIA GPUs, in one pass where there is a kernel for it.

What is decided once per look of a call is kept, as for the forward pass (engine.py).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from fa4flex import later
from fa4flex.codegen.analyze.prove import proving
from fa4flex.contents import VALIDATE
from fa4flex.errors import UnsupportedError
from fa4flex.kernels.plan.arguments import TANGENTS
from fa4flex.runtime.call import NO_LENGTHS, Call
from fa4flex.runtime.cuda.calls.arguments import conversions_of, launch_function
from fa4flex.runtime.cuda.calls.launch_cache import MISSING, Key
from fa4flex.runtime.cuda.calls.looks import heads_look
from fa4flex.runtime.cuda.calls.prepared import prepared
from fa4flex.runtime.cuda.calls.signatures import signature_of
from fa4flex.runtime.cuda.device import faults
from fa4flex.runtime.cuda.device.device import require_not_capturing
from fa4flex.runtime.cuda.engine import Engine, lowered_for, sorted_tiles
from fa4flex.runtime.cuda.launches.ready_tangents import (
    ABSENT,
    PARAMETERS,
    Pushed,
    ReadyTangents,
    Tangents,
)
from fa4flex.runtime.cuda.tables.lengths import check_lengths, lengths_of
from fa4flex.runtime.cuda.tables.tables import tables_of

if TYPE_CHECKING:
    from fa4flex.kernels.plan.pipeline import ForwardPlan


def run_tangents(engine: Engine, call: Call, tangents: Tangents) -> Pushed | None:
    """None where there is no kernel for it: callers then compute it another way. Raises InputError for what
    an earlier call was wrong in."""
    if faults.pending.value or later.awaited:
        faults.check()
    if VALIDATE:
        check_lengths(call)
    found = engine.key(call)
    if found is None:
        return None
    key: Key = found[0], tuple(x if x is None else heads_look(x) for x in tangents)
    ready = engine.tangents.find(key, found[1])
    if ready is MISSING:
        try:
            with proving():
                ready = _make_ready(engine, call, tangents)
        except UnsupportedError:
            ready = None
        engine.tangents.keep(key, found[1], ready)
    pushed: Pushed | None = None if ready is None else ready(call, tangents)
    return pushed


def _make_ready(engine: Engine, call: Call, tangents: Tangents) -> ReadyTangents:
    """Everything that calls that look like this one have in common. Raises UnsupportedError for what no
    kernel does, PastTheEnd for short captured tensors."""
    from fa4flex.lower import lower_tangents

    require_not_capturing()
    lower = partial(lower_tangents, moved=tangents.moved)
    lowered, value, reach = lowered_for(engine, call, engine.schedule, lower)
    plan: ForwardPlan = lowered.plan
    tiles = sorted_tiles(plan)
    signature = signature_of(engine.kinds, call, () if tiles is None else ("order",))
    kernel = lowered.compile(signature)
    constants = {"scalars": prepared(value.captured.scalars or None), **dict.fromkeys(ABSENT)}
    conversions = conversions_of(TANGENTS, call=call._replace(lengths=NO_LENGTHS), tangents=tangents)
    return ReadyTangents(
        launch_function(TANGENTS, kernel.launch, PARAMETERS, constants, conversions),
        engine.precision.output_dtype(call.q.dtype),
        plan.config().dynamic,
        reach,
        lengths_of(engine.kinds, call, lowered, engine.counted, tiles),
        tables_of(engine.kinds, call, lowered, value.captured, engine.counted),
        engine.watch_integers if engine.watches_integers else None,
        lowered.answers,
    )
