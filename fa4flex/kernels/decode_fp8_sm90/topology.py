"""The Hopper pipeline for few query rows over an e4m3 cache.

One warp copies tiles of keys and values, as bytes, by TMA, or four row by row where pages are of few keys.
Four warps read them into registers, where they
become 16-bit operands of mma.sync: nothing is written back to shared memory, and no warp waits for another
until a block has seen all of its keys. What warps that shared keys have found is merged through the rings'
memory then.
"""

from __future__ import annotations

from fa4flex.kernels.decode_fp8_sm90.config import span
from fa4flex.kernels.decode_fp8_sm90.roles import MEET
from fa4flex.kernels.decode_sm90.roles import barrier_table
from fa4flex.kernels.plan.paging import TileCopies
from fa4flex.kernels.plan.topology import (
    WARPGROUP,
    Event,
    Role,
    Topology,
)


def decode_topology(
    head_dim: int, head_dim_v: int, tile_n: int, kv_stages: int, several: bool, copies: TileCopies
) -> Topology:
    """The pipeline with these tiles. `several`: a warp takes its keys of a tile in several steps, and has
    keys and values of all of them when it begins."""
    table = barrier_table(kv_stages, copies.gather_warps, MEET)
    rings = tuple(
        copies.ring(table, name, tile_n, (width, span(width)))
        for name, width in (("k", head_dim), ("v", head_dim_v))
    )
    return Topology(
        (copies.role("producer"), _consumer(several)),
        rings,
        table.named_barriers(),
        "none",
        places=(table.places(),),
        may_end=True,
    )


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
