"""Warps of a block, and the barriers between them, as data."""

from __future__ import annotations

from fa4flex.kernels.mass_sm90.config import Config
from fa4flex.kernels.plan.barriers import BarrierTable, Row, tile_ring
from fa4flex.kernels.plan.topology import WARPGROUP

PRODUCER, CONSUMER = 0, 4
"""First warps: one that brings tiles, and consumer warpgroups."""


def barrier_table(config: Config) -> BarrierTable:
    """Barriers of a block."""
    rows = (
        *tile_ring("q", config.q_stages, config.consumers * WARPGROUP, ("producer", "consumer")),
        Row("k_full", 1, "producer", "keys have come", ring="k"),
    )
    return BarrierTable(rows, paired=True)
