"""The Hopper backward pipeline, with the barriers of the kernel (roles.py).

What plans call key tiles are here the steps j of a tile of keys: a tile of queries each. A producer warp
brings K and V once, and for each step Q and dO with their rows' numbers. Two consumer warpgroups, each by its
own products, which are executed in the order of their issue:

    S(j) dP(j) dV(j) dQ(j) dK(j)          where warpgroups have keys of their own
    S(j) dP(j) dV(j) dK(j) dQ(j)          where they share out columns
    S(j) dV(j) dQ(j), dP(j) dQ(j) dK(j)   where they share out products

A writer warp adds up dQ in global memory: consumers hand it over through `dq`, by named barriers. Where sums
are cleared by other blocks (clearing.py), another warp does that, and takes no part in the steps.

What is not there, and why the simulation finds nothing missing:

no ds_empty     dS(j + 2) takes the stage of dS(j) after all warpgroups have met for dS(j + 1), and each came
                there when its own dQ(j) was done.
no p_empty      where products are shared out: P(j + 1) is written after all have met for dS(j), which is made
                of what was read of P(j).
no dv_empty     the next tile's dV is staged after a `dq_empty` that the writer gives when it has read all of
                dQ; what it was staged over is stored by the warpgroup that writes there next. dK is staged
                where dS was, once all warpgroups have met; and met again, when it was read, before dS.
"""

from __future__ import annotations

from dataclasses import replace

from fa4flex.kernels.bwd_sm90 import roles
from fa4flex.kernels.bwd_sm90.config import Config
from fa4flex.kernels.plan.barriers import BarrierTable
from fa4flex.kernels.plan.memory import NUMBER, tile_bytes
from fa4flex.kernels.plan.topology import (
    RECEIVE,
    WARPGROUP,
    Action,
    Event,
    Events,
    Product,
    Ring,
    Role,
    Topology,
)


def backward_topology(config: Config, itemsize: int, copies: bool) -> Topology:
    """The pipeline of a block. `copies`: the writer copies dS to gradients of captured tensors."""
    n = config.consumers
    names = range(n)
    table = roles.barrier_table(config)
    next_tile = table.ring("next", NUMBER)
    return Topology(
        roles=(
            _producer(config),
            _writer(config, copies),
            *(_clearer(config),) * config.clears,
            *(_consumer(config, w) for w in names),
        ),
        rings=(*_rings(table, config, itemsize), *[next_tile] * config.persistent),
        barriers=table.named_barriers(),
        staging="own" if config.persistent else "none",
        mbarriers=table.barriers(),
        overlaps=tuple(_overlaps(config)),
        stages=tuple((f"{name} {w}", stages) for name, stages in _stages(config) for w in names),
        places=(table.places(),),
    )


def _stages(config: Config) -> tuple[tuple[str, int], ...]:
    """Stages of each warpgroup's memory."""
    shown = 1 if config.split == "products" else roles.SHARES
    return ("dq", config.dq_stages), ("shared dS", roles.SHARES), ("shared P", shown)


def _rings(table: BarrierTable, config: Config, itemsize: int) -> tuple[Ring, ...]:
    """K and V of persistent blocks share an empty barrier."""
    n, d, dv = config.tile_n, config.head_dim, config.head_dim_v
    k, v = config.swizzles.k, config.swizzles.v
    return (
        *queries_rings(table, config, itemsize),
        once(tiles(table, "k", (n, d), k, itemsize), config),
        once(tiles(table, "v", (n, dv), v, itemsize), config),
    )


def queries_rings(table: BarrierTable, config: Config, itemsize: int) -> tuple[Ring, ...]:
    """Rings of Q and dO; rows' numbers come with the tiles that need them."""
    m, d, dv = config.tile_m, config.head_dim, config.head_dim_v
    q, dout = config.swizzles.q, config.swizzles.dout
    numbers = NUMBER * m

    def ring(name: str, beside: str, width: int, block: int) -> Ring:
        found = tiles(table, name, (m, width), block, itemsize)
        copies = (*found.copies, numbers)
        return replace(found, copies=copies, transaction_bytes=sum(copies), beside=((beside, numbers),))

    return ring("q", "lse2", d, q), ring("dout", "delta", dv, dout)


def tiles(table: BarrierTable, name: str, tile: tuple[int, int], block: int, itemsize: int) -> Ring:
    """Ring of tiles of so many rows and columns. A TMA box holds the columns of all rows that a swizzle
    spans."""
    rows, width = tile
    copies = (tile_bytes(rows, block, itemsize),) * (width // block)
    return table.ring(name, sum(copies), copies)


def once(ring: Ring, config: Config) -> Ring:
    """Ring of what comes once per tile of keys."""
    return replace(ring, once=False, freed_by="keys_empty") if config.persistent else ring


def _overlaps(config: Config) -> list[tuple[str, str]]:
    """dK and dV are staged where K and V were; or where dS and dQ were; or where dQ was, of which there may
    be one stage."""
    found: list[tuple[str, str]] = []
    for w in range(config.consumers):
        rows = [f"{name} rows {w}" for name in _sums(config, w)]
        if config.dk_by_ds:
            found += [(rows[0], f"shared dS {i}") for i in range(config.consumers)]
            found.append((rows[1], f"dq {w}"))
            continue
        over = {"dK": "k", "dV": "v"}
        found += [(x, f"dq {w}" if config.persistent else over[x[:2]]) for x in rows]
        if _leave_apart(config):
            found.append((rows[0], rows[1]))
    return found


def _sums(config: Config, w: int) -> tuple[str, ...]:
    """Sums that a warpgroup has."""
    return ("dV", "dK")[w : w + 1] if config.split == "products" else ("dK", "dV")


def _leave_apart(config: Config) -> bool:
    """True if a warpgroup's dK and dV leave through the same memory, one after the other."""
    one = config.dq_stages == 1 and not config.dk_by_ds
    return config.persistent and one and config.split != "products"


def _work(action: Action, target: str, tile: int = 0) -> Event:
    """Once per tile of keys."""
    return Event(action, target, tile, "work")


def _staged(action: Action, name: str, tile: int = 0) -> Event:
    return Event(action, name, tile, staged=True)


def _all_read(config: Config, w: int) -> Event:
    """Event that says, after a tile's last step, that all of dQ has been read: the last step's own stage; or
    a barrier beside the one of the only stage, which is for the next step."""
    if config.persistent and config.dq_stages == 1:
        return Event("take", f"dq_read {w}")
    return _staged("take", f"dq_empty {w}")


# --- roles ---------------------------------------------------------------------------------------------


def _producer(config: Config) -> Role:
    persistent = config.persistent
    before = (_work("await", "keys_empty", -1),) * persistent
    keys = (*before, _work("load", "k"), _work("load", "v"))
    # Of persistent blocks, the first tiles of Q and dO do not wait until K and V may be overwritten.
    publish = tuple(_work(action, "next", config.takes_first) for action in ("acquire", "fill")) * persistent
    opening = tuple(replace(event, tile=0) for event in publish) * config.takes_first
    step = tuple(Event(action, name) for name in ("q", "dout") for action in ("acquire", "load"))
    empty = (*keys, *publish)
    first = (*step, *keys) if persistent else (*keys, *step)
    return Role("producer", 1, opening, first, step, publish, empty=empty, warp=roles.PRODUCER)


def _writer(config: Config, copies: bool) -> Role:
    """Gives a stage of dQ for the next step when what was added from it has been read, and dS too, which is
    written anew two steps on."""
    names = range(config.consumers)
    last = config.consumers - 1
    step: list[Event] = []
    for w in names:
        step.append(_staged("take", f"dq_full {w}"))
        if copies and w == 0:
            step += [Event("store", f"shared dS {i}") for i in names]
        step.append(Event("store", f"dq {w}"))
    for w in names:
        read = Event("drain", f"dq {w}")
        if config.dq_stages > 1:
            read = Event("drain", f"shared dS {last}") if copies else Event("drain", f"dq {last}", -1)
        step += [read, _staged("give", f"dq_empty {w}", 1)]
    all_read = Event("drain", f"dq {last}")
    begun, received = _received(config)
    given = tuple(replace(_all_read(config, w), action="give") for w in names)
    return Role(
        "writer",
        1,
        opening=(*(_staged("give", f"dq_empty {w}") for w in names), *begun),
        first=tuple(step),
        body=tuple(step),
        last=(all_read, *given, *received) if config.persistent else (),
        closing=() if config.persistent else (all_read,),
        empty=received,
        warp=roles.WRITER,
    )


def _clearer(config: Config) -> Role:
    """Clears sums that other blocks add to, once for a tile of keys."""
    begun, received = _received(config)
    return Role("clearer", 1, opening=begun, last=received, empty=received, warp=roles.CLEARER)


def _received(config: Config) -> tuple[Events, Events]:
    """Events by which a warp learns its first tile of keys, and each following one. All come from the counter
    where tiles wait for earlier ones; else the first one is the block's own number."""
    if not config.persistent:
        return (), ()
    begun = tuple(_work(action, "next") for action in RECEIVE) * config.takes_first
    return begun, tuple(_work(action, "next", config.takes_first) for action in RECEIVE)


def _consumer(config: Config, w: int) -> Role:
    """Without steps, K and V come for nothing, and zeros are stored."""
    waited = ("k", "v")[: 1 if config.split == "products" and w == 0 else 2]
    keys = tuple(replace(_work("wait", name), again=True) for name in waited)
    keys += tuple(_work("read", name) for name in _kept(config, w))
    step = _STEPS[config.split](config, w)
    sums = tuple(Event("read", f"{name} of {w}") for name in _sums(config, w))
    unused = tuple(_work("read", name) for name in waited)
    done = (_work("arrive", "keys_empty"),) * config.persistent
    begun, following = _received(config)
    met: Events = (Event("sync", "scores"),)
    names = (_sums(config, w) if config.dk_by_ds else _sums(config, w)[-1:]) * config.persistent
    left = tuple(_work("drain", f"{name} rows {w}") for name in names)
    read = (*(replace(event, tile=-1) for event in left), *met * config.dk_by_ds)
    free, kept = met, met
    if config.dk_by_ds:
        kept = ()
    elif config.persistent:
        free, kept = (_all_read(config, w),), (Event("sync", f"stored {w}"),)
    return Role(
        f"consumer {w}",
        WARPGROUP,
        opening=begun,
        first=(*keys, *read, *step),
        body=step,
        last=(*done, *sums, *free, *_store(config, w, True), *following),
        closing=left,
        empty=(*keys, *read, *unused, *done, *kept, *_store(config, w, False), *following),
        products=_products(config, w),
        warp=roles.CONSUMER + WARPGROUP * w,
    )


def _scores(config: Config, w: int) -> Events:
    return (
        Event("wait", "q"),
        Event("wait", "dout"),
        *(Event("issue", "S"), Event("issue", "dP"), Event("finish", "S"), Event("finish", "dP")),
        *(Event("read", f"S of {w}"), Event("read", f"dP of {w}")),
    )


def _by_keys(config: Config, w: int) -> Events:
    """P' and dS' are operands in the registers in which they were made."""
    return (
        *_scores(config, w),
        *(Event("write", f"P of {w}"), Event("write", f"dS of {w}"), Event("write", f"shared dS {w}")),
        *(Event("issue", "dV"), Event("sync", "scores"), Event("issue", "dQ")),
        *(Event("finish", "dV"), Event("release", "dout")),
        *(Event("issue", "dK"), Event("finish", "dQ"), *_hand_over(w)),
        *(Event("finish", "dK"), Event("release", "q")),
    )


def _by_columns(config: Config, w: int) -> Events:
    """All columns need P' and dS' of all queries."""
    return (
        *_scores(config, w),
        *(Event("write", f"shared P {w}"), Event("write", f"shared dS {w}"), Event("sync", "scores")),
        *(Event("issue", "dV"), Event("issue", "dK"), Event("issue", "dQ")),
        *(Event("finish", "dV"), Event("release", "dout")),
        *(Event("finish", "dK"), Event("release", "q"), Event("finish", "dQ"), *_hand_over(w)),
    )


def _by_products(config: Config, w: int) -> Events:
    """The first warpgroup shows P', weighed by slopes, for the dS' of the other."""
    there = Event("wait", "q"), Event("wait", "dout")
    if w == 0:
        return (
            *(*there, Event("issue", "S"), Event("finish", "S"), Event("read", "S of 0")),
            *(Event("write", "P of 0"), Event("write", "shared P 0"), Event("release", "q")),
            *(Event("give", "weighed"), Event("issue", "dV"), Event("sync", "scores"), Event("issue", "dQ")),
            *(Event("finish", "dV"), Event("release", "dout"), Event("finish", "dQ"), *_hand_over(0)),
        )
    return (
        *(*there, Event("issue", "dP"), Event("finish", "dP"), Event("release", "dout")),
        *(Event("take", "weighed"), Event("read", "shared P 0"), Event("read", "dP of 1")),
        *(Event("write", "dS of 1"), Event("write", "shared dS 1"), Event("sync", "scores")),
        *(Event("issue", "dQ"), Event("issue", "dK"), Event("finish", "dQ"), *_hand_over(1)),
        *(Event("finish", "dK"), Event("release", "q")),
    )


_STEPS = {"keys": _by_keys, "columns": _by_columns, "products": _by_products}


def _kept(config: Config, w: int) -> tuple[str, ...]:
    """Rings that a warpgroup reads into registers once, and no product reads for its scores."""
    if config.split != "products":
        return ()
    return ("v",) if w else ("k",) * config.keeps_k


def _hand_over(w: int) -> Events:
    return (
        _staged("take", f"dq_empty {w}"),
        *(Event("read", f"dQ of {w}"), Event("write", f"dq {w}")),
        _staged("give", f"dq_full {w}"),
    )


def _products(config: Config, w: int) -> tuple[Product, ...]:
    names, keys, values = range(config.consumers), _work("read", "k"), _work("read", "v")
    queries, dout = Event("read", "q"), Event("read", "dout")
    shared = tuple(Event("read", f"shared dS {i}") for i in names)
    kept = _kept(config, w)
    p: Events = (Event("read", f"P of {w}"),)
    ds: Events = (Event("read", f"dS of {w}"),)
    if config.split == "columns":
        p, ds = tuple(Event("read", f"shared P {i}") for i in names), shared
    if config.split == "products":
        shared = (Event("read", "shared dS 1"),)
    found = (
        Product("S", (*(keys,) * ("k" not in kept), queries), Event("write", f"S of {w}")),
        Product("dP", (*(values,) * ("v" not in kept), dout), Event("write", f"dP of {w}")),
        Product("dV", (*p, dout), Event("update", f"dV of {w}"), fresh=True),
        Product("dK", (*ds, queries), Event("update", f"dK of {w}"), fresh=True),
        Product("dQ", (*shared, keys), Event("write", f"dQ of {w}")),
    )
    issued = {event.target for event in _STEPS[config.split](config, w) if event.action == "issue"}
    return tuple(product for product in found if product.name in issued)


def _store(config: Config, w: int, stepped: bool) -> Events:
    """dK and dV leave by the copy engine, or by threads, together or one after the other; by the memory of dQ
    when all of it has been read, if it was written, as `stepped` says."""
    leave: Action = "store" if config.persistent else "read"
    there = Event("sync", f"stored {w}")

    def batch(*names: str) -> Events:
        rows = [f"{name} rows {w}" for name in names]
        return *(_work("write", x) for x in rows), there, *(_work(leave, x) for x in rows)

    if config.dk_by_ds:
        return *batch("dK"), *(_all_read(config, w),) * stepped, *batch("dV")
    if not _leave_apart(config):
        return batch(*_sums(config, w))
    return *batch("dK"), _work("drain", f"dK rows {w}"), there, *batch("dV")
