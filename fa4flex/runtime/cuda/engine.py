"""Launching a program on NVIDIA GPUs: everything about a call is decided once per look of its tensors.

A call's look (shapes, strides, dtypes, alignment) is the key to a Ready launch. With one at hand, a call
allocates its results, makes block tables where a mask is told by them (block_tables.py), and calls the
compiled function: no copy to the host, no allocation but through torch, so that CUDA graphs can capture it.
Without one, everything is proved and compiled first; contents of captured tensors take no part in that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fa4flex.codegen.analyze.domain import Shape, slots_read
from fa4flex.codegen.analyze.facts import Facts
from fa4flex.codegen.analyze.overflow import integers
from fa4flex.codegen.analyze.prove import Proved, prove, proving, watched
from fa4flex.codegen.evaluate import MODEST_BITS, Captured
from fa4flex.codegen.plan.arguments import FORWARD
from fa4flex.compiler import simulated
from fa4flex.contents import VALIDATE, VersionedCache
from fa4flex.primitives.precision import Precision
from fa4flex.primitives.schedule import Schedule
from fa4flex.runtime.cuda import faults
from fa4flex.runtime.cuda.arguments import conversions_of, key_function, launch_function
from fa4flex.runtime.cuda.call import NO_LENGTHS, Call
from fa4flex.runtime.cuda.device import require_not_capturing, target_of
from fa4flex.runtime.cuda.lengths import check_lengths, lengths_of
from fa4flex.runtime.cuda.ready import PARAMETERS, Ready, Results, result_layouts
from fa4flex.runtime.cuda.signatures import numbers_of, signature_of
from fa4flex.runtime.cuda.tables import tables_of

if TYPE_CHECKING:
    from fa4flex.codegen.plan.pipeline import ForwardPlan
    from fa4flex.lower import Given

MOST_READY = 256
"""Looks of calls remembered per program; the oldest is forgotten first."""

MOST_PROVED = 64
"""Proofs of one program: one serves forward and backward passes, whatever else their tensors look like."""


class Engine:
    """One program (facts, schedule, precision) on NVIDIA GPUs, with what is ready to launch."""

    def __init__(self, facts: Facts, schedule: Schedule, precision: Precision, kinds: dict[int, str]) -> None:
        self.facts, self.schedule, self.precision = facts, schedule, precision
        self.kinds = kinds
        """The kind of each captured number, by slot."""
        self.watched = watched(facts)
        self._integers = sorted(slots_read(*integers(facts.score, facts.mask)))
        self.bits: tuple[tuple[int, int], ...] = ()
        """Slots of captured tensors that were seen to hold integers of MODEST or more: see Captured."""
        self._ready: VersionedCache[Ready] = VersionedCache(MOST_READY)
        self.backward: VersionedCache[Any] = VersionedCache(MOST_READY)
        """What runtime/cuda/backward.py keeps: launches by look, None where there is no kernel."""
        self.proved: VersionedCache[Proved] = VersionedCache(MOST_PROVED)

    def find(self, call: Call) -> Ready | None:
        """What was made ready for calls that look like this one. Raises InputError for what an earlier call
        was wrong in."""
        faults.check()
        if VALIDATE:
            check_lengths(call)
        ready: Ready | None = self._ready.get(self.key(call), ())
        return ready

    def run(self, call: Call) -> Results:
        """Raises UnsupportedError for what no kernel does, PastTheEnd for short captured tensors."""
        ready = self.find(call)
        if ready is None:
            with proving():
                ready = make_ready(self, call)
            self._ready.keep(self.key(call), (), ready)
        return ready(call)

    def look_at(self, call: Call) -> None:
        """Note which captured tensors hold large integers: this waits for the device, at the first call of
        its kind."""
        wide = (x for x in self._integers if call.operands[x].dtype in _WIDE and call.operands[x].numel())
        found = {slot: _bits(call.operands[slot]) for slot in wide}
        known = dict(self.bits)
        more = {slot: max(bits, known.get(slot, 0)) for slot, bits in found.items() if bits > MODEST_BITS}
        self.bits = tuple(sorted((known | more).items()))

    def key(self, call: Call) -> Any:
        """Key of a call: all that its launch depends on."""
        lengths = None if call.lengths is NO_LENGTHS else _key_of_lengths(call)
        rest = call.heads_first, call.statistics, self.bits, simulated.target()
        return _key_of(call), lengths, *rest


_key_of, _key_of_lengths = (key_function(FORWARD, source) for source in ("call", "call.lengths"))


_WIDE = frozenset((torch.int32, torch.int64, torch.uint32, torch.uint64))


def _bits(x: Tensor) -> int:
    """Bits that integers like those of a tensor have: MODEST_BITS, 40 or 63, not one more or less with each
    new content."""
    least, most = Captured((x.detach(),)).signed().operands[0].aminmax()
    size = max(-int(least), int(most))
    return next((bits for bits in (MODEST_BITS, 40) if size < 1 << bits), 63)


# --- making ready -----------------------------------------------------------------------------------------


def given_of(engine: Engine, call: Call, schedule: Schedule) -> Given:
    """What calls that look like this one are compiled from."""
    from fa4flex.lower import Given

    engine.look_at(call)
    captured = Captured(call.operands, numbers_of(engine.kinds, call), engine.bits)
    sizes = tuple([(x.shape, x.dtype) for x in call.operands])

    def proved(facts: Facts, shape: Shape, captured: Captured) -> Proved:
        key = shape, engine.watched.numbers_of(captured.scalars), sizes, captured.bits
        return engine.proved.made(key, (), lambda: prove(facts, shape, captured))

    inputs = call.inputs(engine.precision.output_dtype(call.q.dtype))
    return Given(engine.facts, schedule, inputs, captured, target_of(call.q.device), proved)


def make_ready(engine: Engine, call: Call) -> Ready:
    """Everything that calls that look like this one have in common. Raises UnsupportedError for what no
    kernel does, PastTheEnd for short captured tensors."""
    from fa4flex.lower import lower_forward

    require_not_capturing()
    given = given_of(engine, call, engine.schedule)
    lowered, shape, captured = lower_forward(given), given.inputs.extents, given.captured
    plan: ForwardPlan = lowered.plan
    by_work = plan.order == "by_work"
    kernel = lowered.compile(signature_of(engine.kinds, call, ("order",) if by_work else ()))
    constants = {"scalars": captured.scalars or None, "max_q_len": shape.q_len}
    conversions = conversions_of(FORWARD, call=call._replace(lengths=NO_LENGTHS))
    return Ready(
        kernel.launch,
        launch_function(FORWARD, kernel.launch, PARAMETERS, constants, conversions),
        constants,
        bool(conversions),
        result_layouts(call, shape, engine.precision.output_dtype(call.q.dtype)),
        call.lengths.seqused_q is not None,
        plan.config().dynamic,
        lengths_of(engine.kinds, call, lowered, plan.tile if by_work else None),
        tables_of(engine.kinds, call, lowered, captured) if lowered.problem.mask_form == "tables" else None,
    )
