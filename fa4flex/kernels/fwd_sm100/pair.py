"""The Blackwell forward pipeline of a pair of CTAs: that of one CTA twice, but for what a pair shares.

What the first CTA has is named as in one CTA alone, the second one's with THERE behind it. The first CTA's
warp that multiplies issues the products of both, whose second operands lie in both; it waits for its own
barriers and signals both CTAs. Full barriers of tiles lie with the first CTA and count the bytes of both;
here each has its own part. Where the hardware tells the next tile, the first CTA asks for both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fa4flex.kernels.fwd_sm100.roles import barrier_table
from fa4flex.kernels.fwd_sm100.tiles import Tiles
from fa4flex.kernels.plan.barriers import BarrierTable
from fa4flex.kernels.plan.pairs import BOTH, at, freed
from fa4flex.kernels.plan.tensor_memory import WHOLE
from fa4flex.kernels.plan.topology import (
    Barrier,
    Event,
    Events,
    Product,
    Ring,
    Role,
    Topology,
)

NEXT_EMPTY = "next empty"
"""All of both CTAs have read the answer."""


def pair_topology(one: Topology, tiles: Tiles) -> Topology:
    """The pipeline of a pair whose CTAs each have what `one` has."""
    asks = any(ring.name == "next" for ring in one.rings)
    table = barrier_table(tiles, "answer" if asks else "", len(BOTH))
    shared = table.shared
    barriers = [b for c in BOTH for b in (*table.barriers(c), freed(c))]
    if asks:
        last = table["next_empty"]
        barriers.append(Barrier(NEXT_EMPTY, last.arrivals, last.meaning))
    return replace(
        one,
        roles=tuple(_role(role, c, shared) for c in BOTH for role in one.roles),
        rings=tuple(_ring(ring, c) for c in BOTH for ring in one.rings),
        barriers=tuple(barrier for c in BOTH for barrier in table.named_barriers(c)),
        mbarriers=tuple(barriers),
        overlaps=tuple((at(a, c), at(b, c)) for c in BOTH for a, b in one.overlaps),
        by_warp=tuple(at(name, c) for c in BOTH for name in one.by_warp),
        stages=tuple((at(name, c), stages) for c in BOTH for name, stages in one.stages),
        places=tuple(_places(table, asks, c) for c in BOTH),
    )


def _places(table: BarrierTable, asks: bool, cta: int) -> tuple[str, ...]:
    """The last one, `freed`, lies behind the next tile's number, or an answer, of 16 bytes at a multiple of
    them."""
    between = table.count % 2 + 2 if asks else 1 + table.count % 2
    return *table.places(cta), *[""] * between, freed(cta).name


def _ring(ring: Ring, cta: int) -> Ring:
    """The second CTA's tiles count in the first one, but each awaits an answer at a barrier of its own."""
    other = replace(ring, name=at(ring.name, cta))
    if ring.name == "next":
        return replace(other, empty_arrivals=0, freed_by=NEXT_EMPTY)
    return replace(other, full_of=ring.name if cta and ring.copies else "")


def _role(role: Role, cta: int, shared: set[str]) -> Role:
    if role.name == "multiply" and cta:
        opening = (Event("sync", at("allocated", 1)),)
        return Role(at("multiply", 1), 1, opening=opening, warp=role.warp, cta=1)
    multiplies = role.name == "multiply"

    def events(part: Events) -> Events:
        return tuple(e for event in part for e in _events(event, role, cta, shared, multiplies))

    parts = {when: events(part) for when, part in role.parts.items()}
    products = tuple(_product(p, c) for c in BOTH for p in role.products)
    return replace(role, name=at(role.name, cta), cta=cta, products=products, **parts)  # type: ignore[arg-type]


def _events(event: Event, role: Role, cta: int, shared: set[str], multiplies: bool) -> Iterator[Event]:
    here = replace(event, target=at(event.target, cta))
    if event.target == "next":
        yield from _next(event, cta)
    elif event.target in shared:
        yield event
    elif multiplies and event.action in ("issue", "commit", "wait"):
        yield from (replace(event, target=at(event.target, c)) for c in BOTH)
    elif event.action == "allocate":
        yield from (replace(event, target=at(WHOLE, c)) for c in BOTH if not cta)
    elif event.action == "free":
        yield Event("arrive", at("freed", 1 - cta), per="block", leads=True)
        yield Event("await", freed(cta).name, per="block", leads=True)
        yield from (replace(event, target=at(WHOLE, c)) for c in BOTH if not cta)
    else:
        yield here


def _next(event: Event, cta: int) -> Iterator[Event]:
    """The second CTA's scheduler only announces the bytes that the first one asks for."""
    here = replace(event, target=at("next", cta))
    if event.action == "acquire":
        yield from [Event("await", NEXT_EMPTY, -1, "work")] * (not cta)
    elif event.action == "load" and cta:
        yield replace(here, action="announce")
    elif event.action == "load":
        yield from (replace(event, target=at("next", c)) for c in BOTH)
    elif event.action == "release":
        yield Event("arrive", NEXT_EMPTY, per="work")
    else:
        yield here


def _product(product: Product, cta: int) -> Product:
    """Each CTA has its own first operand, and a half of the second one is in each."""
    first, second = product.reads
    reads = (
        replace(first, target=at(first.target, cta)),
        *(replace(second, target=at(second.target, c)) for c in BOTH),
    )
    result = replace(product.result, target=at(product.result.target, cta))
    return replace(product, name=at(product.name, cta), reads=reads, result=result)
