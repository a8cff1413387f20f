"""Classes of the units of lists: 1 where a row lists a unit, 0 elsewhere. A warp has a row.

Entries that are no unit list nothing, and one that stands twice is there once.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, Int64, Uint8, const_expr, cute

from fa4flex.kernels.block_lists.kernel import EMPTY, PARTIAL, OfRows, Row
from fa4flex.kernels.common.arguments import named
from fa4flex.kernels.common.math import where
from fa4flex.kernels.plan.arguments import LISTED_UNITS

_Arguments: Any = named("ListedUnitArguments", LISTED_UNITS.read_by("kernel"))


class ListedUnitArguments(_Arguments):
    """ids [B, H, R, entries], and counts [B, H, R] or None: int32 or int64 of any strides. classes uint8
    [B, H, R, C] is written."""


class ListedUnits(OfRows):
    direction = "listed_units"

    @cute.jit
    def classify(self, arguments: ListedUnitArguments, row: Row) -> None:
        """A warp's: the classes of a row's units."""
        a, lane = arguments, cute.arch.lane_idx()
        classes = a.classes[row.b, row.h, row.number, None]
        ids, columns = a.ids[row.b, row.h, row.number, None], Int32(classes.shape[0])
        for unit in cutlass.range(lane, columns, 32, unroll=1):
            classes[unit] = Uint8(EMPTY)
        cute.arch.sync_warp()
        entries = Int32(ids.shape[0])
        if const_expr(a.counts is not None):
            count = Int64(a.counts[row.b, row.h, row.number])
            entries = Int32(cutlass.max(cutlass.min(count, Int64(entries)), Int64(0)))
        before = cute.arch.lanemask_lt()
        for first in cutlass.range(0, entries, 32, unroll=1):
            unit = Int32(-1)
            if first + lane < entries:
                given = Int64(ids[first + lane])
                unit = where((given >= 0) & (given < columns), Int32(given), Int32(-1))
            alike = Int32(cute.arch.match_sync(0xFFFFFFFF, unit))
            if unit >= 0 and (alike & before) == 0:
                classes[unit] = Uint8(PARTIAL)
            cute.arch.sync_warp()
