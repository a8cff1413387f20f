"""The Hopper pipeline of attention and its tangents.

It has the barriers of the forward kernel: a stage of a ring holds a tile and its tangent, whose bytes one
barrier counts. A turn at the tensor cores covers the values of one key tile and the scores of the next.
"""

from __future__ import annotations

from dataclasses import replace

from fa4flex.kernels.fwd_sm90.config import HANDED
from fa4flex.kernels.fwd_sm90.roles import WRITTEN, barrier_table
from fa4flex.kernels.fwd_sm90.tiles import Tiles
from fa4flex.kernels.fwd_sm90.topology import clearing, values
from fa4flex.kernels.plan.barriers import BarrierTable
from fa4flex.kernels.plan.memory import NUMBER, column_block
from fa4flex.kernels.plan.topology import (
    RECEIVE,
    WARPGROUP,
    Event,
    Events,
    Per,
    Product,
    Ring,
    Role,
    Topology,
)


def tangent_topology(
    tiles: Tiles, kv_stages: int, moved: tuple[str, ...], dynamic: bool, clears: bool
) -> Topology:
    """The pipeline of a kernel with one producer and `tiles.consumers` consumers. moved: which of q, k and v
    have tangents; `dynamic`: the next tile is handed over; `clears`: values past the end of a sequence are
    cleared."""
    n = tiles.consumers
    table = barrier_table(tiles, kv_stages, dynamic, pingpong=n > 1)
    rings = (
        *(_ring(table, "q", (tiles.tile_m // n, tiles.head_dim), moved, i) for i in range(n)),
        _ring(table, "k", (tiles.tile_n, tiles.head_dim), moved),
        _ring(table, "v", (tiles.tile_n, tiles.head_dim_v), moved),
    )
    publish: Events = ()
    received: Events = ()
    if dynamic:
        rings = (*rings, table.ring("next", NUMBER * HANDED))
        publish = Event("acquire", "next", per="work"), Event("fill", "next", per="work")
        received = tuple(Event(action, "next", per="work") for action in RECEIVE)
    return Topology(
        (_producer(n, publish), *(_consumer(i, n, moved, clears, received) for i in range(n))),
        rings,
        tuple(one for one in table.named_barriers() if clears or not one.name.startswith(WRITTEN.name)),
        "none",
        places=(table.places(),),
    )


def _ring(
    table: BarrierTable, name: str, tile: tuple[int, int], moved: tuple[str, ...], unit: int | None = None
) -> Ring:
    """16-bit elements. A TMA copy brings a block of columns of all rows."""
    rows, width = tile
    count, size, block = 1 + (name in moved), rows * width * 2, column_block(width)
    ring = table.ring(name, size, (rows * block * 2,) * (width // block * count), unit)
    return replace(ring, beside=((f"t{name}", size),)) if name in moved else ring


def _copy(name: str, tile: int = 0) -> Events:
    """A stage's copies, of a tile and of its tangent."""
    per: Per = "key" if name in ("k", "v") else "work"
    return Event("acquire", name, tile, per), Event("load", name, tile, per)


def _producer(consumers: int, publish: Events) -> Role:
    """Copies in the order in which consumers ask."""
    queries = tuple(event for i in range(consumers) for event in _copy(f"q {i}"))
    first, last = _copy("k"), _copy("v")
    return Role("producer", 1, (), first + queries, first + _copy("v", -1), last + publish)


def _consumer(i: int, n: int, moved: tuple[str, ...], clears: bool, received: Events) -> Role:
    """Consumer i. Both products of a step are of all that is multiplied: scores and their tangents, the
    output and its own. Values and their tangents are cleared one after the other."""
    take: Events = (Event("take", f"turn {i}"),) if n > 1 else ()
    give: Events = (Event("give", f"turn {(i + 1) % n}"),) if n > 1 else ()
    opening: Events = (Event("give", "turn 0"),) if n > 1 and i == 0 else ()
    clear = clearing(i) + clearing(i)[-1:] * ("v" in moved) if clears else ()
    (start, end), (start_before, end_before) = values(clears), values(clears, -1)
    wait, issue = (Event("wait", "k"),), (Event("issue", "S"),)
    softmax = Event("finish", "S"), Event("release", "k"), Event("softmax", f"S of {i}")
    (wait_before, multiply_before), (finish_before, free_before) = start_before, end_before
    turn = *take, multiply_before, finish_before, *issue, *give
    output = Event("release", f"q {i}", per="work"), *start, *end, Event("read", f"O of {i}")
    queries, keys, of_values = Event("read", f"q {i}", per="work"), Event("read", "k"), Event("read", "v")
    return Role(
        f"consumer {i}",
        warps=WARPGROUP,
        opening=opening,
        first=(Event("wait", f"q {i}", per="work"), *wait, *take, *issue, *give, *softmax, *clear),
        body=(*wait, wait_before, *turn, free_before, *softmax, *clear),
        last=(*output, *received),
        products=(
            Product("S", (queries, keys), Event("write", f"S of {i}")),
            Product("O", (of_values,), Event("update", f"O of {i}"), fresh=True),
        ),
        warp=WARPGROUP * (i + 1),
    )
