"""Warps of a block, and the barriers between them, as data."""

from __future__ import annotations

from dataclasses import replace

from fa4flex.kernels.bwd_sm90.config import Config
from fa4flex.kernels.plan.barriers import BarrierTable, NamedRow, Per, Row, tile_ring
from fa4flex.kernels.plan.topology import WARP, WARPGROUP

PRODUCER, WRITER, EXCHANGE, CONSUMER = 0, 1, 2, 4
"""First warps: one that brings tiles, one that adds up dQ, one that exchanges with the other CTA of a pair,
and consumer warpgroups."""

CLEARER = EXCHANGE
"""Warp that clears sums of dQ, where blocks are persistent: those of pairs are not."""

SHARES = 2
"""Stages of dS, of each CTA of a pair, and of P where it is in shared memory in 16 bits."""

ALONE = WARP * WARPGROUP
HANDED = ALONE + WARP
"""Threads of a consumer warpgroup, and of a warp that takes or gives what it has."""

SCORES = NamedRow("scores", 1, ALONE, "dS of all warpgroups is in shared memory")
WEIGHED = NamedRow(
    "weighed", 13, ALONE, "P' of all queries is in shared memory, for the warpgroup that has dS'"
)
WEIGHTS_READ = NamedRow("weights_read", 14, ALONE, "P' of a pair's CTA may be overwritten")
"""These are of all warpgroups: `of_all`."""

DQ_FULL = NamedRow("dq_full", 2, HANDED, "a warpgroup's part of dQ is in a stage of shared memory", apart=2)
DQ_EMPTY = NamedRow(
    "dq_empty", 6, HANDED, "that stage has been read; of one that there is not: all of dQ", apart=2
)
STORED = NamedRow("stored", 11, ALONE, "what a warpgroup stages for global memory is there")
DS_FREE = NamedRow("ds_free", 3, HANDED, "dS' of a pair's CTA may be overwritten")
DS_SHARED = NamedRow("ds_shared", 15, HANDED, "all of this CTA's dS' is in shared memory")


def of_all(row: NamedRow, consumers: int) -> NamedRow:
    """The named barrier of so many warpgroups."""
    return replace(row, threads=consumers * row.threads)


def barrier_table(config: Config) -> BarrierTable:
    """Barriers of a block, or of a CTA of a pair. Only persistent blocks, of which there are no pairs, take
    other tiles of keys."""
    more, warps = config.persistent, config.consumers * WARPGROUP
    by, told = ("producer", "consumer"), "consumer, writer, clearer"
    rows = (
        *tile_ring("q", config.q_stages, warps, by),
        *tile_ring("dout", config.do_stages, warps, by),
        Row("k_full", 1, "producer", "keys have come", ring="k"),
        Row("v_full", 1, "producer", "values have come", ring="v"),
        Row("keys_empty", warps * more, "consumer", "K and V may be overwritten", used=more),
        Row("next_full", int(more), "producer", "the next tile is known", ring="next", used=more),
        Row("next_empty", (warps + config.told) * more, told, "all have read it", ring="next", used=more),
    )
    return BarrierTable((*rows, *_PAIR * (config.ctas - 1)), _named(config), paired=True)


_SHARE = Per(stages=SHARES)
_PAIR = (
    Row("ds_full", 1, "exchange", "dS' of the other CTA has come", _SHARE, "ds_peer"),
    Row("ds_empty", WARPGROUP, "consumer", "what was sent there is read", _SHARE, "ds_peer", exchanged=True),
    Row("v_kept", WARPGROUP, "consumer", "V is in registers, and other keys may take its place"),
    Row("k_peer_full", 1, "exchange", "columns of the other CTA's keys have come", ring="k_peer"),
)


def _named(config: Config) -> tuple[NamedRow, ...]:
    n, pair = config.consumers, config.ctas > 1
    units = 0 if pair else n
    found = [of_all(SCORES, n)]
    if config.split == "products":
        found.append(of_all(WEIGHED, n))
    if pair:
        found += [of_all(WEIGHTS_READ, n), DS_FREE, DS_SHARED]
    found += [replace(row, units=units, stages=config.dq_stages) for row in (DQ_FULL, DQ_EMPTY)]
    found.append(replace(STORED, units=n))
    if config.persistent and config.dq_stages == 1:
        # Beside the barrier of the only stage, which is for the next step.
        found.append(NamedRow("dq_read", DQ_EMPTY.at(0, 1), HANDED, "all of dQ has been read", n))
    return tuple(found)
