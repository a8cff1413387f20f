"""The module of the kernels that find a mask's tiles: the mask, and its bounds over a tile."""

from __future__ import annotations

from typing import Any

from fa4flex.codegen.analyze.facts import Facts
from fa4flex.codegen.emit.module import Captions, Module, Pass, call
from fa4flex.codegen.emit.source import Source

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
        self._roots = {name: self._lowering.value(root) for name, root in roots.items()}

    def hooks(self) -> list[str]:
        items = ["uniform=uniform"] if self._uniform() else []
        items += [f"{name}={self.pointwise(name)}" for name in BOUNDS]
        ranges = [self.pointwise(name) for name in self._roots if name not in BOUNDS]
        items += [f"ranges=({', '.join(ranges)},)"] * bool(ranges)
        return call("HOOKS = Hooks", items)
