"""The Blackwell pipeline for listed keys.

Four warps look at the entries of a list, as those of the Hopper kernel do, and gather tiles of keys and
values row by row. They tell of each tile which keys it has. What becomes of a tile is as in the kernel for
few query rows: one warp issues all products, and four take the softmax, rescale the output and write it. Rows
are in tensor memory twice, of which each copy meets half of a tile's keys; or once, where more of them share
a list. A block has one tile: some queries that share a list, of heads that share keys, and a part of these
keys.
"""

from __future__ import annotations

from dataclasses import replace

from fa4flex.kernels.decode_sm100.config import MERGED, MERGED_STAGES, wider
from fa4flex.kernels.decode_sm100.topology import multiply, softmax
from fa4flex.kernels.lists.topology import producer
from fa4flex.kernels.lists_sm100.roles import GATHER, MULTIPLY, barrier_table
from fa4flex.kernels.plan.memory import NUMBER, block_bytes
from fa4flex.kernels.plan.paging import TileCopies
from fa4flex.kernels.plan.tensor_memory import Columns
from fa4flex.kernels.plan.topology import WARPGROUP, Event, Role, Topology

LISTED = Event("sync", "listed")


def lists_topology(
    widths: tuple[int, int], tile_n: int, kv_stages: int, columns: Columns, united: int = 1
) -> Topology:
    """The pipeline with tiles of K and V of these widths."""
    table, copies = barrier_table(kv_stages), TileCopies(1, WARPGROUP)
    rings = [
        copies.ring(table, name, tile_n, (2 * width, block_bytes(width)))
        for name, width in zip(("k", "v"), widths, strict=True)
    ]
    return Topology(
        # what a block did is told by the first, in which nothing is left out
        (_softmax(widths[1] // MERGED), _multiply(), producer(united, GATHER)),
        (*rings, table.ring("ids", NUMBER * tile_n * (1 + (united > 1))), table.ring("Q", 0)),
        table.named_barriers(),
        "none",
        mbarriers=table.barriers(),
        overlaps=(*columns.overlaps, ("merged", wider(*widths))),
        stages=(("merged", MERGED_STAGES),),
        by_warp=(*columns.names, "statistics", "merged"),
        places=(table.places(),),
        may_end=True,
    )


def _multiply() -> Role:
    plain = multiply(clears=False, warp=MULTIPLY)
    return replace(plain, opening=(*plain.opening, LISTED))


def _softmax(chunks: int) -> Role:
    """Queries are brought while the first keys are; keys of a tile are told before it is multiplied."""
    plain = softmax(chunks)
    told = Event("wait", "ids"), Event("read", "ids"), Event("release", "ids")
    queries, *scores = plain.first
    return replace(
        plain,
        opening=(*plain.opening, LISTED),
        first=(queries, *told, *scores),
        body=(*told, *plain.body),
    )
