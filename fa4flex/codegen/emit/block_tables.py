"""The module of the kernels that find a mask's tiles: the mask, its bounds over a tile, its key intervals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fa4flex.codegen.analyze.facts import Facts
from fa4flex.codegen.emit.module import ENDS, Captions, Module, Pass, call
from fa4flex.codegen.emit.source import Source
from fa4flex.codegen.emit.writer import Function

TABLES = Pass("block tables", "BlockTables", False, False)
BOUNDS = "certain", "possible", "mask"


def emit_tables(facts: Facts, plan: Any) -> Source:
    """The module whose `kernel` writes the block tables of the mask of `facts`."""
    captions = Captions("block tables")
    return Source(captions.title, _Tables(facts, plan, captions, {}, TABLES).text())


class _Tables(Module):
    def fill(self, facts: Facts) -> None:
        bounds = self._plan.bounds
        roots = dict(zip(BOUNDS, (bounds.certain, bounds.possible, facts.mask), strict=True))
        roots |= {f"range_{i}": x for i, x in enumerate(bounds.ranges)}
        roots |= {f"element_{i}": x for i, x in enumerate(self._plan.searched)}
        self._roots = {name: self._lowering.value(root) for name, root in roots.items()}
        if self._plan.keys is not None:
            self._spans = self._lowered_spans(facts, ENDS["spans"])

    def _text(self, function: Function) -> list[str]:
        """Elements that have to be sorted are read in all of their bits: masks compute with 32 of them, and
        searches compare all."""
        printer = self._printer
        if function.hook.startswith("element_"):
            self._printer = replace(printer, wide=True)
        try:
            return super()._text(function)
        finally:
            self._printer = printer

    def hooks(self) -> list[str]:
        items = ["uniform=uniform"] if self._uniform() else []
        items += [f"{name}={self.pointwise(name)}" for name in BOUNDS]
        for field, kind in (("ranges", "range_"), ("searched", "element_")):
            results = [self.pointwise(name) for name in self._roots if name.startswith(kind)]
            items += [f"{field}=({', '.join(results)},)"] * bool(results)
        items += ["spans=spans"] * bool(self._spans)
        return call("HOOKS = Hooks", items)
