"""The Hopper pipeline for few query rows.

One warp copies tiles of keys and values by TMA, or four row by row where pages are of few keys, as far
ahead as the rings are deep: memory is what such a kernel waits for. One warpgroup multiplies, takes the
softmax and writes to global memory. Its rows are pairs of a query and a head, which no tensor map
describes, so that it brings them to shared memory itself. A block has one tile: a part of the keys of a
sequence and a KV head.
"""

from __future__ import annotations

from dataclasses import replace

from fa4flex.kernels.decode_sm90.roles import barrier_table
from fa4flex.kernels.plan.memory import NUMBER, block_bytes
from fa4flex.kernels.plan.paging import TileCopies
from fa4flex.kernels.plan.topology import (
    WARPGROUP,
    Event,
    Product,
    Role,
    Topology,
)


def decode_topology(
    head_dim: int, head_dim_v: int, tile_n: int, kv_stages: int, clears: bool, copies: TileCopies
) -> Topology:
    """The pipeline with these tiles. `clears`: sequences may end before their tensor does."""
    table = barrier_table(kv_stages, copies.gather_warps)
    rings = tuple(
        copies.ring(table, name, tile_n, (2 * width, block_bytes(width)))
        for name, width in (("k", head_dim), ("v", head_dim_v))
    )
    return Topology(
        (copies.role("producer"), _consumer(clears)),
        rings,
        table.named_barriers(),
        "none",
        places=(table.places(),),
        may_end=True,
    )


def skipping_topology(
    head_dim: int, head_dim_v: int, tile_n: int, kv_stages: int, clears: bool, copies: TileCopies
) -> Topology:
    """The pipeline that leaves out tiles. Keys come as far ahead as their ring is deep; the consumer tells of
    each tile whether its values are wanted, and multiplies them after the next tile's scores."""
    table = barrier_table(kv_stages, asks=True)
    k, v = (
        copies.ring(table, name, tile_n, (2 * width, block_bytes(width)))
        for name, width in (("k", head_dim), ("v", head_dim_v))
    )
    return Topology(
        (_asked_producer(kv_stages), _asking_consumer(clears)),
        (k, v, table.ring("asked", NUMBER)),
        table.named_barriers(),
        "none",
        places=(table.places(),),
        may_end=True,
    )


def _asked_producer(stages: int) -> Role:
    """Stages of values are full with a tile that is brought, and without one that is not."""
    ahead = [Event(action, "k", n, ahead=True) for n in range(stages) for action in ("acquire", "load")]
    values = (
        *(Event("wait", "asked"), Event("read", "asked"), Event("acquire", "v")),
        *(Event("load", "v", maybe=True), Event("forgo", "v", instead=True)),
    )
    later = tuple(Event(action, "k", stages, ahead=True) for action in ("acquire", "load"))
    return Role("producer", 1, (), (*ahead, *values, *later), (*values, *later))


def _asking_consumer(clears: bool) -> Role:
    plain, meet = _consumer(clears), Event("sync", "rows")
    scores = (
        *(Event("wait", "k"), Event("issue", "S"), Event("finish", "S"), Event("release", "k")),
        *(Event("softmax", "S of 0"), meet, Event("fill", "asked")),
    )
    before, after = (
        (
            *(Event("wait", "v", tile), *(Event("sync", "rows", maybe=True),) * clears),
            *(Event("issue", "O", tile, maybe=True), Event("read", "v", tile, instead=True)),
            *(Event("update", "O of 0", tile, instead=True), Event("finish", "O", tile, maybe=True)),
            Event("release", "v", tile),
        )
        for tile in (-1, 0)
    )
    return replace(
        plain,
        first=(Event("write", "O of 0", -1), *scores),
        body=(*scores, *before),
        last=(*after, *plain.last),
        products=tuple(replace(product, fresh=False) for product in plain.products),
    )


def _consumer(clears: bool) -> Role:
    meet = Event("sync", "rows")
    tile = (
        *(Event("wait", "k"), Event("issue", "S"), Event("finish", "S"), Event("release", "k")),
        Event("softmax", "S of 0"),
        *(Event("wait", "v"), *(Event("sync", "rows", maybe=True),) * clears),
        *(Event("issue", "O"), Event("finish", "O"), Event("release", "v")),
    )
    queries, output = Event("write", "q", per="block"), Event("read", "O of 0")
    return Role(
        "consumer",
        WARPGROUP,
        opening=(queries, meet),
        first=tile,
        body=tile,
        last=(output,),
        products=(
            Product("S", (Event("read", "q", per="block"), Event("read", "k")), Event("write", "S of 0")),
            Product("O", (Event("read", "v"),), Event("update", "O of 0"), fresh=True),
        ),
        warp=WARPGROUP,
    )
