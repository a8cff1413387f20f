"""Gradients over listed keys by kernels. Whether there are some is known before a forward pass: no other
backward pass reads lists."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fa4flex.codegen.analyze.extents import Reach
from fa4flex.codegen.analyze.prove import proving
from fa4flex.errors import UnsupportedError
from fa4flex.kernels.plan.arguments import BACKWARD, listed_backward_schema
from fa4flex.kernels.plan.sizes import NO_ANSWERS, Answers
from fa4flex.runtime.call import NO_LENGTHS, Call
from fa4flex.runtime.cuda.calls.arguments import conversions_of, key_function, launch_function
from fa4flex.runtime.cuda.calls.launch_cache import MISSING
from fa4flex.runtime.cuda.calls.signatures import signature_of
from fa4flex.runtime.cuda.device.device import require_not_capturing
from fa4flex.runtime.cuda.engine import Engine, lowered_for
from fa4flex.runtime.cuda.launches.ready_backward import Gradients, Saved
from fa4flex.runtime.cuda.launches.ready_listed_backward import PARAMETERS, ReadyListedBackward
from fa4flex.runtime.cuda.tables.lengths import lengths_of

_key_of_saved = key_function(BACKWARD, "saved")


def has_backward(engine: Engine, call: Call) -> bool:
    """True if a kernel computes gradients of q, k, v and sinks of calls that look like this one."""
    key = engine.key(call)
    if key is None:
        return False
    place = (key[0], "listed backward"), key[1]
    found = engine.backward.find(*place)
    if found is MISSING:
        try:
            with proving():
                found = _Planned(_lowered(engine, call)[2])
        except UnsupportedError:
            found = None
        engine.backward.keep(*place, found)
    return found is not None


@dataclass(frozen=True)
class _Planned:
    """A backward pass that there is a kernel for, and extents of the calls that it serves."""

    reach: Reach
    answers: Answers = NO_ANSWERS
    until: None = None


def run_listed_backward(engine: Engine, call: Call, saved: Saved) -> Gradients:
    """Gradients of a call that `has_backward` is true of."""
    result = engine.key(call)
    assert result is not None, "gradients are those of a call that was launched"
    key, extents = (result[0], "listed", _key_of_saved(saved)), result[1]
    ready = engine.backward.find(key, extents)
    if ready is MISSING:
        require_not_capturing()
        with proving():
            ready = _made(engine, call, saved)
        engine.backward.keep(key, extents, ready)
    gradients: Gradients = ready(call, saved)
    return gradients


def _lowered(engine: Engine, call: Call) -> tuple:
    from fa4flex.lower import lower_backward

    return lowered_for(engine, call, engine.schedule, lower_backward)


def _made(engine: Engine, call: Call, saved: Saved) -> ReadyListedBackward:
    lowered, value, reach = _lowered(engine, call)
    arriving = () if saved.dlse is None else ("dlse",)
    kernel = lowered.compile(signature_of(engine.kinds, call, arriving))
    schema, plan = listed_backward_schema(call.keys), lowered.plan
    absent = "dentropy", "entropy", "pulled", "dq_sum", "cleared"
    constants = {"scalars": value.captured.scalars or None, **dict.fromkeys(absent)}
    conversions = conversions_of(schema, call=call._replace(lengths=NO_LENGTHS), saved=saved)
    return ReadyListedBackward(
        launch_function(schema, kernel.launch, PARAMETERS, constants, conversions),
        (plan.head_dim, plan.head_dim_v),
        plan.tile[1],
        reach,
        lengths_of(engine.kinds, call, lowered, engine.counted),
    )


def deterministic(engine: Engine) -> bool:
    """True if sums are to be the same run after run."""
    return engine.schedule.deterministic or torch.are_deterministic_algorithms_enabled()
