"""The Hopper forward pipeline.

A producer warp copies tiles by TMA; consumer warpgroups multiply, take the softmax and store (warp
specialisation: Shah et al. 2024, FlashAttention-3, section 3.1). The scores of key tile j are multiplied
before the values of tile j - 1, so that the softmax of one runs under the product of the other (its section
3.2, two-stage pipelining); with `pingpong` consumers take turns at issuing products, so that the softmax of
one runs under the products of another (its section 3.1).

Where blocks take tiles of queries from a counter, the producer asks for the next one, finds its head and its
sequence, and hands all of it to the consumers through a ring of one stage: it writes the tile behind the last
values, every consumer warp reads it when its output has left. No copy brings it, so its full barrier counts
an arrival and no bytes.

Keys in pages come in many small copies, which take a warp long to issue: there a second warp brings the
values, and reads the next tile like a consumer. Where pages are of few keys, four warps copy rows,
each a quarter of every tile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from fa4flex.kernels.fwd_sm90.config import HANDED
from fa4flex.kernels.fwd_sm90.roles import WRITTEN, barrier_table
from fa4flex.kernels.fwd_sm90.tiles import Tiles
from fa4flex.kernels.plan.barriers import BarrierTable
from fa4flex.kernels.plan.memory import NUMBER, column_block
from fa4flex.kernels.plan.paging import Boxes, Producing
from fa4flex.kernels.plan.topology import (
    RECEIVE,
    WARPGROUP,
    Event,
    Events,
    Per,
    Product,
    Ring,
    Role,
    Staging,
    Topology,
)


def forward_topology(
    tiles: Tiles,
    kv_stages: int,
    pingpong: bool,
    staging: Staging,
    dynamic: bool = False,
    boxes: Boxes | None = None,
    producing: Producing = "alone",
) -> Topology:
    """The pipeline of a forward kernel with its producers and `tiles.consumers` consumers; with `dynamic`,
    the next tile is handed over. Tiles of K and V are brought in `boxes`, if given."""
    n = tiles.consumers
    pingpong = pingpong and n > 1
    table = barrier_table(tiles, kv_stages, dynamic, pingpong, producing)
    early = staging == "own" or boxes is not None
    clears = staging == "none" and not tiles.transposed
    turns = [_turns(i, n) if pingpong else _NO_TURNS for i in range(n)]
    consumers = tuple(_consumer(i, turns[i], staging, early, clears) for i in range(n))
    producer, *others = _PRODUCERS[producing](n)
    gathering = producing == "gathering"
    k_box, v_box = boxes.shapes((tiles.head_dim, tiles.head_dim_v)) if boxes else (None, None)
    rings = (
        *(copied(table, "q", (tiles.tile_m // n, tiles.head_dim), tiles.itemsize, unit=i) for i in range(n)),
        copied(table, "k", (tiles.tile_n, tiles.head_dim), tiles.itemsize, k_box),
        copied(table, "v", tiles.values, tiles.v_itemsize, v_box),
    )
    if dynamic:
        rings = (*rings, table.ring("next", NUMBER * HANDED))
        producer, consumers, others = publishing(producer), receiving(consumers), [*receiving(others)]
    overlaps = tuple((f"q {i}", f"out {i}") for i in range(n) if staging == "queries")
    meet = clears or staging != "none"
    return Topology(
        (producer, *others, *consumers),
        rings,
        tuple(x for x in table.named_barriers() if meet or not x.name.startswith(WRITTEN.name)),
        staging,
        overlaps=overlaps,
        by_warp=("k", "v") if gathering else (),
        places=(table.places(),),
    )


def publishing(role: Role) -> Role:
    """The role, which hands over the next tile of queries."""
    publish = Event("acquire", "next", per="work"), Event("fill", "next", per="work")
    return replace(role, last=role.last + publish)


def receiving(roles: Iterable[Role]) -> tuple[Role, ...]:
    """The roles, which receive it."""
    received = tuple(Event(action, "next", per="work") for action in RECEIVE)
    return tuple(replace(role, last=role.last + received) for role in roles)


def copied(
    table: BarrierTable,
    name: str,
    tile: tuple[int, int],
    size: int,
    box: tuple[int, int] | None = None,
    unit: int | None = None,
) -> Ring:
    """The ring of tiles (rows, columns). `size`: bytes of an element. A TMA copy brings a block of columns of
    all rows, or a `box` of rows and columns; or warps gather rows."""
    rows, width = tile
    box_rows, columns = box or (rows, column_block(width, size))
    copies = (box_rows * columns * size,) * (width // columns * (rows // box_rows))
    gathered = table[f"{name}_full"].lanes > 1
    return table.ring(name, rows * width * size, () if gathered else copies, unit)


def _copy(name: str, tile: int = 0) -> Events:
    per: Per = "key" if name in ("k", "v") else "work"
    return Event("acquire", name, tile, per), Event("load", name, tile, per)


def copying(consumers: int) -> Role:
    """Role of the producer, which copies in the order in which consumers ask. Values take the same course
    through their ring as keys, one tile behind: K of a tile goes before V of the last one."""
    queries = tuple(event for i in range(consumers) for event in _copy(f"q {i}"))
    return Role("producer", 1, (), _copy("k") + queries, _copy("k") + _copy("v", -1), _copy("v"))


def _apart(consumers: int) -> tuple[Role, Role]:
    """Keys and queries by one warp, values by the next."""
    queries = tuple(event for i in range(consumers) for event in _copy(f"q {i}"))
    return (
        Role("producer", 1, (), _copy("k") + queries, _copy("k")),
        Role("producer of values", 1, (), _copy("v"), _copy("v"), warp=1),
    )


def _gathering(consumers: int) -> tuple[Role, Role]:
    """Rows of keys and values by four warps, a quarter of each tile by each; queries by the first."""
    keys, before, last = (
        (Event("acquire", name, tile), Event("fill", name, tile))
        for name, tile in (("k", 0), ("v", -1), ("v", 0))
    )
    queries = tuple(event for i in range(consumers) for event in _copy(f"q {i}"))
    return (
        Role("producer", 1, (), keys + queries, keys + before, last, apart=True),
        Role("producer of rows", 3, (), keys, keys + before, last, apart=True, warp=1, part=1),
    )


_PRODUCERS: dict[Producing, Callable[[int], tuple[Role, ...]]] = {
    "alone": lambda consumers: (copying(consumers),),
    "apart": _apart,
    "gathering": _gathering,
}


def _turns(i: int, n: int) -> tuple[Events, Events, Events]:
    """(at the start, before products, after products): the first consumer gives itself the first turn."""
    take, give = (Event("take", f"turn {i}"),), (Event("give", f"turn {(i + 1) % n}"),)
    return (Event("give", "turn 0"),) if i == 0 else (), take, give


_NO_TURNS: tuple[Events, Events, Events] = ((), (), ())


def _consumer(
    i: int, turns: tuple[Events, Events, Events], staging: Staging, early: bool, clears: bool
) -> Role:
    """Consumer i. A turn covers both products: S_j goes first, so that its softmax runs under O_j-1. Queries
    are free after the last scores (`early`), or when the output has left. `clears`: values may have an end
    within a tile."""
    opening, take, give = turns
    wait, scores = (Event("wait", "k"),), (Event("issue", "S"),)
    clear = clearing(i) if clears else ()
    softmax = Event("finish", "S"), Event("release", "k"), Event("softmax", f"S of {i}")
    (start, end), (start_before, end_before) = values(clears), values(clears, -1)
    free, store = (Event("release", f"q {i}", per="work"),), (Event("read", f"O of {i}"), *_store(i, staging))
    return Role(
        f"consumer {i}",
        warps=WARPGROUP,
        opening=opening,
        first=(Event("wait", f"q {i}", per="work"), *wait, *scores, *softmax, *clear),
        body=(*wait, *take, *scores, *start_before, *give, *softmax, *end_before, *clear),
        last=(*free, *start, *end, *store) if early else (*start, *end, *store, *free),
        closing=() if staging == "none" else (Event("drain", f"out {i}", per="work"),),
        products=_products(i),
        warp=WARPGROUP * (i + 1),
    )


def _products(i: int) -> tuple[Product, ...]:
    """S = q k' and O += P v, in consumer i's registers, where P is too."""
    queries, keys, values = Event("read", f"q {i}", per="work"), Event("read", "k"), Event("read", "v")
    return (
        Product("S", (queries, keys), Event("write", f"S of {i}")),
        Product("O", (values,), Event("update", f"O of {i}"), fresh=True),
    )


def values(clears: bool, tile: int = 0) -> tuple[Events, Events]:
    """O += P v of a key tile: what starts it, and what ends it. Who has cleared values asks again for
    them."""
    start = Event("wait", "v", tile, again=clears), Event("issue", "O", tile)
    return start, (Event("finish", "O", tile), Event("release", "v", tile))


def clearing(i: int) -> Events:
    """Consumer i's warps clear the values past the end of a sequence, as soon as they are there, and meet;
    others write the same zeros there."""
    return Event("wait", "v", maybe=True), Event("sync", f"rows {i}", maybe=True)


def _store(i: int, staging: Staging) -> Events:
    """Registers to shared memory, and from there by TMA. Nobody writes where the last store still reads, or
    another warp's product its queries."""
    gather, drain = Event("sync", f"rows {i}"), Event("drain", f"out {i}", per="work")
    write, store = Event("write", f"out {i}", per="work"), Event("store", f"out {i}", per="work")
    if staging == "none":
        return ()
    if staging == "own":
        return replace(drain, tile=-1), gather, write, gather, store
    return gather, write, gather, store, drain, gather
