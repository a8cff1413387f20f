"""Launching a program on NVIDIA GPUs: everything about a call is decided once per look of its tensors.

A call's look (dtypes, heads, widths, alignment) is the key to a Ready launch, which serves a range of
lengths. With one at hand, a call allocates its results, makes block tables where a mask is told by them
(block_tables.py), and calls the compiled function: no copy to the host, no allocation but through torch, so
that CUDA graphs can capture it. Without one, everything is proved and compiled first; contents of captured
tensors take no part in that.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fa4flex import later
from fa4flex.codegen.analyze.domain import Ragged, Shape, slots_read
from fa4flex.codegen.analyze.extents import Extents, Reach
from fa4flex.codegen.analyze.facts import Facts
from fa4flex.codegen.analyze.overflow import computed_with, integers
from fa4flex.codegen.analyze.prove import (
    Proved,
    ProvedQueries,
    prove,
    prove_queries,
    proving,
    read_queries,
    watched,
)
from fa4flex.codegen.analyze.reach import widest
from fa4flex.codegen.analyze.seen import keys_seen
from fa4flex.codegen.evaluate import MODEST_BITS, Captured
from fa4flex.contents import VALIDATE, VersionedCache
from fa4flex.errors import Fa4flexError, UnsupportedError
from fa4flex.kernels.plan.arguments import forward_schema
from fa4flex.kernels.plan.sizes import NO_ANSWERS, Answers
from fa4flex.kernels.plan.splitting import Splitting
from fa4flex.primitives.precision import Precision
from fa4flex.primitives.schedule import Schedule
from fa4flex.runtime.call import NO_LENGTHS, Call, Results
from fa4flex.runtime.cuda.calls.arguments import conversions_of, launch_function
from fa4flex.runtime.cuda.calls.launch_cache import MISSING, Key, LaunchCache, key_of
from fa4flex.runtime.cuda.calls.prepared import prepared
from fa4flex.runtime.cuda.calls.signatures import numbers_of, signature_of
from fa4flex.runtime.cuda.device import faults
from fa4flex.runtime.cuda.device.counters import capture_of
from fa4flex.runtime.cuda.device.device import require_not_capturing, target_of
from fa4flex.runtime.cuda.known import Known, Shortlist
from fa4flex.runtime.cuda.launches.ready import PARAMETERS, REPEATED, Ready
from fa4flex.runtime.cuda.meanwhile import Described, Meanwhile, meanwhile
from fa4flex.runtime.cuda.tables.lengths import check_lengths, lengths_kernel, lengths_of
from fa4flex.runtime.cuda.tables.tables import tables_kernel, tables_of
from fa4flex.runtime.key_sources import Contiguous

if TYPE_CHECKING:
    from fa4flex.kernels.plan.pipeline import ForwardPlan
    from fa4flex.kernels.plan.target import Target
    from fa4flex.lower import Given, Lowered

MOST_READY = 256
"""Looks of calls remembered per program, those with tables at each of their extents; the oldest is forgotten
first."""

MOST_PROVED = 256
"""Proofs of one program, and attempts at some: one serves forward and backward passes, whatever else their
tensors look like."""


MOST_NOTED = 16
"""Launches that serve until better kernels are compiled, of which explanations tell."""

Bits = tuple[tuple[int, int], ...]


class Engine:
    """One program (facts, schedule, precision) on NVIDIA GPUs, with what is ready to launch."""

    def __init__(self, facts: Facts, schedule: Schedule, precision: Precision, kinds: dict[int, str]) -> None:
        self.facts, self.schedule, self.precision = facts, schedule, precision
        self.kinds = kinds
        """The kind of each captured number, by slot."""
        self.watched = watched(facts)
        self._integers = sorted(slots_read(*integers(*facts.roots)))
        self.stand: tuple[Bits, int] = (), 0
        """`bits`, and how often better kernels have been compiled meanwhile: calls that were seen before are
        recognised by it, so that they look for their launches again."""
        self.meanwhile: tuple[Meanwhile, ...] = ()
        """Launches that serve, or served, until better kernels are compiled, the last ones first."""
        self.ready: LaunchCache[Ready] = LaunchCache(MOST_READY)
        """Launches by key, None where no kernel reads keys in place: see runtime/cuda/in_place.py."""
        self._computed_with = computed_with(*facts.roots)
        self._looked_at: VersionedCache[bool] = VersionedCache(MOST_PROVED)
        self.backward: LaunchCache[Any] = LaunchCache(MOST_READY)
        """Launches that runtime/cuda/backward.py keeps, by key; None where there is no kernel."""
        self.mass: LaunchCache[Any] = LaunchCache(MOST_READY)
        """Launches that runtime/cuda/mass.py keeps, likewise."""
        self.known_backward: Shortlist[Known] = Shortlist()
        self.tangents: LaunchCache[Any] = LaunchCache(MOST_READY)
        """Launches that runtime/cuda/tangents.py keeps, by key; None where there is no kernel."""
        self._changing = threading.Lock()
        self.proved: VersionedCache[Any] = VersionedCache(MOST_PROVED)

    def find(self, call: Call) -> Any:
        """Entry kept for calls that look like this one: a Ready, or None; else MISSING. Raises InputError for
        what an earlier call was wrong in."""
        if faults.pending.value or later.awaited:
            faults.check()
        if VALIDATE:
            check_lengths(call)
        result = self.key(call)
        return MISSING if result is None else self.ready.find(*result)

    def keep(self, call: Call, ready: Ready | None) -> None:
        """Keep what was made ready for calls that look like this one, or that nothing launches them."""
        # Another thread may have seen larger integers since it was made.
        result = self.key(call, None if ready is None else ready.bits)
        if result is not None:
            self.ready.keep(*result, ready)

    def run(self, call: Call) -> Results:
        """Raises UnsupportedError for what no kernel does, PastTheEnd for short captured tensors."""
        ready = self.find(call)
        if ready is MISSING or ready is None:
            ready = self.made(call)
        results: Results = ready(call)
        return results

    def requires(self, call: Call) -> bool:
        """True if a call that no kernel computes is refused, rather than computed blockwise: it is no call of
        wide heads, or its schedule asks for tiles."""
        plain = self.facts.output is None and self.facts.kept is None and self.facts.softmax
        return plain and not call.latent and not (call.wide and self.schedule.tile is None)

    def serves(self, call: Call) -> bool:
        """True if a kernel computes the call; whether, is kept for calls that look like it."""
        ready = self.find(call)
        if ready is MISSING:
            try:
                ready = self.made(call)
            except UnsupportedError:
                ready = None
                self.keep(call, None)
        return ready is not None

    def made(self, call: Call) -> Ready:
        """The launch of a call that looks like none before. Raises UnsupportedError for what no kernel does,
        PastTheEnd for short captured tensors."""
        with proving():
            ready = make_ready(self, call)
        self.keep(call, ready)
        return ready

    def look_at(self, call: Call) -> None:
        """Note which captured tensors hold large integers: this waits for the device, at the first call of
        its kind."""
        wide = (x for x in self._integers if call.operands[x].dtype in _WIDE and call.operands[x].numel())
        results = {slot: _bits(call.operands[slot]) for slot in wide}
        self._hold({slot: bits for slot, bits in results.items() if bits > MODEST_BITS})

    def _hold(self, bits: dict[int, int]) -> None:
        """Take captured integers for at least so large from now on. Launches are found by that."""
        with self._changing:
            known = dict(self.bits)
            more = {slot: max(n, known.get(slot, 0)) for slot, n in bits.items()}
            results = tuple(sorted((known | more).items()))
            if results != self.bits:
                self.bits = results

    def switch(self) -> None:
        """Have calls look for their launches again: better kernels have been compiled. From any thread."""
        with self._changing:
            self.stand = self.bits, self.stand[1] + 1

    def note(self, one: Meanwhile) -> None:
        """Keep for explanations that a launch serves until better kernels are compiled."""
        with self._changing:
            self.meanwhile = (one, *self.meanwhile)[:MOST_NOTED]

    def serving(self) -> list[str]:
        """Kernels that serve until better ones are compiled, or because these could not be, in words."""
        return [one.explain() for one in self.meanwhile if not one.awaited.over]

    @property
    def bits(self) -> Bits:
        """Slots of captured tensors that were seen to hold integers of MODEST or more, with the bits that
        these have, which only grow: see Captured."""
        return self.stand[0]

    @bits.setter
    def bits(self, bits: Bits) -> None:
        self.stand = bits, self.stand[1]

    @property
    def counted(self) -> bool:
        """True if torch's count of changes decides if contents are new."""
        return self.schedule.contents == "counted"

    @property
    def watches_integers(self) -> bool:
        """True if later contents of captured tensors may be larger than launches take them for."""
        return bool(self._computed_with)

    def watch_integers(self, call: Call) -> None:
        """Ask the device whether captured integers are as small as launches take them for: a later call
        tells. Captured CUDA graphs and their replays are not watched."""
        place = capture_of(call.q)
        if place is None or place[1]:
            return
        read = [call.operands[slot] for slot in self._computed_with]
        if self.counted:
            if self._looked_at.get(self.bits, read):
                return
            self._looked_at.keep(self.bits, read, True)
        known = dict(self.bits)
        for slot, x in zip(self._computed_with, read, strict=True):
            bits = known.get(slot, MODEST_BITS)
            if x.dtype in _WIDE and x.numel() and bits < 8 * x.itemsize - 1:
                told = f"an integer of 2^{bits} or more in a captured tensor, where all had been smaller"
                later.require(_below(x.detach(), bits), told, self._widen(slot, x))

    def _widen(self, slot: int, x: Tensor) -> Callable[[], None]:
        """Callback that takes integers of this slot for as large as their dtype allows from then on."""
        bits = MORE_BITS if x.itemsize == 4 else 63

        def widen() -> None:
            self._hold({slot: bits})

        return widen

    def key(self, call: Call, bits: Bits | None = None) -> tuple[Key, Extents] | None:
        """All that the launch of a call depends on, and its extents: see key_of. bits: see Engine.bits."""
        result = key_of(call)
        return None if result is None else ((*result[0], self.bits if bits is None else bits), result[1])


MORE_BITS = 40
"""Bits of integers that are not modest, but for which sums of many still fit in 64."""

_WIDE = frozenset((torch.int32, torch.int64, torch.uint32, torch.uint64))


def _bits(x: Tensor) -> int:
    """Bits that integers like those of a tensor have: MODEST_BITS, MORE_BITS or 63, not one more or less with
    each new content."""
    least, most = Captured((x.detach(),)).signed().operands[0].aminmax()
    size = max(-int(least), int(most))
    return next((bits for bits in (MODEST_BITS, MORE_BITS) if size < 1 << bits), 63)


def _below(x: Tensor, bits: int) -> Tensor:
    """For each integer whether it is smaller than 2^bits; found on the device."""
    if x.dtype == torch.uint64:
        x = x.view(torch.int64)  # what is negative then is too large
        return (x >= 0) & (x < 1 << bits)
    x = x.to(torch.int64)
    return (x < 1 << bits) & (x > -(1 << bits))


# --- making ready -----------------------------------------------------------------------------------------


def chip_of(call: Call) -> Target:
    """The chip of a call. Raises UnsupportedError where there is no kernel for it."""
    return target_of(call.q.device)


def lowered_for(
    engine: Engine,
    call: Call,
    schedule: Schedule,
    lower: Callable[[Given], Lowered],
    answers: Answers = NO_ANSWERS,
    queries: bool = False,
) -> tuple[Lowered, Given, Reach]:
    """A pass for calls that look like this one, what it was made of, and the extents that it is good for.
    answers: of other calls, to questions about speed; `queries`: the pass computes query intervals where it
    can."""
    from fa4flex.lower import Given

    engine.look_at(call)
    captured = Captured(call.operands, numbers_of(engine.kinds, call), engine.bits)
    target = chip_of(call)
    inputs = call.inputs(engine.precision.output_dtype(call.q.dtype), engine.precision.skip)
    proofs = Proofs(engine, call, captured)
    value = Given(engine.facts, schedule, inputs, captured, target, proofs.prove, answers=answers)
    passes: dict[Shape, Lowered] = {}

    def planned(bound: Shape) -> Reach:
        passes[bound] = lower(replace(value, bound=bound))
        return passes[bound].valid

    shapes = tuple([tuple(x.shape) for x in call.operands])
    proved = proofs.of_both_passes if queries else proofs.usable
    reach, bound = widest(engine.facts, inputs.extents, shapes, planned, proved)
    served = bound if reach.exact else Ragged(reach.most[0], bound.heads, *reach.most[1:])
    return passes[bound], replace(value, bound=served), reach


class Proofs:
    """Proofs of a program with what a call captured, made once for each problem."""

    def __init__(self, engine: Engine, call: Call, captured: Captured) -> None:
        self._engine, self._captured = engine, captured
        numbers = engine.watched.numbers_of(captured.scalars)
        self._key = numbers, tuple([(x.shape, x.dtype) for x in call.operands]), captured.bits

    def prove(self, facts: Facts, shape: Shape, captured: Captured) -> Proved:
        """Raises PastTheEnd for short captured tensors, UnsupportedError for integers that are too large."""
        return self._made("mask", shape, lambda: prove(facts, shape, captured))

    def usable(self, shape: Shape) -> Proved | None:
        """Facts for launches of other extents, too: no index is wider than theirs."""
        result: Proved | None = self._made("usable", shape, lambda: self._usable(shape))
        return result

    def of_both_passes(self, shape: Shape) -> Proved | None:
        """The same, with query intervals, where a backward pass computes them."""
        result = self.usable(shape)
        if result is None or not read_queries(self._engine.facts):
            return result
        queries: ProvedQueries | None = self._made("queries", shape, lambda: self._queries(shape))
        if queries is None or queries.wide_index:
            return None
        return replace(result, in_range=result.in_range and queries.in_range)

    def _usable(self, shape: Shape) -> Proved | None:
        try:
            result = self.prove(self._engine.facts, shape, self._captured)
        except Fa4flexError:
            return None
        return None if result.wide_index else result

    def _queries(self, shape: Shape) -> ProvedQueries | None:
        try:
            return prove_queries(self._engine.facts, shape, self._captured)
        except Fa4flexError:
            return None

    def _made(self, what: str, shape: Shape, make: Callable[[], Any]) -> Any:
        return self._engine.proved.made((what, shape, self._key), (), make)


def _by_work(plan: ForwardPlan) -> bool:
    """True if tiles of queries are sorted by their keys."""
    return plan.order == "by_work"


def sorted_tiles(plan: ForwardPlan) -> tuple[int, int] | None:
    """Queries and keys of tiles that are sorted: their rows may be those of several heads; None where none
    are."""
    if not _by_work(plan):
        return None
    rows, keys = plan.tile
    return rows // plan.packed_heads, keys


def _splitting(plan: ForwardPlan, inputs: Given) -> Splitting | None:
    """The plan's splitting, for rows that may see few keys."""
    result = plan.splitting
    if result is None:
        return None
    return replace(result, seen=keys_seen(inputs.facts, inputs.proved_for, inputs.captured))


def described(engine: Engine, call: Call, answers: Answers = NO_ANSWERS) -> Described:
    """Everything that decides the launch of a forward pass. answers: of other calls, to questions about
    speed."""
    from fa4flex.lower import lower_forward

    lowered, value, reach = lowered_for(engine, call, engine.schedule, lower_forward, answers)
    signature = signature_of(engine.kinds, call, ("order",) if _by_work(lowered.plan) else ())
    lengths = lengths_kernel(engine.kinds, call, lowered, sorted_tiles(lowered.plan))
    tables = tables_kernel(engine.kinds, call, lowered, value.captured)
    kernels = [asked for asked in ((lowered, signature), lengths, tables) if asked is not None]
    return Described(lowered, value, signature, reach, kernels)


def make_ready(engine: Engine, call: Call) -> Ready:
    """Everything that calls that look like this one have in common. Raises UnsupportedError for what no
    kernel does, PastTheEnd for short captured tensors."""
    require_not_capturing()
    chosen, key = described(engine, call), engine.key(call)
    answers = () if key is None else engine.ready.answers(key[0])
    other = meanwhile(engine, chosen, answers, partial(described, engine, call))
    if other is None:
        return _ready(engine, call, chosen)
    return replace(_ready(engine, call, other.serving), reach=other.reach, until=other.awaited)


ABSENT = ("tables", "order", "faults", "max_logit", "entropy", *NO_LENGTHS._fields)
"""Parameters that launches of plain calls of the same sizes have none for."""


def _ready(engine: Engine, call: Call, made: Described) -> Ready:
    lowered, value = made.lowered, made.given
    captured = value.captured
    plan: ForwardPlan = lowered.plan
    kernel = lowered.compile(made.signature)
    output = engine.precision.output_dtype(call.q.dtype)
    schema, constants = forward_schema(call.keys), {"scalars": prepared(captured.scalars or None)}
    if call.kv.seqused_k is None:
        constants["used_keys"] = None
    conversions = conversions_of(schema, call=call._replace(lengths=NO_LENGTHS))
    absent = constants | dict.fromkeys(ABSENT)

    def repeated(extents: dict[str, Any]) -> Callable[..., None]:
        return launch_function(schema, kernel.launch, REPEATED, absent | extents, {})

    return Ready(
        launch_function(schema, kernel.launch, PARAMETERS, constants, conversions),
        repeated if type(call.kv) is Contiguous and not conversions else None,
        output,
        call.kv.v.shape[-1],
        call.kv_heads,
        call.statistics,
        made.reach,
        call.lengths.seqused_q is not None or call.kv.leaves_rows,
        plan.config().dynamic,
        call.kv.seqused_k is not None,
        _splitting(plan, value),
        lengths_of(engine.kinds, call, lowered, engine.counted, sorted_tiles(plan)),
        tables_of(engine.kinds, call, lowered, captured, engine.counted),
        engine.watch_integers if engine.watches_integers else None,
        bits=captured.bits,
        answers=lowered.answers,
    )
