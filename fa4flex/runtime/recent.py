"""The last launches of one Attention on a GPU, and the ways by which its next calls get to them; likewise of
those through torch's flex_attention: see flex/repeat.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from fa4flex.codegen.analyze.extents import Extents
from fa4flex.codegen.build import Trace
from fa4flex.primitives.paging import Paging
from fa4flex.primitives.varlen import Varlen
from fa4flex.runtime.call import NO_LENGTHS, Call, Results
from fa4flex.runtime.cuda.device import faults
from fa4flex.runtime.cuda.launches.ready import Ready
from fa4flex.runtime.cuda.repeats.family_path import QKV, FamilyPath
from fa4flex.runtime.cuda.repeats.fast_path import FastPath
from fa4flex.runtime.gradients import Attend, Outline
from fa4flex.runtime.key_sources import Contiguous, Paged
from fa4flex.runtime.programs import Published
from fa4flex.variant import Variant, settings_of
from ptxsim.active import simulating

if TYPE_CHECKING:
    from fa4flex.runtime.flex.repeat import Repeats

MOST_KEPT = 4
"""Launches of one Attention with ways to them: prompts, single queries, a pass with gradients."""

MOST_TRIES = 4
MOST_PATIENCE = 64


@dataclass(slots=True)
class Kept:
    """One launch, and the ways to it: `family` serves calls of all extents, `repeated` those just like the
    last one, faster, with gradients by the second of the two, where some are wanted.

    statistics  asked for by the calls that it serves; with gradients there is the log-sum-exp besides
    types       of all tensors but lengths and pages, and which of them require gradients
    missed, tries   how often `family` and `repeated` were made in vain: for tensors that torch does not
                compare at once, for modes of torch that changed since, or for captured tensors that others
                take the place of
    shapes      of the last q and k, which came so often in a `row`: where these change again and again,
                more calls must have had the same ones, `patience`, before `repeated` is made again
    """

    ready: Ready
    trains: bool
    statistics: tuple[str, ...]
    types: tuple[tuple[type, bool], ...]
    family: FamilyPath | None = None
    repeated: tuple[FastPath, Outline | None] | None = None
    missed: int = 0
    tries: int = 0
    shapes: tuple[torch.Size, torch.Size] | None = None
    row: int = 0
    made_for: tuple[torch.Size, torch.Size] | None = None
    patience: int = 1

    @property
    def key(self) -> tuple[Any, ...]:
        return self.ready, self.trains, self.statistics, self.types


Prepared = TypeVar("Prepared")


class Recent(Generic[Prepared]):
    """State of one Attention with one trace and one set of settings, which never change: a call of others
    gets a Recent of its own. Each way compares whatever else a launch depends on."""

    def __init__(
        self, prepared: Prepared, program: Published, trace: Trace, settings: tuple[Any, ...]
    ) -> None:
        self.prepared, self.program, self.trace, self.settings = prepared, program, trace, settings
        self.reader = None if trace.derived else trace.reader
        """Derived operands are computed from others, perhaps anew at each call."""
        self.engine = program.engine
        self.kept: tuple[Kept, ...] = ()
        self.once: tuple[Kept, ...] = ()
        """Launches that served one call: no way is made to them before they serve another."""
        self.flex: Repeats | None = None
        """Ways of calls through flex_attention; None before the first such call."""

    def serve(
        self,
        variant: Variant,
        qkv: QKV,
        varlen: Varlen | None,
        paging: Paging | None,
        statistics: tuple[str, ...],
    ) -> Results | None:
        """The results of a call that one of these launches serves, else None. Raises EarlierError for what an
        earlier call was wrong in, InputError or StateError for what this one is."""
        if settings_of(variant) != self.settings:
            return None
        kept, flex, dense = self.kept, self.flex, varlen is None and paging is None
        if dense and flex is not None and flex.kept:
            result = flex.serve(variant, qkv, statistics)
            if result is not None:
                return result
        if not kept:
            return None
        faults.check()
        q, k, v = qkv
        bits = self.engine.bits
        for one in kept:
            if one.statistics != statistics or one.ready.bits != bits:
                continue
            repeated = one.repeated
            if dense and repeated is not None and repeated[0].fits(q, k, v):
                path, again = repeated
                if path.serves(variant):
                    return path(q, k, v) if again is None else Attend.of(again, path.call(q, k, v), True)
                # It would keep alive what was captured then.
                one.repeated, one.row = None, 0
            family = one.family  # another thread may exchange it
            like = None if family is None else family.find(variant, qkv, varlen, paging)
            if like is not None:
                return self._by_family(one, *like, dense)
        return None

    def through_flex(self) -> Repeats | None:
        """Ways of calls through flex_attention; None where captured tensors are derived from others."""
        if self.flex is None and self.reader is not None:
            from fa4flex.runtime.flex.repeat import Repeats  # calls of kernels do not wait for it

            self.flex = Repeats(self.reader)
        return self.flex

    def _by_family(self, one: Kept, call: Call, extents: Extents, dense: bool) -> Results:
        again = Outline.of(self.program, one.ready, call) if one.trains else None
        if dense:
            self._count(one, call, again)
        return one.ready(call, extents) if again is None else Attend.of(again, call, True)

    def _count(self, one: Kept, call: Call, again: Outline | None) -> None:
        """Make the way of calls just like this one, if its shapes came several times in a row."""
        shapes = call.q.shape, call.kv.k.shape
        if one.shapes != shapes:
            one.shapes, one.row = shapes, 0
        elif one.tries < MOST_TRIES:
            one.row += 1
            if one.row >= one.patience:
                self._repeat(one, call, again)

    def _repeat(self, one: Kept, call: Call, again: Outline | None) -> None:
        assert self.reader is not None
        path = FastPath.of(call, one.ready, self.reader, one.statistics)
        if path is None or one.made_for == one.shapes:
            one.tries += 1
        elif one.made_for is not None:
            one.patience = min(2 * one.patience, MOST_PATIENCE)
        one.made_for, one.repeated = one.shapes, None
        if path is not None:  # at once, as other threads call meanwhile
            one.repeated = path, None if again is None else again._replace(compute=path.of_call)

    def remember(
        self, call: Call, qkv: QKV, ready: Ready, again: Outline | None, statistics: tuple[str, ...]
    ) -> None:
        """`ready` has just been found for a call that none of the ways here served. One is made if it was
        found before: what is made here costs some time."""
        if simulating() or self.reader is None or type(call.kv) not in (Contiguous, Paged):
            return
        key = ready, again is not None, statistics, _types(call)
        results = [one for one in self.kept if one.key == key]
        if not results:
            results = [one for one in self.once if one.key == key]
            if not results:
                shapes = call.q.shape, call.kv.k.shape
                one = Kept(*key, shapes=shapes)
                self.once = (one, *self.once)[:MOST_KEPT]
                return
            self.once = tuple([one for one in self.once if one.key != key])
            self.kept = (results[0], *[one for one in self.kept if one.key != key])[:MOST_KEPT]
        one = results[0]  # threads may have kept several
        if one.missed < MOST_TRIES:
            made = FamilyPath.of(call, qkv, ready, self.reader)
            one.missed += made is None or one.family is not None
            one.family = made
        if call.lengths is NO_LENGTHS and type(call.kv) is Contiguous:
            self._count(one, call, again)


def _types(call: Call) -> tuple[tuple[type, bool], ...]:
    tensors = call.q, call.kv.k, call.kv.v, *call.operands
    tensors = tensors if call.sinks is None else (*tensors, call.sinks)
    return tuple([(type(x), x.requires_grad) for x in tensors])
