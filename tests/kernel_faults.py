"""Faults that kernels of this process told of."""

from __future__ import annotations

import sys


def drop_faults() -> bool:
    """True if there were some, which no call raises from now on."""
    faults = sys.modules.get("fa4flex.runtime.cuda.device.faults")
    if faults is None or faults._table is None:
        return False
    there = bool(faults._table.any())
    faults._table.zero_()
    return there
