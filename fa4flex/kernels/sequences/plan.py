"""The plan of the kernel that corrects lengths and sorts tiles. Data only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fa4flex.codegen.analyze.facts import Facts
from fa4flex.codegen.expr import TRUE, walk
from fa4flex.kernels.plan.problem import Problem
from fa4flex.kernels.plan.target import Target
from fa4flex.kernels.sequences.config import Config


@dataclass(frozen=True)
class SequencesPlan:
    """A kernel for batches of these lengths on `target`: one block. `tile`: queries and keys of the tiles
    that it sorts, None where it sorts none; facts: the mask that their work follows from.

    Of `problem` only the kind of lengths and what mask hooks are made of count: one kernel serves all widths,
    dtypes and numbers of heads.
    """

    facts: Facts
    problem: Problem
    target: Target
    tile: tuple[int, int] | None = None

    module: ClassVar[str] = "fa4flex.kernels.sequences"

    def config(self) -> Config:
        return Config(self.problem.lengths, *(self.tile or ()))

    def explain(self) -> str:
        """The plan in words."""
        lines = [
            f"lengths for {self.target.name} ({self.target.chip}): {self.problem.lengths} ones, made safe"
        ]
        if self.tile is not None:
            work = "keys between the ends of its first and last row"
            if self.problem.mask_form == "none":
                work = "its sequence's keys"
            lines.append(f"tiles of {self.tile[0]} queries sorted by {work}, in units of {self.tile[1]}")
        return "\n".join(lines)


def plan_sequences(
    facts: Facts, problem: Problem, target: Target, tile: tuple[int, int] | None = None
) -> SequencesPlan:
    """The plan for calls of a kernel for `problem`, whose tiles of queries are to be sorted if `tile` is
    given."""
    spans = () if tile is None or facts.mask is TRUE or facts.keys is None else facts.keys.spans
    ends = [end for span in spans for end in span]
    known = bool(ends) and not any(node.op in ("load", "search") for node in walk(*ends))
    plain = Problem(
        64,
        64,
        lengths=problem.lengths,
        mask_form="spans" if known else "none",
        wide_index=known and problem.wide_index,
        keys=problem.keys.bare,
    )
    return SequencesPlan(Facts(mask=facts.mask) if known else Facts(), plain, target, tile)
