"""The Hopper pipeline for few query rows over an e4m3 cache.

One warp copies tiles of keys and values, as bytes, by TMA. Four warps read them into registers, where they
become 16-bit operands of mma.sync: nothing is written back to shared memory, and no warp waits for another
until a block has seen all of its keys. What warps that shared keys have found is merged through the rings'
memory then.
"""

from __future__ import annotations

from fa4flex.codegen.plan.signals import stage_barriers
from fa4flex.codegen.plan.topology import (
    WARP,
    WARPGROUP,
    Event,
    NamedBarrier,
    Ring,
    Role,
    Topology,
)
from fa4flex.kernels.decode_fp8_sm90.config import span

MEET = 1
"""Named barrier of the consumer's warps: all keys are read, or all sums written."""


def decode_topology(
    head_dim: int, head_dim_v: int, tile_n: int, kv_stages: int, several: bool, box_rows: int
) -> Topology:
    """The pipeline with these tiles, which are brought `box_rows` keys at a time. `several`: a warp takes its
    keys of a tile in several steps, and has keys and values of all of them when it begins."""
    rings = tuple(_ring(x, kv_stages, tile_n, d, box_rows) for x, d in (("k", head_dim), ("v", head_dim_v)))
    copy = tuple(Event(action, ring) for ring in ("k", "v") for action in ("acquire", "load"))
    return Topology(
        (Role("producer", 1, (), copy, copy), _consumer(several)),
        rings,
        (NamedBarrier("warps", MEET, WARP * WARPGROUP),),
        "none",
        places=((*stage_barriers("k", kv_stages), *stage_barriers("v", kv_stages)),),
        may_end=True,
    )


def _ring(name: str, stages: int, rows: int, width: int, box_rows: int) -> Ring:
    """A TMA box holds a block of columns of `box_rows` rows."""
    copies = (box_rows * span(width),) * (width // span(width) * (rows // box_rows))
    return Ring(name, stages, rows * width, copies, sum(copies), WARPGROUP)


def _consumer(several: bool) -> Role:
    scores = Event("read", "k"), Event("write", "S of 0")
    softmax, values = Event("softmax", "S of 0"), Event("read", "v")
    if several:
        both = Event("wait", "k"), Event("wait", "v")
        tile = (*both, *scores, softmax, values, Event("release", "k"), Event("release", "v"))
    else:
        begun = Event("wait", "k"), *scores, Event("release", "k")
        tile = (*begun, softmax, Event("wait", "v"), values, Event("release", "v"))
    meet = Event("sync", "warps")
    closing = (meet, Event("write", "sums", per="block"), meet, Event("read", "sums", per="block"))
    return Role("consumer", WARPGROUP, first=tile, body=tile, closing=closing, warp=WARPGROUP)
