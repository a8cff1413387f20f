"""The modules of an output function's own kernels: the function, or its derivatives."""

from __future__ import annotations

from typing import Any

from fa4flex.codegen.analyze.facts import Facts
from fa4flex.codegen.analyze.gradient import ONE
from fa4flex.codegen.emit.module import Captions, Module, Pass, call
from fa4flex.codegen.emit.source import Source

FUNCTION = Pass("output function", "OutputFunction", False, False)
GRADIENT = Pass("gradients of an output function", "OutputGradient", False, True)


def emit_output(facts: Facts, plan: Any) -> Source:
    """The module of a plan of an output function, which stands in place of the score in `facts`. Raises
    UnsupportedError where no device code can be written for it."""
    which = FUNCTION if plan.direction == "output" else GRADIENT
    captions = Captions("launch of its own")
    return Source(captions.title, _Output(facts, plan, captions, {}, which).text())


class _Output(Module):
    def fill(self, facts: Facts) -> None:
        self._lowering = self._lowering.unscaled()
        if self._pass is FUNCTION:
            self._roots = {"output": self._lowering.value(facts.score)}
            return
        gradient = facts.gradient
        if gradient.by_score is not ONE:
            self._roots["slope"] = self._lowering.value_within(gradient.by_score, facts.score)
        for one in self._plan.sums:
            (term,) = gradient.of_slots([one.slot])
            name = f"{self._printer.names.tensor(one.slot)}_weight"
            self._roots[name] = self._lowering.value_within(term.value, facts.score)

    def hooks(self) -> list[str]:
        items = ["uniform=uniform"] if self._uniform() else []
        items += [f"{name}={self.pointwise(name)}" for name in ("output", "slope") if name in self._roots]
        weights = [self.pointwise(name) for name in self._roots if name.endswith("_weight")]
        items += [f"derivatives=({', '.join(weights)},)"] * bool(weights)
        return call("HOOKS = Hooks", items)
