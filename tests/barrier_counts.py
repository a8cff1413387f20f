"""Counts of barriers as kernels initialise them, by the names of the graph."""

from __future__ import annotations

from fa4flex.kernels.plan.barriers import BarrierTable


def counts_of(table: BarrierTable, cta: int = 0) -> dict[str, int]:
    """Arrivals that complete a phase, of all mbarriers that are used."""
    counts = dict(table.initialised)
    for row in table.rows:
        if row.library:
            counts |= {table.offsets[row.name] + i: row.counted for i in range(row.per.count)}
    return {place: counts[i] for i, place in enumerate(table.places(cta)) if place}
