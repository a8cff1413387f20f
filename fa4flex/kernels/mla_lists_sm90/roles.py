"""Barriers of a block, as data: those of the kernel for latent rows, with rings that warps fill row by row,
and what is known of keys."""

from __future__ import annotations

from fa4flex.kernels.lists.roles import ENTRIES, listed
from fa4flex.kernels.mla_decode_sm90.config import BLOCKS
from fa4flex.kernels.mla_decode_sm90.roles import BOTH, FIRST, MAXIMA, SECOND
from fa4flex.kernels.mla_lists_sm90.config import GATHER_WARPS
from fa4flex.kernels.plan.barriers import BarrierTable, Per, Row, tile_ring
from fa4flex.kernels.plan.topology import WARPGROUP

LISTED = listed((1 + BLOCKS) * WARPGROUP)


def barrier_table(pieces: int) -> BarrierTable:
    """pieces: of a block. A ring has a stage for each piece of a tile; of keys, each block has a ring."""
    blocks = Per(units=BLOCKS)
    rows = (
        *tile_ring("k", BLOCKS * pieces, BLOCKS * WARPGROUP, ("producer", "consumer"), GATHER_WARPS),
        Row("ids_full", GATHER_WARPS, "producer", "keys of a block are told", blocks, "ids"),
        Row("ids_empty", WARPGROUP, "consumer", "they are no longer needed", blocks, "ids"),
    )
    return BarrierTable(rows, (ENTRIES, LISTED, BOTH, MAXIMA, SECOND, FIRST))
