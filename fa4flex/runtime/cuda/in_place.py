"""Calls whose keys lie in pages or are an 8-bit cache, where a kernel reads them as they are.

Tables and lengths are read by the kernel alone, which corrects them and says what was wrong: they may change
at every call, and between replays of a CUDA graph.
"""

from __future__ import annotations

from typing import Any

from fa4flex.codegen.analyze.facts import MaskForm
from fa4flex.codegen.analyze.prove import Proved, proving
from fa4flex.codegen.evaluate import PastTheEnd
from fa4flex.codegen.expr import TRUE
from fa4flex.errors import UnsupportedError
from fa4flex.kernels import dispatch
from fa4flex.kernels.plan.sizes import Sizes
from fa4flex.kernels.plan.specialize import forward_problem
from fa4flex.runtime.call import Call
from fa4flex.runtime.cuda.calls.conversions import tma_able
from fa4flex.runtime.cuda.device.device import require_not_capturing, target_of
from fa4flex.runtime.cuda.engine import Engine, make_ready
from fa4flex.runtime.cuda.launches.ready import Ready

MOST_KEYS = (1 << 31) - 256
"""Slots of a row of the table: their numbers, and those of a tile past them, have 32 bits."""


def made(engine: Engine, call: Call) -> Ready | None:
    """The launch of a checked call that looks like none before; None where no kernel reads its keys in
    place."""
    if not _readable(engine, call):
        return None
    ready = _made(engine, call)
    engine.keep(call, ready)
    return ready


def _readable(engine: Engine, call: Call) -> bool:
    """True if a kernel may take such a call, were its mask as simple as can be: nothing is proved. Calls that
    none takes are not kept: those with many queries have other lengths each time."""
    if not (tma_able(call.kv.k) and tma_able(call.kv.v)) or call.extents().kv_len > MOST_KEYS:
        return False
    facts, target = engine.facts, target_of(call.q.device)
    form: MaskForm = "none" if facts.mask is TRUE else "tables" if facts.keys is None else "spans"
    try:
        inputs = call.inputs(engine.precision.output_dtype(call.q.dtype), engine.precision.skip)
        problem, sizes = forward_problem(facts, inputs, Proved(form, False, True)), Sizes(inputs)
        problem = dispatch.by_pairs(facts, problem, target, engine.schedule, sizes)
        dispatch.choose("forward", problem, target, sizes)
    except UnsupportedError:
        return False
    return True


def _made(engine: Engine, call: Call) -> Any:
    """A launch, or None where no kernel takes such a call, for its order or the width of its pages."""
    require_not_capturing()
    try:
        with proving():
            return make_ready(engine, call)
    except (UnsupportedError, PastTheEnd):
        return None
