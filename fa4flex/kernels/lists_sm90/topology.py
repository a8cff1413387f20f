"""The Hopper pipeline for listed keys.

Four warps look at the entries of a list: which of them list a unit of keys that is there, and whether any is
listed twice. Then they gather tiles of keys and values row by row, and tell of each tile which keys it has.
A warpgroup multiplies, takes the softmax and writes to global memory; or two do, of 64 rows each, where so
many share a list: what is gathered then serves both. A block has one tile: some queries that share a list, of
heads that share keys, and a part of these keys.
"""

from __future__ import annotations

from dataclasses import replace

from fa4flex.kernels.fwd_sm90.topology import values
from fa4flex.kernels.lists.topology import producer
from fa4flex.kernels.lists_sm90.roles import barrier_table
from fa4flex.kernels.plan.memory import NUMBER, block_bytes
from fa4flex.kernels.plan.paging import TileCopies
from fa4flex.kernels.plan.topology import WARPGROUP, Event, Product, Role, Topology


def lists_topology(
    head_dim: int, head_dim_v: int, tile_n: int, kv_stages: int, consumers: int = 1, united: int = 1
) -> Topology:
    """The pipeline with these tiles."""
    table, copies = barrier_table(kv_stages, consumers), TileCopies(1, WARPGROUP)
    k, v = (
        copies.ring(table, name, tile_n, (2 * width, block_bytes(width)))
        for name, width in (("k", head_dim), ("v", head_dim_v))
    )
    consumer = _consumer if consumers == 1 else _sharing_consumer
    return Topology(
        # what a block did is told by the first, in which nothing is left out
        (*(consumer(i) for i in range(consumers)), producer(united)),
        (k, v, table.ring("ids", NUMBER * tile_n * (1 + (united > 1)))),
        table.named_barriers(),
        "none",
        places=(table.places(),),
        may_end=True,
    )


def _consumer(i: int) -> Role:
    queries, scores, out = f"q {i}", f"S of {i}", f"O of {i}"
    start, end = values(clears=False)
    tile = (*_START, Event("finish", "S"), Event("release", "k"), Event("softmax", scores), *start, *end)
    return Role(
        f"consumer {i}",
        WARPGROUP,
        opening=(Event("write", queries, per="block"), Event("sync", "listed")),
        first=tile,
        body=tile,
        last=(Event("read", out),),
        products=(
            Product("S", (Event("read", queries, per="block"), Event("read", "k")), Event("write", scores)),
            Product("O", (Event("read", "v"),), Event("update", out), fresh=True),
        ),
        warp=WARPGROUP * (1 + i),
    )


_START = (
    *(Event("wait", "ids"), Event("read", "ids"), Event("release", "ids")),
    *(Event("wait", "k"), Event("issue", "S")),
)
"""Start of the scores of a tile."""


def _sharing_consumer(i: int) -> Role:
    """One of several: scores of a tile go before the values of the one before."""
    softmax = Event("finish", "S"), Event("release", "k"), Event("softmax", f"S of {i}")
    (start, end), (start_before, end_before) = values(clears=False), values(clears=False, tile=-1)
    plain = _consumer(i)
    return replace(
        plain,
        first=(*_START, *softmax),
        body=(*_START, *start_before, *softmax, *end_before),
        last=(*start, *end, *plain.last),
    )
