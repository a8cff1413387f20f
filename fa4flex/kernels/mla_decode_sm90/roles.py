"""Barriers of a block, as data."""

from __future__ import annotations

from fa4flex.kernels.mla_decode_sm90.config import BLOCKS
from fa4flex.kernels.plan.barriers import BarrierTable, NamedRow, tile_ring
from fa4flex.kernels.plan.topology import WARP, WARPGROUP

OWN = WARP * WARPGROUP
"""Threads of a warpgroup."""

BOTH = NamedRow("both", 1, BLOCKS * OWN, "queries, or sums, are written")
MAXIMA = NamedRow("maxima", 2, BLOCKS * OWN, "maxima with the first block are written")
SECOND = NamedRow("second", 3, BLOCKS * OWN, "maxima and probabilities of the second block are written")
FIRST = NamedRow("first", 4, BLOCKS * OWN, "probabilities of the first block are written")
CLEARED = NamedRow(
    "cleared", 5, OWN, "scores of a block are there, or what follows an end is cleared", BLOCKS
)


def barrier_table(pieces: int, clears: bool) -> BarrierTable:
    """pieces: of a block. A ring has a stage for each piece of a tile."""
    rows = tile_ring("k", BLOCKS * pieces, BLOCKS * WARPGROUP, ("producer", "consumer"))
    named = BOTH, MAXIMA, SECOND, FIRST, *[CLEARED] * clears
    return BarrierTable(rows, named)
