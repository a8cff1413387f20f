"""The last calls of one Attention through torch's flex_attention, and the way by which its next ones go.

Host time counts in microseconds here. Torch compares the looks of all tensors at once, with the guard that
its compiler puts in front of its graphs.

Kept              holds for                                         stale when
a `Repeat`        types, dtypes, devices, shapes, strides and       never: other calls have others, and the
                  requires_grad of all tensors, dispatch (modes,    oldest goes
                  transforms, autocast, inference), grad mode,
                  scale, statistics, numbers that proofs read
its graph         the same, and torch's global state                that changed: Dynamo is asked

recent parts      numbers, stream, block mask: see `Recent`         see engine.py

What the functions captured is read anew by each call: other tensors of the same looks and other numbers are
served too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from fa4flex.codegen.trace.paths import Reader
from fa4flex.exact import exactly
from fa4flex.runtime.cuda.calls.call import NO_LENGTHS, Tensors
from fa4flex.runtime.cuda.repeats.fast_path import guard_of
from fa4flex.runtime.flex.compiled import Compiled, Graph, Outputs
from fa4flex.runtime.flex.engine import Ready, Recent
from fa4flex.torch_internals import forward_ad
from fa4flex.variant import Variant, default_scale

QKV = tuple[Tensor, Tensor, Tensor]

MOST_KEPT = 4
"""Calls of one Attention that are kept: prompts, single queries, with and without gradients."""

MOST_MADE = 16
"""Ways to one ready call that one Attention makes, for all strides and modes: each takes some time."""


class Now(NamedTuple):
    """Inputs of a call besides q, k and v: captured tensors and numbers, sinks, statistics and scale."""

    operands: tuple[Tensor, ...]
    scalars: tuple[int | float, ...]
    sinks: Tensor | None
    statistics: tuple[str, ...]
    scale: float | None

    def others(self) -> tuple[Tensor, ...]:
        return self.operands if self.sinks is None else (*self.operands, self.sinks)


class Repeat:
    """Calls just like one that was ready. It holds no tensors of theirs.

    looks  torch's comparison of q, k and v as users gave them, captured tensors and sinks
    graph  None where Dynamo is to find it at each call, since none can be told
    """

    __slots__ = (
        "default_scale", "grad", "graph", "looks", "numbers", "ready", "recent", "scale", "sinks",
        "statistics",
    )  # fmt: skip

    def __init__(self, ready: Ready, looks: Callable[..., bool], qkv: QKV, now: Now) -> None:
        self.ready, self.looks = ready, looks
        self.default_scale = default_scale(qkv[0].shape[-1])
        self.scale = self.default_scale if now.scale is None else now.scale
        self.sinks, self.statistics = now.sinks is not None, now.statistics
        self.numbers, self.grad = ready.engine.watched.numbers_of(now.scalars), torch.is_grad_enabled()
        self.graph: Graph | None = None
        self.recent: Recent | None = None

    def fits(self, qkv: QKV, now: Now) -> bool:
        """True if such a call is one of these."""
        scale = self.default_scale if now.scale is None else now.scale
        return (
            (now.sinks is not None) is self.sinks
            and self.looks(*qkv, *now.others())
            and now.statistics == self.statistics
            and scale == self.scale
            and (scale != 0 or exactly(scale) == exactly(self.scale))
            and torch.is_grad_enabled() is self.grad
            and forward_ad._current_level < 0
            and (not now.scalars or self.ready.engine.watched.numbers_of(now.scalars) == self.numbers)
        )

    def __call__(self, given: Tensors, scalars: tuple[int | float, ...]) -> Outputs:
        """Results of such a call. q, k and v have heads before tokens."""
        ready, graph = self.ready, self.graph
        parts = ready.parts(given, scalars, self.recent)
        self.recent = parts.recent
        found = ready.compute(parts) if graph is None or not graph.holds() else graph(ready.flat(parts))
        return ready.results(found, given)

    def first(self, given: Tensors, scalars: tuple[int | float, ...]) -> Outputs:
        """The same, and from now on by the graph that computes this."""
        ready = self.ready
        parts, attend = ready.parts(given, scalars, None), ready.attend
        self.recent = parts.recent
        if not isinstance(attend, Compiled):
            return ready.results(ready.compute(parts), given)
        found, run = attend.watched(*ready.arguments(parts))
        self.graph = None if run is None else Graph.of(run, ready.flat(parts), found)
        return ready.results(found, given)


class Repeats:
    """Repeated calls of one Attention whose functions `reader` reads, the youngest first."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self.kept: tuple[Repeat, ...] = ()
        self._made: WeakKeyDictionary[Ready, int] = WeakKeyDictionary()
        """Ways to each ready call that were made."""

    def serve(self, variant: Variant, qkv: QKV, statistics: tuple[str, ...]) -> Outputs | None:
        """The results of a call that one of these serves, else None. Raises StateError or InputError for a
        block map that does not fit."""
        reading = self._reader.read(variant.score_mod, variant.allowed)
        if reading is None:
            return None
        now = Now(*reading, None if variant.sinks is None else variant.sinks.now(), statistics, variant.scale)
        for one in self.kept:
            if one.fits(qkv, now):
                return _results(one, variant, qkv, now)
        return None

    def attend(
        self,
        ready: Ready,
        qkv: QKV,
        given: Tensors,
        scalars: tuple[int | float, ...],
        scale: float,
        statistics: tuple[str, ...],
    ) -> Outputs:
        """The results of a call that was ready, from now on the first of those just like it.

        given  q, k and v with heads before tokens; in `qkv` they are as the user gave them
        """
        now = Now(given.operands, scalars, given.sinks, statistics, scale)
        made_before = self._made.get(ready, 0)
        if made_before < MOST_MADE and not any(one.fits(qkv, now) for one in self.kept):
            self._made[ready] = made_before + 1
            looks = guard_of((*qkv, *now.others()))
            if looks is not None:
                made = Repeat(ready, looks, qkv, now)
                found = made.first(given, now.scalars)
                self.kept = (made, *self.kept)[:MOST_KEPT]
                return found
        return ready(given, now.scalars)


def _results(one: Repeat, variant: Variant, qkv: QKV, now: Now) -> Outputs:
    q, k, v = qkv
    swap = variant.layout == "bshd"
    if swap:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if variant.blocks is not None:  # of the same blocks, perhaps for other lengths
        variant.blocks.fits(q.shape[2], k.shape[2], q.shape[0], q.shape[1])
    found = one(Tensors(q, k, v, now.sinks, NO_LENGTHS, now.operands), now.scalars)
    return (found[0].transpose(1, 2), *found[1:]) if swap else found
