"""The Hopper pipeline for listed keys.

Four warps look at the entries of a list: which of them list a unit of keys that is there, and whether any is
listed twice. Then they gather tiles of keys and values row by row, and tell of each tile which keys it has.
One warpgroup multiplies, takes the softmax and writes to global memory. A block has one tile: some queries
that share a list, of heads that share keys, and a part of these keys.
"""

from __future__ import annotations

from fa4flex.kernels.lists_sm90.roles import barrier_table
from fa4flex.kernels.plan.memory import NUMBER, block_bytes
from fa4flex.kernels.plan.paging import TileCopies
from fa4flex.kernels.plan.topology import WARPGROUP, Action, Event, Product, Role, Topology


def lists_topology(head_dim: int, head_dim_v: int, tile_n: int, kv_stages: int) -> Topology:
    """The pipeline with these tiles."""
    table, copies = barrier_table(kv_stages), TileCopies(1, WARPGROUP)
    k, v = (
        copies.ring(table, name, tile_n, (2 * width, block_bytes(width)))
        for name, width in (("k", head_dim), ("v", head_dim_v))
    )
    return Topology(
        (_consumer(), _producer()),  # what a block did is told by the first, in which nothing is left out
        (k, v, table.ring("ids", NUMBER * tile_n)),
        table.named_barriers(),
        "none",
        places=(table.places(),),
        may_end=True,
    )


def _producer() -> Role:
    """Entries of a list that is not ascending are put into a table, and looked up there."""
    looked, again = Event("sync", "entries"), Event("sync", "entries", maybe=True)
    actions: tuple[Action, ...] = ("acquire", "fill")
    tile = tuple(Event(action, ring) for ring in ("ids", "k", "v") for action in actions)
    return Role("producer", WARPGROUP, (looked, again, again, Event("sync", "listed")), tile, tile)


def _consumer() -> Role:
    tile = (
        *(Event("wait", "ids"), Event("read", "ids"), Event("release", "ids")),
        *(Event("wait", "k"), Event("issue", "S"), Event("finish", "S"), Event("release", "k")),
        Event("softmax", "S of 0"),
        *(Event("wait", "v"), Event("issue", "O"), Event("finish", "O"), Event("release", "v")),
    )
    return Role(
        "consumer",
        WARPGROUP,
        opening=(Event("write", "q", per="block"), Event("sync", "listed")),
        first=tile,
        body=tile,
        last=(Event("read", "O of 0"),),
        products=(
            Product("S", (Event("read", "q", per="block"), Event("read", "k")), Event("write", "S of 0")),
            Product("O", (Event("read", "v"),), Event("update", "O of 0"), fresh=True),
        ),
        warp=WARPGROUP,
    )
