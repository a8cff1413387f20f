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
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from fa4flex.codegen.trace.paths import Reader
from fa4flex.exact import exactly
from fa4flex.runtime.call import NO_LENGTHS, Call
from fa4flex.runtime.cuda.repeats.fast_path import guard_of
from fa4flex.runtime.flex.compiled import Compiled, Graph, Outputs
from fa4flex.runtime.flex.engine import Ready, Recent
from fa4flex.runtime.key_sources import Contiguous
from fa4flex.torch_internals import forward_ad
from fa4flex.variant import Variant, default_scale

QKV = tuple[Tensor, Tensor, Tensor]

MOST_KEPT = 4
"""Calls of one Attention that are kept: prompts, single queries, with and without gradients."""

MOST_MADE = 16
"""Ways to one ready call that one Attention makes, for all strides and modes: each takes some time."""


def _tensors(call: Call) -> tuple[Tensor, ...]:
    q, kv, operands, sinks, *_ = call
    return (q, kv.k, kv.v, *operands) if sinks is None else (q, kv.k, kv.v, *operands, sinks)


class Repeat:
    """Calls just like one that was ready. It holds no tensors of theirs.

    looks  torch's comparison of q, k and v in the user's layout, captured tensors and sinks
    graph  None where Dynamo is to find it at each call, since none can be told
    """

    __slots__ = (
        "grad", "graph", "looks", "numbers", "ready", "recent", "scale", "sinks", "statistics",
    )  # fmt: skip

    def __init__(self, ready: Ready, looks: Callable[..., bool], call: Call) -> None:
        self.ready, self.looks, self.scale = ready, looks, call.scale
        self.sinks, self.statistics = call.sinks is not None, call.statistics
        self.numbers, self.grad = ready.engine.watched.numbers_of(call.scalars), torch.is_grad_enabled()
        self.graph: Graph | None = None
        self.recent: Recent | None = None

    def fits(self, call: Call) -> bool:
        """True if such a call is one of these."""
        scale, scalars = call.scale, call.scalars
        return (
            (call.sinks is not None) is self.sinks
            and self.looks(*_tensors(call))
            and call.statistics == self.statistics
            and scale == self.scale
            and (scale != 0 or exactly(scale) == exactly(self.scale))
            and torch.is_grad_enabled() is self.grad
            and forward_ad._current_level < 0
            and (not scalars or self.ready.engine.watched.numbers_of(scalars) == self.numbers)
        )

    def __call__(self, call: Call) -> Outputs:
        """Results of such a call with heads first."""
        ready, graph = self.ready, self.graph
        parts = ready.parts(call, self.recent)
        self.recent = parts.recent
        result = ready.compute(parts) if graph is None or not graph.holds() else graph(ready.flat(parts))
        return ready.results(result, call)

    def first(self, call: Call) -> Outputs:
        """The same, and from now on by the graph that computes this."""
        ready = self.ready
        parts, attend = ready.parts(call, None), ready.attend
        self.recent = parts.recent
        if not isinstance(attend, Compiled):
            return ready.results(ready.compute(parts), call)
        result, run = attend.watched(*ready.arguments(parts))
        self.graph = None if run is None else Graph.of(run, ready.flat(parts), result)
        return ready.results(result, call)


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
        q, k, v = qkv
        if not isinstance(q, Tensor) or not q.dim():
            return None
        (operands, scalars), sinks = reading, None if variant.sinks is None else variant.sinks.now()
        scale = default_scale(q.shape[-1]) if variant.scale is None else variant.scale
        heads_first = variant.layout == "bhsd"
        call = Call(q, Contiguous(k, v), operands, sinks, NO_LENGTHS, scalars, scale, heads_first, statistics)
        for one in self.kept:
            if one.fits(call):
                turned = call.turned()
                if variant.blocks is not None:  # of the same blocks, perhaps for other lengths
                    shape = turned.extents()
                    variant.blocks.fits(shape.q_len, shape.kv_len, shape.batch, shape.heads)
                out, lse, largest = one(turned)
                return call.turn(out), lse, largest
        return None

    def attend(self, ready: Ready, call: Call) -> Outputs:
        """The results, heads first, of a call that was ready, from now on the first of those just like it."""
        turned, made_before = call.turned(), self._made.get(ready, 0)
        if made_before < MOST_MADE and not any(one.fits(call) for one in self.kept):
            self._made[ready] = made_before + 1
            looks = guard_of(_tensors(call))
            if looks is not None:
                made = Repeat(ready, looks, call)
                result = made.first(turned)
                self.kept = (made, *self.kept)[:MOST_KEPT]
                return result
        return ready(turned)
