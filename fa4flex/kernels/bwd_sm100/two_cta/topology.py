"""The Blackwell backward pipeline of a pair of CTAs, with the barriers of the kernel
(two_cta/roles.py). What each CTA has is named as it is in the first one, and in the second
with THERE behind it. For step j, the first CTA's multiplying warp issues the products of both:

    S(0) dP(0) dV(0)   S(1) dK(0) dP(1) dQ(0) dV(1)   ...   dK(J-1) dQ(J-1)

What the kernel has otherwise: full barriers of tiles lie with the first CTA and count the bytes of both, here
each CTA's own part; dS that comes from the other CTA is counted in bytes, here by the warps that send it. It
may come late, but whoever reads it waits for all of it.

What is not there, and why the simulation finds nothing missing:

no s_empty        S(j + 1) comes after dV(j), which waited until probabilities had been made of all of S(j),
                  and has read them; and after dQ(j - 1), which lies over the last scores, was read.
no ds_empty       dS(j + 1) is made of dP(j + 1), which comes after dK(j), and it has read dS(j).
no dp_empty       dP(j + 1) comes after dK(j), which waited until all had read dP(j).
                  Whoever writes dS(j + 1) to shared memory, in either CTA, waits for dq_full of dQ(j).
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from fa4flex.kernels.bwd_sm100.config import ROWS, Config
from fa4flex.kernels.bwd_sm100.roles import COMPUTE, MULTIPLY
from fa4flex.kernels.bwd_sm100.topology import (
    CORE,
    HALVES,
    load_role,
    numbers,
    once,
    reduce_role,
    tiles,
)
from fa4flex.kernels.bwd_sm100.two_cta.config import CTAS, KEPT
from fa4flex.kernels.bwd_sm100.two_cta.roles import LOADS, barrier_table
from fa4flex.kernels.plan.barriers import BarrierTable
from fa4flex.kernels.plan.pairs import BOTH, THERE, at, freed
from fa4flex.kernels.plan.tensor_memory import WHOLE, Columns
from fa4flex.kernels.plan.topology import (
    WARPGROUP,
    Action,
    Event,
    Events,
    Product,
    Ring,
    Role,
    Topology,
)


def pair_topology(config: Config, columns: Columns, itemsize: int) -> Topology:
    """Topology of both CTAs of a pair."""
    table = barrier_table(config)
    return Topology(
        roles=(
            *(load_role(LOADS, c) for c in BOTH),
            _multiply(),
            _tell(),
            *(_compute(i, c) for c in BOTH for i in HALVES),
            *(reduce_role(THERE * c) for c in BOTH),
        ),
        rings=tuple(ring for c in BOTH for ring in _rings(table, config, itemsize, c)),
        barriers=tuple(barrier for c in BOTH for barrier in table.named_barriers(c)),
        staging="none",
        mbarriers=tuple(barrier for c in BOTH for barrier in (*table.barriers(c), freed(c))),
        overlaps=tuple((at(a, c), at(b, c)) for c in BOTH for a, b in columns.overlaps),
        by_warp=tuple(at(name, c) for c in BOTH for name in (*columns.names, *_shared_ds())),
        places=tuple((*table.places(c), freed(c).name) for c in BOTH),
    )


def _shared_ds() -> tuple[str, ...]:
    """Names of the parts of dS of a CTA's queries in shared memory, by the warpgroup and the CTA that make it
    of their keys."""
    return tuple(f"shared dS {i} of {c}" for i in HALVES for c in BOTH)


def _rings(table: BarrierTable, config: Config, itemsize: int, cta: int) -> tuple[Ring, ...]:
    d, dv = config.head_dim, config.head_dim_v
    rings = (
        tiles(table, "k", ROWS, d, itemsize),
        tiles(table, "v", ROWS, dv, itemsize),
        tiles(table, "k_t", CTAS * ROWS, d // CTAS, itemsize),
        tiles(table, "q", KEPT, d, itemsize),
        tiles(table, "q_t", ROWS, d // CTAS, itemsize),
        tiles(table, "dout", KEPT, dv, itemsize),
        tiles(table, "dout_t", ROWS, dv // CTAS, itemsize),
        numbers(table, "lse2"),
        numbers(table, "delta"),
    )
    shared = {ring.name: ring.name for ring in rings if cta and ring.name not in ("lse2", "delta")}
    return tuple(replace(ring, name=at(ring.name, cta), full_of=shared.get(ring.name, "")) for ring in rings)


# --- products ------------------------------------------------------------------------------------------


def _multiply() -> Role:
    begin = _scores(0, *_both("wait", "k", True)), _dprob(0, *_both("wait", "v", True)), _probabilities(0)
    middle = (
        (Event("await", "dq_empty", -2),),
        _scores(0),
        _dk(-1),
        _dprob(0),
        _probabilities(0),
        _dq(-1),
        _dv(0),
    )
    end = (
        _both("commit", "dv_full", True),
        _dk(0),
        _both("commit", "dk_full", True),
        (Event("await", "dq_empty", -1),),
        _dq(0),
    )
    first, body, last = (
        tuple(event for part in parts for event in part)
        for parts in ((*begin, _dv(0), _both("wait", "k_t", True)), middle, end)
    )
    opening = (Event("sync", "allocated"),)
    return Role(
        "multiply", 1, opening, first=first, body=body, last=last, products=_products(), warp=MULTIPLY
    )


def _products() -> tuple[Product, ...]:
    """Each CTA's part of a product by itself: its own first operand, and a half of the second from both."""

    def parts(name: str) -> list[str]:
        return [f"{name} {i} {part}" for i in HALVES for part in BOTH]

    def second(name: str, once: bool = False) -> Events:
        return _both("read", name, once)

    def square(name: str, keys: str, queries: str, c: int) -> list[Product]:
        reads = once("read", at(keys, c)), *second(queries)
        return [Product(at(one, c), reads, Event("write", at(one, c)), engine=CORE) for one in parts(name)]

    def sums(name: str, first: str, queries: str, c: int) -> Product:
        reads = (*(Event("read", at(one, c)) for one in parts(first)), *second(queries))
        return Product(at(name, c), reads, Event("update", at(name, c)), fresh=True, engine=CORE)

    found: list[Product] = []
    for c in BOTH:
        ds = (*(Event("read", at(name, c)) for name in _shared_ds()), *second("k_t", True))
        found += [
            *square("S", "k", "q", c),
            *square("dP", "v", "dout", c),
            sums("dV", "P", "dout_t", c),
            sums("dK", "dS", "q_t", c),
            Product(at("dQ", c), ds, Event("write", at("dQ", c)), engine=CORE),
        ]
    return tuple(found)


def _both(action: Action, name: str, once: bool = False, tile: int = 0) -> Events:
    """In both CTAs."""
    return tuple(Event(action, at(name, c), tile, "work" if once else "key") for c in BOTH)


def _issue(name: str, tile: int) -> Events:
    return tuple(Event("issue", at(f"{name} {i} {p}", c), tile) for c, i, p in product(BOTH, HALVES, BOTH))


def _square(name: str, queries: str, full: str, tile: int) -> Events:
    return (
        *_both("wait", queries, tile=tile),
        *_issue(name, tile),
        *_both("commit", full, tile=tile),
        *_both("commit", queries, tile=tile),
    )


def _scores(tile: int, *before: Event) -> Events:
    return *before, *_square("S", "q", "s_full", tile)


def _dprob(tile: int, *before: Event) -> Events:
    return *before, *_square("dP", "dout", "dp_full", tile)


def _probabilities(tile: int) -> Events:
    return (Event("await", "p_full", tile),)


def _sum(name: str, queries: str, tile: int) -> Events:
    names = (("wait", queries), ("issue", name), ("commit", queries))
    return tuple(event for action, of in names for event in _both(action, of, tile=tile))  # type: ignore[arg-type]


def _dv(tile: int) -> Events:
    return _sum("dV", "dout_t", tile)


def _dk(tile: int) -> Events:
    return Event("await", "ds_full", tile), *_sum("dK", "q_t", tile)


def _dq(tile: int) -> Events:
    come = Event("await", "ds_come", tile), Event("await", "ds_there", tile)
    return *come, *_both("issue", "dQ", tile=tile), *_both("commit", "dq_full", tile=tile)


def _tell() -> Role:
    """The second CTA's multiplying warp."""
    step = Event("await", at("ds_come", 1)), Event("arrive", "ds_there")
    opening = (Event("sync", at("allocated", 1)),)
    return Role("tell", 1, opening=opening, first=step, body=step, warp=MULTIPLY, cta=1)


# --- what is made of them --------------------------------------------------------------------------------


def _compute(i: int, c: int) -> Role:
    """A key per thread, so that no warp needs another's numbers. Of its fragments, the other CTA's comes
    first."""

    def here(action: Action, name: str, tile: int = 0) -> Event:
        return Event(action, at(name, c), tile)

    fragments = (1 - c, c)
    before = (
        here("wait", "lse2"),
        here("await", "s_full"),
        here("read", "lse2"),
        *(here("read", f"S {i} {f}") for f in fragments),
        *(here("write", f"P {i} {f}") for f in fragments),
        Event("arrive", "p_full"),
        here("release", "lse2"),
        here("wait", "delta"),
        here("await", "dp_full"),
        here("read", "delta"),
        *(event for f in fragments for event in (here("read", f"dP {i} {f}"), here("write", f"dS {i} {f}"))),
        Event("arrive", "ds_full"),
        here("release", "delta"),
    )
    shared = tuple(
        event
        for to in fragments
        for event in (Event("write", at(f"shared dS {i} of {c}", to)), Event("arrive", at("ds_come", to)))
    )
    sums = tuple(
        event
        for name in ("dv", "dk")
        for event in (once("await", at(f"{name}_full", c)), here("read", f"d{name[1].upper()}"))
    )
    step = (*before, here("await", "dq_full", -1), *shared)
    opening, closing = Event("sync", at("allocated", c)), Event("sync", at("finished", c))
    # A pair allocates and frees together: no CTA has tensor memory before both have, and none frees it before
    # both are done.
    allocate = () if i or c else _both("allocate", WHOLE)
    told = Event("arrive", at("freed", 1 - c)), Event("await", at("freed", c))
    done = tuple(replace(event, per="block", leads=True) for event in told)
    free = () if i else done if c else (*done, *_both("free", WHOLE))
    return Role(
        at(f"compute {i}", c),
        WARPGROUP,
        opening=(*allocate, opening),
        first=step,
        body=step,
        last=sums,
        closing=(closing, *free),
        apart=True,
        warp=COMPUTE + WARPGROUP * i,
        cta=c,
    )
