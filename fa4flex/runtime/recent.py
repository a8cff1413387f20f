"""The last launches of one Attention, by kernels and by torch's flex_attention, which its next calls get to
at once: see cuda/known.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor

from fa4flex import later
from fa4flex.codegen.analyze.extents import Extents, Reach, extents_of
from fa4flex.codegen.build import Trace
from fa4flex.primitives.kv_scales import E4M3, KVScales
from fa4flex.primitives.latent import Latent
from fa4flex.primitives.paging import Paging
from fa4flex.primitives.varlen import Varlen
from fa4flex.runtime.call import NO_LENGTHS, Call, Results, SequenceLengths, Statistics, lengths_of
from fa4flex.runtime.cuda.device import faults
from fa4flex.runtime.cuda.known import (
    PLAIN,
    Form,
    Known,
    Numbers,
    Row,
    Shortlist,
    alignments_of,
    brought,
    checked,
    guard_of,
    nothing_alike,
    rows_of,
)
from fa4flex.runtime.cuda.launches.ready import Ready, Sized
from fa4flex.runtime.gradients import Attend, Outline
from fa4flex.runtime.key_sources import Contiguous, KeySource
from fa4flex.runtime.programs import Published
from fa4flex.runtime.sources import source_of
from fa4flex.torch_internals import forward_ad
from fa4flex.variant import Variant, default_scale, settings_of
from ptxsim.active import simulating

if TYPE_CHECKING:
    from fa4flex.runtime.flex.engine import Ready as FlexReady


Launch = Callable[[Call, Extents, Sized | None], Results | None]

_new: Any = tuple.__new__
"""Makes named tuples, in half the time that these take to make themselves."""

_LENGTHS, _PAGES = (type(None), Varlen), (type(None), Paging)


@dataclass(eq=False, slots=True)
class KnownCall(Known):
    """The launch of a forward pass, and the calls that it serves.

    scale        of calls that tell none
    heads_first, statistics   as in Call: with gradients there is the log-sum-exp besides what was asked for
    launch       computes the results of a call, its extents, and what follows from its sizes, if that is
                 known; None where it does not after all
    sized        what follows from shapes and strides, where all of them are compared
    direct       the same launch as a function of what it reads, where a call does nothing else
    """

    scale: float
    heads_first: bool
    statistics: Statistics
    launch: Launch
    sized: Sized | None = None
    direct: Callable[..., Results] | None = None


Prepared = TypeVar("Prepared")


class Recent(Generic[Prepared]):
    """State of one Attention with one trace and one set of settings, which never change: a call of others
    gets a Recent of its own."""

    def __init__(
        self, prepared: Prepared, program: Published, trace: Trace, settings: tuple[Any, ...]
    ) -> None:
        self.prepared, self.program, self.trace, self.settings = prepared, program, trace, settings
        self.reader = None if trace.derived else trace.reader
        """Derived operands are computed from others, perhaps anew at each call."""
        self.engine = program.engine
        self.known: Shortlist[KnownCall] = Shortlist()

    def serve(
        self,
        variant: Variant,
        qkv: tuple[Tensor, Tensor, Tensor],
        varlen: Varlen | None,
        paging: Paging | None,
        scales: KVScales | None,
        statistics: Statistics,
    ) -> Results | None:
        """The results of a call that one of these launches serves, else None. Raises EarlierError for what an
        earlier call was wrong in, InputError or StateError for what this one is."""
        reading = self._reading(variant)
        if reading is None:
            return None
        (operands, numbers), (q, k, v), scale, sinks = reading, qkv, variant.scale, None
        others = operands
        tensors: tuple[Tensor, ...] = qkv
        if variant.sinks is not None:
            sinks = variant.logits()
            others = *operands, sinks
        kv, lengths, beside = None, NO_LENGTHS, PLAIN
        latent = type(k) is Latent
        if latent or not (varlen is paging is scales is None) or getattr(k, "dtype", None) is E4M3:
            if (latent and scale is None) or type(varlen) not in _LENGTHS or type(paging) not in _PAGES:
                return None
            kv, lengths, beside, more = _brought(k, v, varlen, paging, scales)
            if latent:
                qkv = q, kv.k, kv.v
            tensors = *qkv, *more
        if others:
            tensors = *tensors, *others
        form = self._form(statistics, sinks, scale is None or scale > 0, beside)
        for one in self.known.kept:
            if one.form == form and one.guard(*tensors) and (not numbers or one.has(numbers)):
                factor = one.scale if scale is None else scale
                if (
                    one.direct is not None
                    and variant.blocks is None
                    and not latent
                    and one.aligned(qkv, others)
                ):
                    return one.direct(q, k, v, operands, sinks, factor)
                first, asked = one.heads_first, one.statistics
                source = _new(Contiguous, (k, v)) if kv is None else kv.placed(q.shape[0], first)
                call = _new(Call, (q, source, operands, sinks, lengths, numbers, factor, first, asked))
                extents = self._extents(one, call, others, tensors)
                if extents is None:
                    continue
                if variant.blocks is not None:
                    batch, q_len, kv_len = extents
                    variant.blocks.fits(q_len, kv_len, batch, q.shape[1 if first else 2])
                results = one.launch(call, extents, one.sized)
                if results is not None:
                    return results
        return None

    def serve_listed(
        self,
        variant: Variant,
        q: Tensor,
        kv: KeySource,
        lengths: SequenceLengths,
        statistics: Statistics,
        check: Callable[[Call], None],
    ) -> Results | None:
        """The same of a call over listed keys `kv`, in place, that `check` raises for if its lists do not
        fit."""
        reading = self._reading(variant)
        if reading is None:
            return None
        (operands, numbers), scale, sinks = reading, variant.scale, variant.logits()
        others = operands if sinks is None else (*operands, sinks)
        beside, more = brought(kv, lengths)
        form = self._form(statistics, sinks, scale is None or scale > 0, beside)
        tensors = q, kv.k, kv.v, *more, *others
        for one in self.known.kept:
            if one.form == form and one.guard(*tensors) and (not numbers or one.has(numbers)):
                factor = one.scale if scale is None else scale
                call = Call(q, kv, operands, sinks, lengths, numbers, factor, one.heads_first, one.statistics)
                extents = self._extents(one, call, others, tensors)
                if extents is not None:
                    check(call)
                    return one.launch(call, extents, one.sized)
        return None

    def _reading(self, variant: Variant) -> Any:
        """Tensors and numbers that a variant captured, as they are now; None where nothing here serves it."""
        reader = self.reader
        if not self.known.kept or reader is None or settings_of(variant) != self.settings:
            return None
        if faults.pending.value or later.awaited:
            faults.check()
        reading = reader(variant.scored, variant.allowed, variant.dropout)
        return None if forward_ad._current_level >= 0 else reading

    def _form(self, statistics: Statistics, sinks: Any, positive: bool, beside: Form) -> Form:
        return statistics, torch.is_grad_enabled(), sinks is None, positive, self.engine.stand, beside

    def _extents(
        self, one: KnownCall, call: Call, others: Sequence[Tensor], tensors: Sequence[Tensor]
    ) -> Extents | None:
        """Extents of a call that `one` serves, which is made known for these alone where they recur; None if
        it does not."""
        extents = one.serves(call, others)
        if extents is not None and one.valid is not None and self.known.recurs(one, extents):
            self._narrow(one, call, extents, tensors)
        return extents

    def _narrow(self, one: KnownCall, call: Call, extents: Extents, tensors: Sequence[Tensor]) -> None:
        guard = guard_of([*map(Row.of, tensors)])
        if guard is not None:
            sized = one.ready.sized_again(call, extents)
            direct = one.ready.direct(sized) if one.launch == one.ready.__call__ else None
            sizes = {"valid": None, "extents": extents, "sized": sized, "direct": direct}
            self.known.narrow(replace(one, guard=guard, wide=one, **sizes))

    def remember(
        self, call: Call, kv: KeySource, ready: Ready, outline: Outline | None, statistics: Statistics
    ) -> None:
        """`ready` has just been found for a call that no launch here served. kv: its keys as they were
        brought; statistics: those that it asked for."""
        if simulating() or self.reader is None or checked(kv, call.lengths):
            return
        beside, more = brought(kv, call.lengths)
        form = self._form(statistics, call.sinks, call.scale > 0, beside)
        if ready.bits != self.engine.bits or not self.known.lacks(ready, form):
            return
        if ready.until is not None and ready.until.over:  # looked at after the form was made
            return
        others = _others(call)
        rows = [*rows_of(call, kv, more), *map(Row.of, others)]
        launch = ready.__call__ if outline is None else partial(Attend.known, outline)
        self._add(ready, form, rows, call, launch, call.scalars, ready.reach)

    def attend(self, ready: FlexReady, call: Call) -> Results:
        """The results of a call through torch's flex_attention that was found to be ready; from now on such
        calls are served."""
        from fa4flex.runtime.flex.known import Repeat  # calls of kernels do not wait for it

        form = self._form(call.statistics, call.sinks, call.scale > 0, PLAIN)
        if self.reader is None or not self.known.lacks(ready, form):
            out, *statistics = ready(call.turned())
            return call.turn(out), *statistics
        repeat = Repeat(ready, call)
        results = repeat.first(call)
        rows = [*map(Row.of, (call.q, call.kv.k, call.kv.v, *_others(call)))]
        self._add(ready, form, rows, call, repeat)
        return results

    def _add(
        self,
        ready: Any,
        form: Form,
        rows: Sequence[Row],
        call: Call,
        launch: Launch,
        numbers: Numbers | None = None,
        valid: Reach | None = None,
    ) -> None:
        guard, extents = guard_of(rows) or nothing_alike, extents_of(call.extents())
        alignments, default = alignments_of(_others(call)), default_scale(call.q.shape[-1])
        common = ready, form, numbers, guard, valid, extents, alignments
        self.known.add(KnownCall(*common, default, call.heads_first, call.statistics, launch))


def _brought(
    k: Any, v: Any, varlen: Varlen | None, paging: Paging | None, scales: KVScales | None
) -> tuple[KeySource, SequenceLengths, Form, tuple[Tensor, ...]]:
    """The source of keys and the lengths of a call, and both as `brought` has them."""
    kv = source_of(k, v, paging, scales)
    lengths = NO_LENGTHS if varlen is None else lengths_of(varlen, kv)
    return kv, lengths, *brought(kv, lengths)


def _others(call: Call) -> tuple[Tensor, ...]:
    return call.operands if call.sinks is None else (*call.operands, call.sinks)
