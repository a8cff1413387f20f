"""The Blackwell forward pipeline of a pair of CTAs: that of one CTA twice, but for what a pair shares.

What the first CTA has is named as in one CTA alone, the second one's with THERE behind it. The first CTA's
warp that multiplies issues the products of both, whose second operands lie in both; it waits for its own
barriers and signals both CTAs. Full barriers of tiles lie with the first CTA and count the bytes of both;
here each has its own part. Where the hardware tells the next tile, the first CTA asks for both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fa4flex.kernels.fwd_sm100.roles import FROM_BOTH, answer_readers
from fa4flex.kernels.fwd_sm100.tiles import Tiles
from fa4flex.kernels.plan.tensor_memory import WHOLE
from fa4flex.kernels.plan.topology import (
    WARP,
    Barrier,
    Event,
    Events,
    Product,
    Ring,
    Role,
    Topology,
)

THERE = " there"
BOTH = (0, 1)
APART = 16
"""Numbers of named barriers: a CTA has so many, and the second one's follow."""

NEXT_EMPTY = "next empty"
"""All of both CTAs have read the answer."""


def at(name: str, cta: int) -> str:
    return name + THERE * cta


def pair_topology(one: Topology, tiles: Tiles) -> Topology:
    """The pipeline of a pair whose CTAs each have what `one` has."""
    asks = any(ring.name == "next" for ring in one.rings)
    shared = {b.name for b in one.mbarriers if b.name.split()[0] in FROM_BOTH} | {NEXT_EMPTY}
    barriers = [
        replace(b, name=at(b.name, c), cta=c) for c in BOTH for b in one.mbarriers if b.name not in shared
    ]
    barriers += [replace(b, arrivals=b.arrivals * len(BOTH)) for b in one.mbarriers if b.name in shared]
    barriers += [
        Barrier(at("freed", c), 1, "the other CTA has read its tensor memory", lanes=WARP, cta=c)
        for c in BOTH
    ]
    if asks:
        readers = answer_readers(tiles.q_tiles, tiles.out_stages, len(BOTH))
        barriers.append(Barrier(NEXT_EMPTY, readers, "all have read the answer"))
    return replace(
        one,
        roles=tuple(_role(role, c, shared) for c in BOTH for role in one.roles),
        rings=tuple(_ring(ring, c) for c in BOTH for ring in one.rings),
        barriers=tuple(
            replace(b, name=at(b.name, c), number=b.number + APART * c) for c in BOTH for b in one.barriers
        ),
        mbarriers=tuple(barriers),
        overlaps=tuple((at(a, c), at(b, c)) for c in BOTH for a, b in one.overlaps),
        by_warp=tuple(at(name, c) for c in BOTH for name in one.by_warp),
        places=tuple(tuple(_places(one, tiles, c, shared)) for c in BOTH),
    )


def _ring(ring: Ring, cta: int) -> Ring:
    """The second CTA's tiles count in the first one, but each awaits an answer at a barrier of its own."""
    other = replace(ring, name=at(ring.name, cta))
    if ring.name == "next":
        return replace(other, empty_arrivals=0, freed_by=NEXT_EMPTY)
    return replace(other, full_of=ring.name if cta and ring.copies else "")


def _places(one: Topology, tiles: Tiles, cta: int, shared: set[str]) -> Iterator[str]:
    """The last one, `freed`, lies behind the next tile's number, or an answer, of 16 bytes at a multiple of
    them."""
    full = [f"{r.name} full" for r in one.rings if r.copies and r.name != "next"]
    count = 0
    for name in one.places[0]:
        count += 1
        here = name in shared or name.startswith(tuple(full))
        yield "" if not name or (cta and here) else name if not cta else _there(name)
    asks = any(ring.name == "next" for ring in one.rings)
    yield from [""] * (count % 2 + 2 if asks else 1 + count % 2)
    yield at("freed", cta)


def _there(name: str) -> str:
    """The name of a ring's barrier has its side, and whose warp's it is, behind the ring's."""
    for side in (" full", " empty"):
        ring, found, rest = name.partition(side)
        if found:
            return f"{ring}{THERE}{side}{rest}"
    name, warp, number = name.partition(" of warp ")
    return f"{name}{THERE}{warp}{number}"


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
        yield Event("await", at("freed", cta), per="block", leads=True)
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
