"""The Hopper backward pipeline of a pair of CTAs, with the barriers of the kernel (roles.py). What
each CTA has is named as it is in the first one, and in the second with THERE behind it. As in topology.py,
steps are tiles of queries; each CTA's consumer warpgroups issue

    S(j) dV(j), dP(j) dQ(j - 1) dK(j)

dS of the other CTA comes through a ring: its warp that exchanges fills it, and a warp of this CTA announces
the bytes; what says that a stage is free lies with the CTA that fills it.

What is not there, and why the simulation finds nothing missing:

no wait for own dS    what expects the other CTA's dS(j) does so when all of this one's is in shared memory.
no dv_empty           dV is staged where columns of the other CTA's keys were, after both warpgroups have met,
                      which the second one does when it has all of dQ.
"""

from __future__ import annotations

from dataclasses import replace

from fa4flex.kernels.bwd_sm90 import roles
from fa4flex.kernels.bwd_sm90.config import KEYS, Config
from fa4flex.kernels.bwd_sm90.topology import once, queries_rings, tiles
from fa4flex.kernels.plan.barriers import BarrierTable
from fa4flex.kernels.plan.memory import tile_bytes
from fa4flex.kernels.plan.pairs import BOTH, at
from fa4flex.kernels.plan.topology import (
    WARPGROUP,
    Action,
    Event,
    Product,
    Ring,
    Role,
    Topology,
)


def pair_topology(config: Config, itemsize: int) -> Topology:
    """Topology of both CTAs of a pair."""
    table = roles.barrier_table(config)
    return Topology(
        roles=tuple(
            role
            for c in BOTH
            for role in (_producer(c), _writer(config, c), _exchange(c), _values(config, c), _keys(config, c))
        ),
        rings=tuple(ring for c in BOTH for ring in _rings(table, config, itemsize, c)),
        barriers=tuple(barrier for c in BOTH for barrier in table.named_barriers(c)),
        staging="none",
        mbarriers=tuple(barrier for c in BOTH for barrier in table.barriers(c)),
        overlaps=tuple(
            (at(a, c), at(b, c))
            for c in BOTH
            for a, b in (("dV rows", "v"), ("dV rows", "k_peer"), ("dK rows", "k"), ("k_peer", "v"))
        ),
        stages=tuple(
            (at(name, c), stages)
            for c in BOTH
            for name, stages in (("dq", config.dq_stages), ("shared dS", roles.SHARES), ("shared P", 1))
        ),
        places=tuple(table.places(c) for c in BOTH),
    )


def _rings(table: BarrierTable, config: Config, itemsize: int, cta: int) -> tuple[Ring, ...]:
    d, dv = config.head_dim, config.head_dim_v
    k, v = config.swizzles.k, config.swizzles.v
    size = tile_bytes(config.tile_m, KEYS, itemsize)
    rings = (
        *queries_rings(table, config, itemsize),
        once(tiles(table, "k", (KEYS, d), k, itemsize), config),
        once(tiles(table, "v", (KEYS, dv), v, itemsize), config),
        once(tiles(table, "k_peer", (KEYS, d // config.ctas), k, itemsize), config),
        table.ring("ds_peer", size, (size,)),
    )
    return tuple(
        replace(
            ring,
            name=at(ring.name, cta),
            beside=tuple((at(name, cta), count) for name, count in ring.beside),
        )
        for ring in rings
    )


# --- roles ---------------------------------------------------------------------------------------------


class _Here:
    """Events of one CTA."""

    def __init__(self, cta: int) -> None:
        self.cta = cta

    def on(self, action: Action, name: str, tile: int = 0) -> Event:
        return Event(action, at(name, self.cta), tile)

    def once(self, action: Action, name: str) -> Event:
        return Event(action, at(name, self.cta), 0, "work")

    def staged(self, action: Action, name: str, tile: int = 0) -> Event:
        return Event(action, at(name, self.cta), tile, staged=True)


def _producer(c: int) -> Role:
    here = _Here(c)
    actions: tuple[Action, ...] = ("acquire", "load")
    step = tuple(here.on(action, name) for name in ("q", "dout") for action in actions)
    keys = (here.once("load", "k"), here.once("load", "v"))
    return Role(at("producer", c), 1, first=(*keys, *step), body=step, empty=keys, warp=roles.PRODUCER, cta=c)


def _writer(config: Config, c: int) -> Role:
    here = _Here(c)
    step = (
        here.staged("take", "dq_full"),
        here.on("store", "dq"),
        here.on("drain", "dq", 0 if config.dq_stages == 1 else -1),
        here.staged("give", "dq_empty", 1),
    )
    return Role(
        at("writer", c),
        1,
        opening=(here.staged("give", "dq_empty"),),
        first=step,
        body=step,
        closing=(here.on("drain", "dq"),),
        warp=roles.WRITER,
        cta=c,
    )


def _exchange(c: int) -> Role:
    here, there = _Here(c), _Here(1 - c)
    keys = (here.once("await", "v_kept"), here.once("load", "k_peer"))
    step = (
        there.on("acquire", "ds_peer"),
        here.on("give", "ds_free"),
        here.on("take", "ds_shared"),
        here.on("announce", "ds_peer"),
        here.on("read", "shared dS"),
        there.on("load", "ds_peer"),
    )
    return Role(at("exchange", c), 1, first=(*keys, *step), body=step, empty=keys, warp=roles.EXCHANGE, cta=c)


def _values(config: Config, c: int) -> Role:
    """S, P and dV."""
    here = _Here(c)
    keys = (replace(here.once("wait", "k"), again=True), *([here.once("read", "k")] * config.keeps_k))
    step = (
        *(here.on("wait", "q"), here.on("wait", "dout")),
        *(here.on("issue", "S"), here.on("finish", "S"), here.on("read", "S of 0")),
        *(here.on("write", "P of 0"), here.on("write", "shared P"), here.on("release", "q")),
        *(here.on("give", "weighed"), here.on("issue", "dV"), here.on("take", "weights_read")),
        *(here.on("finish", "dV"), here.on("release", "dout")),
    )
    scores = (*([here.once("read", "k")] * (not config.keeps_k)), here.on("read", "q"))
    products = (
        Product(at("S", c), scores, here.on("write", "S of 0")),
        Product(
            at("dV", c),
            (here.on("read", "P of 0"), here.on("read", "dout")),
            here.on("update", "dV of 0"),
            fresh=True,
        ),
    )
    left = (
        here.on("sync", "scores"),
        here.once("write", "dV rows"),
        here.on("sync", "stored 0"),
        here.once("read", "dV rows"),
    )
    return Role(
        at("consumer 0", c),
        WARPGROUP,
        first=(*keys, *step),
        body=step,
        last=(here.on("read", "dV of 0"), *left),
        empty=(*keys, here.once("read", "k"), *left),
        products=products,
        warp=roles.CONSUMER,
        cta=c,
    )


def _keys(config: Config, c: int) -> Role:
    """dP, dS, dK and dQ."""
    here = _Here(c)
    there = (here.once("wait", "k"), here.once("wait", "v"))
    kept = (*there, here.once("read", "v"), here.once("arrive", "v_kept"))
    begun = (
        *(here.on("wait", "q"), here.on("wait", "dout"), here.on("issue", "dP"), here.on("finish", "dP")),
        *(here.on("release", "dout"), here.on("take", "weighed"), here.on("read", "shared P")),
        *(here.on("read", "dP of 1"), here.on("write", "dS of 1"), here.on("give", "weights_read")),
        *(here.on("take", "ds_free"), here.on("write", "shared dS"), here.on("give", "ds_shared")),
    )

    def handed(tile: int) -> tuple[Event, ...]:
        return (
            *(here.on("finish", "dQ", tile), here.on("release", "ds_peer", tile)),
            here.staged("take", "dq_empty", tile),
            *(here.on("read", "dQ of 1", tile), here.on("write", "dq", tile)),
            here.staged("give", "dq_full", tile),
        )

    dq = (here.on("wait", "ds_peer", -1), here.on("issue", "dQ", -1))
    first = (*begun, here.on("issue", "dK"), here.once("wait", "k_peer"), here.on("finish", "dK"))
    body = (*begun, *dq, here.on("issue", "dK"), *handed(-1), here.on("finish", "dK"))
    last = (*(replace(event, tile=0) for event in dq), *handed(0))
    left = (
        here.on("sync", "scores"),
        here.once("write", "dK rows"),
        here.on("sync", "stored 1"),
        here.once("read", "dK rows"),
    )
    keys = (here.once("read", "k"), here.once("read", "k_peer"))
    products = (
        Product(at("dP", c), (here.on("read", "dout"),), here.on("write", "dP of 1")),
        Product(
            at("dQ", c),
            (here.on("read", "shared dS"), here.on("read", "ds_peer"), *keys),
            here.on("write", "dQ of 1"),
        ),
        Product(
            at("dK", c),
            (here.on("read", "dS of 1"), here.on("read", "q")),
            here.on("update", "dK of 1"),
            fresh=True,
        ),
    )
    return Role(
        at("consumer 1", c),
        WARPGROUP,
        first=(*kept, *first, here.on("release", "q")),
        body=(*body, here.on("release", "q")),
        last=(*last, here.on("read", "dK of 1"), *left),
        empty=(*kept, here.once("wait", "k_peer"), *keys, *left),
        products=products,
        warp=roles.CONSUMER + WARPGROUP,
        cta=c,
    )
