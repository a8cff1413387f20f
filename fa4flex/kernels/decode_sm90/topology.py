"""The Hopper pipeline for few query rows.

One warp copies tiles of keys and values by TMA, as far ahead as the rings are deep: memory is what such a
kernel waits for. One warpgroup multiplies, takes the softmax and writes to global memory. Its rows are pairs
of a query and a head, which no tensor map describes, so that it brings them to shared memory itself. A block
has one tile: a part of the keys of a sequence and a head of keys.
"""

from __future__ import annotations

from fa4flex.codegen.plan.memory import column_block
from fa4flex.codegen.plan.signals import stage_barriers
from fa4flex.codegen.plan.topology import (
    WARP,
    WARPGROUP,
    Event,
    NamedBarrier,
    Product,
    Ring,
    Role,
    Topology,
)

MEET = 1
"""Named barrier of the consumer's warps: queries are written, or values past a sequence's end cleared."""


def decode_topology(
    head_dim: int, head_dim_v: int, tile_n: int, kv_stages: int, clears: bool, box_rows: int
) -> Topology:
    """The pipeline with these tiles. `clears`: sequences may end before their tensor does. Tiles are brought
    `box_rows` keys at a time."""
    rings = tuple(_ring(x, kv_stages, tile_n, d, box_rows) for x, d in (("k", head_dim), ("v", head_dim_v)))
    copy = tuple(Event(action, ring) for ring in ("k", "v") for action in ("acquire", "load"))
    return Topology(
        (Role("producer", 1, (), copy, copy), _consumer(clears)),
        rings,
        (NamedBarrier("rows", MEET, WARP * WARPGROUP),),
        "none",
        places=((*stage_barriers("k", kv_stages), *stage_barriers("v", kv_stages)),),
        may_end=True,
    )


def _ring(name: str, stages: int, rows: int, width: int, box_rows: int) -> Ring:
    """16-bit elements. A TMA box holds a block of columns of `box_rows` rows."""
    block = column_block(width)
    copies = (box_rows * block * 2,) * (width // block * (rows // box_rows))
    return Ring(name, stages, rows * width * 2, copies, sum(copies), WARPGROUP)


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
