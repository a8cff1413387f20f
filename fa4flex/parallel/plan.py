"""Plan of one attention over many ranks: placement and exchange, kept while what the mask reads is alike."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

from fa4flex.codegen.analyze.domain import numbers_read, slots_read
from fa4flex.codegen.analyze.facts import Facts
from fa4flex.codegen.analyze.tiles import Shape
from fa4flex.codegen.build import Bound, bind
from fa4flex.codegen.evaluate import Captured
from fa4flex.contents import Followed, on_host
from fa4flex.default_device import on_the_host
from fa4flex.errors import InputError
from fa4flex.exact import exactly
from fa4flex.parallel.exchange import Exchange, exchange
from fa4flex.parallel.placement import UNEVEN, Kind, Placement, Ranges, place
from fa4flex.parallel.splits import divided
from fa4flex.parallel.work import FIRST_CHUNKS, MOST_CHUNKS, Work, chunk_for, work_of
from fa4flex.primitives.schedule import Contents
from fa4flex.variant import Variant

TILE = 128
"""Queries and keys of the tiles whose work is counted, and least size of a chunk."""


SM_MARGIN = 0
"""Multiprocessors that are left to a collective that runs at the same time. On two H100 a causal mask over
64k tokens, forward and backward, takes 107 ms where 8 are left and 103 ms where none are: an exchange of 1 ms
costs less than 6 % of a stage's multiprocessors."""

Moves = Literal["auto", "keys", "heads"]
Guests = Literal["auto", "always", "never"]


@dataclass(frozen=True)
class Layout:
    """Options for spreading attention, as `fa4flex.parallel.parallel` describes them; kind: its `placement`,
    with which no keys are divided. Raises InputError."""

    kind: Kind | None = None
    tile: int = TILE
    stages: int = 1
    moves: Moves = "auto"
    guests: Guests = "auto"
    sm_margin: int = SM_MARGIN

    def __post_init__(self) -> None:
        for name, choice in (("moves", Moves), ("guests", Guests)):
            if getattr(self, name) not in get_args(choice):
                argument = f"{name}={getattr(self, name)!r}"
                raise InputError(argument, f"one of {get_args(choice)}", 'leave it at "auto"')
        if self.kind not in (None, *get_args(Kind)):
            raise InputError(
                f"placement={self.kind!r}",
                f"None or one of {get_args(Kind)}",
                "leave it out for the best one",
            )
        for name, least in (("tile", 1), ("stages", 1), ("sm_margin", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise InputError(f"{name}={value!r}", f"an int >= {least}", f"leave {name} out")


@dataclass(frozen=True, eq=False)
class Plan:
    """Plan of every rank: the same on all of them."""

    placement: Placement
    exchange: Exchange

    @cached_property
    def digest(self) -> str:
        """Identity of the plan: ranks compare theirs."""
        at = self.exchange
        said = repr((at.held, at.queries, at.sends, self.placement.splits))
        return hashlib.sha256(said.encode()).hexdigest()[:16]

    def explain(self) -> str:
        """In words: where queries are computed, and what moves."""
        return f"{self.placement.explain()}\n{self.exchange.explain()}"


@on_the_host
def plan(
    variant: Variant,
    lengths: int | tuple[int, int],
    ranks: int,
    *,
    batch: int = 1,
    heads: int = 1,
    placement: Kind | None = None,
    tile: int = TILE,
    stages: int = 1,
    guests: Guests = "auto",
) -> Plan:
    """Plan of a variant (or of what `fa4flex.compile` returns) on so many ranks, without any of them.

    lengths are those of queries and keys, one number where they are the same; batch and heads matter where
    the mask reads `b` or `h`; the rest is as for `attn.parallel`.
    """
    pair = (lengths, lengths) if isinstance(lengths, int) else lengths
    variant = getattr(variant, "variant", variant)
    layout = Layout(placement, tile, stages, guests=guests)
    shape = Shape(batch, heads, *pair)
    return plan_of(bind(variant.shown), shape, ranks, layout, None, variant.schedule.contents)


_plans: Followed[Plan] = Followed(64, 4)
"""Plans by program, numbers, sizes and layout, and by what captured tensors that the mask reads hold."""


def plan_of(
    bound: Bound,
    shape: Shape,
    ranks: int,
    layout: Layout,
    held: tuple[Ranges, ...] | None,
    contents: Contents = "compared",
) -> Plan:
    """The plan of a mask over the whole, of this shape. held: where keys lie, or None for where the placement
    has them. contents: as a schedule has it; to compare those on a device they are copied to the host, which
    waits."""
    facts = bound.trace.facts
    mask = facts.mask
    # num_heads is read where h is, if at all; a mask that reads it alone has the same work for any.
    heads = shape.heads if mask.free & {"h", "num_heads"} else 1
    shape = Shape(shape.batch if "b" in mask.free else 1, heads, shape.q_len, shape.kv_len)
    numbers = exactly(*[bound.scalars[slot] for slot in numbers_read(mask)])
    key = facts.key, numbers, shape, ranks, layout, held
    read = [bound.bases[at] for at in bases_read(bound)]
    if contents == "compared":
        read = [on_host(x) for x in read]
    return _plans.made(key, read, lambda: _planned(bound, shape, ranks, layout, held), contents)


def bases_read(bound: Bound) -> list[int]:
    """Numbers of the captured tensors whose contents the mask depends on."""
    trace, slots = bound.trace, slots_read(bound.trace.facts.mask)
    if trace.derived and slots:  # from which of them, the trace does not say
        return list(range(len(bound.bases)))
    return sorted(slots)


def _planned(bound: Bound, shape: Shape, ranks: int, layout: Layout, held: tuple[Ranges, ...] | None) -> Plan:
    captured = Captured(bound.trace.tensors(bound.bases), bound.scalars)
    work, placement = placed(bound.trace.facts, shape, captured, ranks, layout)
    return Plan(placement, exchange(work, placement, held, layout.stages))


def placed(
    facts: Facts, shape: Shape, captured: Captured, ranks: int, layout: Layout
) -> tuple[Work, Placement]:
    """The work of a mask, and its best placement: in chunks of which each rank has 8 or more, or in the
    smallest ones that can be had where loads differ by more than 3 % in these. Where they still do, keys of
    some queries are divided."""
    # Without key intervals every pair of chunks is looked at, which takes seconds where there are many.
    first = max(8 * ranks, 256) if facts.keys is not None else min(max(8 * ranks, 256), FIRST_CHUNKS)
    chunk = 0
    for most in (first, MOST_CHUNKS):
        smaller = chunk_for(shape.q_len, shape.kv_len, most, layout.tile)
        if smaller == chunk:
            break
        chunk = smaller
        work = work_of(facts, shape, captured, layout.tile, chunk)
        placement = place(work, ranks, layout.kind)
        if placement.imbalance <= UNEVEN:
            break
    if layout.kind is None and layout.guests != "never":
        placement = divided(work, ranks, placement, layout.guests == "always")
    return work, placement
