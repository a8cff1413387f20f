"""The Hopper backward pipeline for listed keys.

Four warps look at the entries of a list, and gather tiles of keys and values row by row, as those of the
forward pass do. A warpgroup computes S and dP of a tile, leaves P and dS in shared memory, and multiplies:
dQ stays in its registers; what the tile gets of dV and dK is added to sums in global memory. A block has one
tile of rows, and all of their keys.
"""

from __future__ import annotations

from fa4flex.kernels.bwd_lists_sm90.config import KEYS
from fa4flex.kernels.bwd_lists_sm90.roles import barrier_table
from fa4flex.kernels.lists.topology import producer
from fa4flex.kernels.plan.memory import NUMBER, block_bytes
from fa4flex.kernels.plan.paging import TileCopies
from fa4flex.kernels.plan.topology import WARPGROUP, Event, Product, Role, Topology


def lists_backward_topology(
    head_dim: int, head_dim_v: int, stages: tuple[int, int], united: int = 1
) -> Topology:
    """The pipeline with so many stages of K and of V."""
    table, copies = barrier_table(*stages), TileCopies(1, WARPGROUP)
    k, v = (
        copies.ring(table, name, KEYS, (2 * width, block_bytes(width)))
        for name, width in (("k", head_dim), ("v", head_dim_v))
    )
    return Topology(
        (_consumer(), producer(united)),
        (k, v, table.ring("ids", NUMBER * KEYS * (1 + (united > 1)))),
        table.named_barriers(),
        "none",
        places=(table.places(),),
        may_end=True,
    )


def _consumer() -> Role:
    def of_block(action: str, name: str) -> Event:
        return Event(action, name, per="block")  # type: ignore[arg-type]

    tile = (
        *(Event("wait", "ids"), Event("read", "ids")),
        *(Event("wait", "k"), Event("issue", "S"), Event("wait", "v"), Event("issue", "dP")),
        *(Event("finish", "S"), Event("finish", "dP"), Event("release", "v")),
        *(Event("softmax", "scores"), Event("read", "slopes"), Event("read", "ids"), Event("release", "ids")),
        Event("sync", "free"),
        *(Event("write", "p"), Event("write", "ds"), Event("sync", "shared")),
        *(Event("issue", "dV"), Event("issue", "dQ"), Event("finish", "dV"), Event("read", "dv")),
        *(Event("issue", "dK"), Event("finish", "dQ"), Event("finish", "dK"), Event("release", "k")),
        Event("read", "dk"),
    )
    return Role(
        "consumer 0",
        WARPGROUP,
        opening=(of_block("write", "q"), of_block("write", "dout"), Event("sync", "listed")),
        first=tile,
        body=tile,
        last=(Event("read", "dq"),),
        products=(
            Product("S", (of_block("read", "q"), Event("read", "k")), Event("write", "scores")),
            Product("dP", (of_block("read", "dout"), Event("read", "v")), Event("write", "slopes")),
            Product("dV", (Event("read", "p"), of_block("read", "dout")), Event("write", "dv")),
            Product("dQ", (Event("read", "k"),), Event("update", "dq"), fresh=True),
            Product("dK", (Event("read", "ds"), of_block("read", "q")), Event("write", "dk")),
        ),
        warp=WARPGROUP,
    )
