"""Launches that calls of random lengths need: plans and proofs alone, nothing is compiled.

    python benchmarks/launches_of_lengths.py [--lengths 1000] [--heads 16:4] [--seed 1] [--out counts.json]
    python benchmarks/launches_of_lengths.py --compare before.json after.json

A program's calls come one after the other, with 1 to 17 sequences and up to 5,000 queries and keys, by their
logarithm. A call that no launch serves has one made, as runtime/cuda/engine.py makes it, for the extents for
which its plan is valid; none is forgotten. Combinations are the variants' first cases, both passes, both
chips, dense, padded and packed batches, and heads of four widths. Run with PYTHONPATH at two versions of the
package, one seed tells what a change of plans costs.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import random
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

import fa4flex
from fa4flex import lower, variants
from fa4flex.codegen.analyze.domain import Ragged, Shape
from fa4flex.codegen.analyze.extents import Reach
from fa4flex.errors import Fa4flexError
from fa4flex.kernels.plan.inputs import Inputs
from fa4flex.kernels.plan.target import SM90A, SM100A, Target
from fa4flex.runtime.cuda import engine as engines
from fa4flex.variants._cases import Sizes

MOST_BATCH, MOST_LENGTH = 17, 5000
WIDTHS = (64, 96, 128, 192)
FORMS = ("dense", "used", "packed")
TARGETS = {target.name: target for target in (SM90A, SM100A)}
SCALE = 8.0
"""Documents of variants' cases have 640 tokens, times this."""

MOST_REFUSED = 20
"""Calls without a kernel, after which a combination of which none had one has none."""

Combination = tuple[str, str, str, str, int]
"""Variant, pass, chip, form and width."""


def extents_drawn(seed: int, count: int) -> list[tuple[int, int, int]]:
    draw = random.Random(seed)

    def length() -> int:
        return round(math.exp(draw.uniform(0, math.log(MOST_LENGTH))))

    return [(draw.randint(1, MOST_BATCH), length(), length()) for _ in range(count)]


def programs(heads: int, kv_heads: int, only: Sequence[str] = ()) -> Iterator[tuple[str, Any]]:
    """Programs by name, whose captured tensors are as long as all calls."""
    if not only or "none" in only:
        yield "none", fa4flex.compile().program
    sizes = Sizes(MOST_BATCH, heads, kv_heads, MOST_LENGTH, MOST_LENGTH, scale=SCALE)
    for name in only or variants.__all__:
        if name == "none":
            continue
        case = importlib.import_module(f"fa4flex.variants.{name}").CASES[0]
        drawn = case.draw(sizes)
        yield name, fa4flex.compile(**drawn.compose(*drawn.learned)).program


class Calls:
    """Calls of one combination, and the ranges of extents of launches that were made for them."""

    def __init__(self, program: Any, of: Combination, heads: int, kv_heads: int, kept: int = 0) -> None:
        _, self._direction, self._arch, self._form, self._width = of
        self._program, self._heads, self._kv_heads = program, heads, kv_heads
        variant = program.variant
        kinds = {node.value: node.kind for node in _scalars(program)}
        self._engine = engines.Engine(program.facts, variant.schedule, variant.precision, kinds)
        self._captured = program.captured()
        self._kept = kept
        self.reaches: list[Reach] = []
        self.made = 0
        self.refused = 0

    def call(self, extents: tuple[int, int, int]) -> None:
        """Make a launch unless one serves these extents, or nothing ever did."""
        if not self.made and self.refused >= MOST_REFUSED:
            return
        if any(reach.holds(extents) for reach in self.reaches):
            return
        try:
            self.reaches.append(self._made(extents))
            self.made += 1
            self.reaches = self.reaches[-self._kept :]
        except Fa4flexError:
            self.refused += 1

    def _made(self, extents: tuple[int, int, int]) -> Reach:
        batch, q_len, kv_len = extents
        kind = Shape if self._form == "dense" else Ragged
        backward = self._direction == "backward"
        inputs = Inputs(
            kind(batch, self._heads, q_len, kv_len),
            self._kv_heads,
            self._width,
            self._width,
            lengths=self._form,  # type: ignore[arg-type]
            keys_used=self._form == "used",
            sinks=self._program.variant.sinks is not None,
            captured=tuple((str(x.dtype)[6:], tuple(x.shape)) for x in self._captured.operands),
        )
        operands, scalars = self._captured.operands, self._captured.scalars
        q = torch.empty(0, dtype=torch.bfloat16)
        call: Any = SimpleNamespace(operands=operands, scalars=scalars, q=q, inputs=lambda out: inputs)
        target: Target = TARGETS[self._arch]
        lowering: Any = partial(lower.lower_backward, needs=()) if backward else lower.lower_forward
        schedule = self._program.variant.schedule
        with mock.patch.object(engines, "target_of", lambda device: target):
            return engines.lowered_for(self._engine, call, schedule, lowering, queries=backward)[2]


def _scalars(program: Any) -> Iterator[Any]:
    from fa4flex.codegen.expr import walk

    return (node for node in walk(program.facts.score, program.facts.mask) if node.op == "scalar")


def counted(arguments: argparse.Namespace) -> dict[str, list[int]]:
    """Launches, and calls that have no kernel, of every combination."""
    heads, kv_heads = map(int, arguments.heads.split(":"))
    drawn = extents_drawn(arguments.seed, arguments.lengths)
    results: dict[str, list[int]] = {}
    for name, program in programs(heads, kv_heads, arguments.only.split(",") if arguments.only else []):
        for of in product((name,), ("forward", "backward"), TARGETS, FORMS, WIDTHS):
            calls = Calls(program, of, heads, kv_heads, arguments.kept)
            for extents in drawn:
                calls.call(extents)
            print(*of, calls.made, calls.refused, file=sys.stderr, flush=True)
            results[" ".join(map(str, of))] = [calls.made, calls.refused]
    return results


# --- words --------------------------------------------------------------------------------------------------


def told(results: dict[str, list[int]]) -> str:
    served = [made for made, _ in results.values() if made]
    return f"{sum(served)} launches in {len(served)} combinations of {len(results)}"


def compared(before: dict[str, list[int]], after: dict[str, list[int]]) -> Iterator[str]:
    """Sums of both, of the combinations that both have, and by pass, chip, form and width."""
    both = [name for name in before if name in after]
    yield _growth("all", both, before, after)
    yield _growth("those that differ", [n for n in both if before[n] != after[n]], before, after)
    for place in (1, 2, 3, 4):
        for value in dict.fromkeys(name.split()[place] for name in both):
            names = [name for name in both if name.split()[place] == value]
            yield _growth(value, names, before, after)
    groups = Counter(" ".join(name.split()[1:]) for name in both if before[name] != after[name])
    for group in sorted(groups):
        names = [name for name in both if name.endswith(f" {group}")]
        yield _growth(group, names, before, after)


def _growth(title: str, names: list[str], before: Any, after: Any) -> str:
    old, new = (sum(counts[name][0] for name in names) for counts in (before, after))
    return f"{title:36} {len(names):5} {old:7} {new:7}  {new / max(old, 1) - 1:+.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", type=int, default=1000)
    parser.add_argument("--heads", default="16:4", help="query heads and heads of keys")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kept", type=int, default=0, help="launches that are remembered; 0: all")
    parser.add_argument("--only", default="", help="names of variants, between commas")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("BEFORE", "AFTER"))
    arguments = parser.parse_args()
    if arguments.compare:
        print("\n".join(compared(*(json.loads(path.read_text()) for path in arguments.compare))))
        return
    with mock.patch.object(lower, "_emitted", lambda *given: None):
        results = counted(arguments)
    if arguments.out:
        arguments.out.write_text(json.dumps(results, indent=1))
    print(told(results))


if __name__ == "__main__":
    main()
