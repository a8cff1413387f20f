"""What each PTX instruction does: importing this registers all translators (see table.py)."""

from fa4flex.simulator.isa import (
    arithmetic,
    atomics,
    barriers,
    bulk,
    compare,
    convert,
    cpasync,
    logic,
    matrices,
    mbarriers,
    memory,
    move,
    system,
    tcgen05,
    warpwide,
    wgmma,
)

__all__ = [
    "arithmetic",
    "atomics",
    "barriers",
    "bulk",
    "compare",
    "convert",
    "cpasync",
    "logic",
    "matrices",
    "mbarriers",
    "memory",
    "move",
    "system",
    "tcgen05",
    "warpwide",
    "wgmma",
]
