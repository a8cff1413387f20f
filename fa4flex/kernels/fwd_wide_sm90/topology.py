"""The Hopper forward pipeline for wide heads.

A producer warp copies tiles by TMA, as in the forward pipeline. Two warpgroups have the same 64 rows, and
share out a tile's keys and the output's columns: each has the scores of half of the keys, and half of the
columns, as the registers of one have room for no more. So all probabilities go through shared memory, in
two buffers; and warpgroups tell each other the maxima of their keys, so that all of a tile is relative to the
same ones. Each product is made once (docs/notes/wide_heads.md has the count).

The scores of key tile j are multiplied before the values of tile j - 1, so that the softmax of one runs under
the product of the other (Shah et al. 2024, FlashAttention-3, section 3.2).
"""

from __future__ import annotations

from fa4flex.kernels.fwd_sm90.config import HANDED
from fa4flex.kernels.fwd_sm90.roles import WRITTEN
from fa4flex.kernels.fwd_sm90.tiles import Tiles
from fa4flex.kernels.fwd_sm90.topology import clearing, copied, copying, publishing, receiving
from fa4flex.kernels.fwd_wide_sm90.config import BUFFERS, HALVES
from fa4flex.kernels.fwd_wide_sm90.roles import barrier_table
from fa4flex.kernels.plan.memory import NUMBER, column_block
from fa4flex.kernels.plan.topology import WARPGROUP, Event, Events, Product, Ring, Role, Topology


def wide_topology(tiles: Tiles, kv_stages: int, dynamic: bool, clears: bool) -> Topology:
    """The pipeline with these tiles. dynamic: the next tile is handed over; clears: values may have an end
    within a tile."""
    table = barrier_table(tiles, kv_stages, dynamic)
    producer, consumers = copying(1), tuple(_consumer(unit, clears) for unit in range(HALVES))
    box = tiles.tile_n, column_block(tiles.head_dim_v // HALVES)
    rings: tuple[Ring, ...] = (
        copied(table, "q", (tiles.tile_m, tiles.head_dim), tiles.itemsize, unit=0),
        copied(table, "k", (tiles.tile_n, tiles.head_dim), tiles.itemsize),
        copied(table, "v", tiles.values, tiles.v_itemsize, box),
    )
    if dynamic:
        rings = (*rings, table.ring("next", NUMBER * HANDED))
        producer, consumers = publishing(producer), receiving(consumers)
    return Topology(
        (producer, *consumers),
        rings,
        tuple(x for x in table.named_barriers() if clears or not x.name.startswith(WRITTEN.name)),
        "none",
        stages=tuple((f"P of {unit}", BUFFERS) for unit in range(HALVES)),
        places=(table.places(),),
    )


def _consumer(unit: int, clears: bool) -> Role:
    """The warpgroup that has this part of keys and columns."""
    other, clear = 1 - unit, clearing(unit) if clears else ()
    scores = Event("wait", "k"), Event("issue", "S")
    softmax = (
        *(Event("finish", "S"), Event("release", "k"), Event("softmax", f"S of {unit}")),
        *(Event("write", f"maxima of {unit}"), Event("sync", "maxima"), Event("read", f"maxima of {other}")),
    )
    hand = Event("write", f"P of {unit}")
    (start, end), (start_before, end_before) = _values(clears), _values(clears, -1)
    sums = (
        *(Event("write", f"sums of {unit}", per="work"), Event("sync", "sums")),
        Event("read", f"sums of {other}", per="work"),
    )
    free = Event("release", "q 0", per="work")
    return Role(
        f"consumer {unit}",
        warps=WARPGROUP,
        first=(Event("wait", "q 0", per="work"), *scores, *softmax, hand, *clear),
        body=(*scores, *start_before, *softmax, *end_before, hand, *clear),
        last=(free, *start, *end, *sums, Event("read", f"O of {unit}")),
        products=_products(unit),
        warp=WARPGROUP * (unit + 1),
    )


def _values(clears: bool, tile: int = 0) -> tuple[Events, Events]:
    """O += P v of a key tile: what starts it, and what ends it. Who has cleared values asks again for
    them."""
    start = (
        *(Event("sync", "probabilities"), Event("wait", "v", tile, again=clears)),
        Event("issue", "O", tile),
    )
    return start, (Event("finish", "O", tile), Event("release", "v", tile))


def _products(unit: int) -> tuple[Product, ...]:
    """S = q k' of a warpgroup's keys and O += P v of its columns."""
    queries, keys = Event("read", "q 0", per="work"), Event("read", "k")
    probabilities = tuple(Event("read", f"P of {part}") for part in range(HALVES))
    return (
        Product("S", (queries, keys), Event("write", f"S of {unit}")),
        Product("O", (Event("read", "v"), *probabilities), Event("update", f"O of {unit}"), fresh=True),
    )
