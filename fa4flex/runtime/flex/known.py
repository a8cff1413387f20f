"""Calls through torch's flex_attention that were seen before: see runtime/recent.py.

Kept                holds for                                         stale when
a `Repeat`          types, dtypes, devices, shapes, strides and       never: other calls have others, and the
                    requires_grad of all tensors, dispatch (modes,    oldest goes
                    transforms, autocast, inference), grad mode,
                    scale, statistics, numbers that proofs read
its graph           the same, and torch's global state                that changed: Dynamo is asked

recent parts        numbers, stream, block mask: see `Recent`         see engine.py

What the functions captured is read anew by each call: other tensors of the same looks and other numbers are
served too.
"""

from __future__ import annotations

from fa4flex.exact import exactly
from fa4flex.runtime.call import Call, Results
from fa4flex.runtime.flex.compiled import Compiled, Graph, Outputs
from fa4flex.runtime.flex.engine import Parts, Ready, Recent


class Repeat:
    """Computes calls just like one that was ready, whose tensors are compared by who calls it.

    graph  None where Dynamo is to find it at each call, since none can be told
    """

    __slots__ = "graph", "numbers", "ready", "recent", "scale"

    def __init__(self, ready: Ready, call: Call) -> None:
        self.ready, self.scale = ready, exactly(call.scale)
        self.numbers = ready.engine.watched.numbers_of(call.scalars)
        self.graph: Graph | None = None
        self.recent: Recent | None = None

    def __call__(self, call: Call, *_: object) -> Results | None:
        """The results, in the layout of q; None for another scale, and for other numbers that proofs read."""
        ready, graph, numbers = self.ready, self.graph, call.scalars
        if exactly(call.scale) != self.scale:
            return None
        if numbers and ready.engine.watched.numbers_of(numbers) != self.numbers:
            return None
        turned = call.turned()
        parts = ready.parts(turned, self.recent)
        self.recent = parts.recent
        result = ready.compute(parts) if graph is None or not graph.holds() else graph(ready.flat(parts))
        out, *statistics = ready.results(result, turned)
        return call.turn(out), *statistics

    def first(self, call: Call) -> Results:
        """The same of the call that this was made for, and from now on by the graph that computes it."""
        turned = call.turned()
        parts = self.ready.parts(turned, None)
        self.recent = parts.recent
        out, *statistics = self.ready.results(self._watched(parts), turned)
        return call.turn(out), *statistics

    def _watched(self, parts: Parts) -> Outputs:
        ready, attend = self.ready, self.ready.attend
        if not isinstance(attend, Compiled):
            return ready.compute(parts)
        result, run = attend.watched(*ready.arguments(parts))
        self.graph = None if run is None else Graph.of(run, ready.flat(parts), result)
        return result
