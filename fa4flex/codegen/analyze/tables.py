"""Smallest and largest element of captured tables over ranges of indices.

A range along one dimension is answered from a table of minima over windows of every power of two, two
look-ups per box (Bender and Farach-Colton, The LCA Problem Revisited, 2000). Short ranges along further
dimensions are enumerated, long ones are taken whole. Ranges of bool tables are counted exactly, in any
dimensions, from cumulative sums (Crow, Summed-Area Tables, 1984). Everything is built on first use.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fa4flex.codegen.evaluate import Captured

Value = Any
Ends = tuple[Value, Value]

MOST_ENUMERATED = 64
LARGE_TABLE = 1 << 20
GRANULE = 32
"""Tables of more than LARGE_TABLE elements are reduced by this factor first: 17 windows of 4 bytes per
element would cost more memory than the table. Ranges are then widened to whole granules, which is sound."""


class Tables:
    """The captured tensors of one program, and what was built from them to answer range queries."""

    def __init__(self, captured: Captured) -> None:
        self.captured = captured
        self._extremes: dict[object, _Extremes] = {}
        self._counts: dict[object, Tensor] = {}
        self._sorted: dict[int, bool] = {}

    def is_sorted(self, slot: int) -> bool:
        """True if an operand is non-decreasing along its last dimension. NaN is in no order."""
        if self.captured.operands[slot].is_meta:
            return False
        if slot not in self._sorted:
            table = self.captured.operands[slot]
            ordered = table.ndim > 0 and bool((table[..., :-1] <= table[..., 1:]).all())
            self._sorted[slot] = ordered and not (table.is_floating_point() and bool(table.isnan().any()))
        return self._sorted[slot]

    def range(self, slot: int, index: Sequence[Ends]) -> tuple[Value, Value, bool]:
        """Least and greatest element over a box of indices, and whether it may hold NaN."""
        table = self.captured.operands[slot]
        if table.is_meta:
            return _unread(table, self.captured.largest(slot))
        if not index:
            return table.item(), table.item(), bool(table.isnan().any())
        if 0 in table.shape:
            return _anything(table)
        ends = [_wrapped(lo, hi, size) for (lo, hi), size in zip(index, table.shape, strict=True)]
        if all(lo is hi for lo, hi in ends):
            element = _gather(table, [lo for lo, _ in ends])
            return element, element, False if not table.is_floating_point() else bool(element.isnan().any())
        los, his = _broadcast(ends)
        shape = los[0].shape
        lo, hi, nan = self._over_boxes(slot, [x.flatten() for x in los], [x.flatten() for x in his])
        if not shape:
            return lo.item(), hi.item(), nan
        lo, hi = _widened(lo).reshape(shape), _widened(hi).reshape(shape)
        return lo, hi, nan

    def _over_boxes(self, slot: int, los: list[Tensor], his: list[Tensor]) -> tuple[Tensor, Tensor, bool]:
        table = self.captured.operands[slot]
        nan = table.is_floating_point() and self._has_nan(slot)
        if los[0].numel() == 1:
            part = table[tuple(slice(int(lo), int(hi) + 1) for lo, hi in zip(los, his, strict=True))]
            lo, hi = _extremes_of(part, tuple(range(part.ndim)))
            return lo.reshape(1), hi.reshape(1), nan
        extents = [int((hi - lo).max()) + 1 if lo.numel() else 1 for lo, hi in zip(los, his, strict=True)]
        moving = [d for d, extent in enumerate(extents) if extent > 1]
        if not moving:
            element = table[tuple(los)]
            return element, element, nan
        if table.dtype == torch.bool:
            return *self._count(slot, moving, los, his), False
        return *self._search_windows(slot, moving, extents, los, his), nan

    def _has_nan(self, slot: int) -> bool:
        key = ("nan", slot)
        if key not in self._counts:
            self._counts[key] = self.captured.operands[slot].isnan().any()
        return bool(self._counts[key])

    # --- bool tables: count what is true ---------------------------------------------------------------

    def _count(
        self, slot: int, moving: list[int], los: list[Tensor], his: list[Tensor]
    ) -> tuple[Tensor, Tensor]:
        sums = self._cumulative(slot, moving)
        total: Tensor | int = 0
        area: Tensor | int = 1
        for d in moving:
            area = area * (his[d] - los[d] + 1)
        for corner in itertools.product((False, True), repeat=len(moving)):
            index = list(los)
            for d, upper in zip(moving, corner, strict=True):
                index[d] = his[d] + 1 if upper else los[d]
            result = sums[tuple(index)]
            total = total + result if (len(moving) - sum(corner)) % 2 == 0 else total - result
        return torch.as_tensor(total == area), torch.as_tensor(total > 0)

    def _cumulative(self, slot: int, moving: list[int]) -> Tensor:
        """Element i along each moving dimension counts what is true before i."""
        key = (slot, tuple(moving))
        if key not in self._counts:
            table = self.captured.operands[slot]
            sums = table.to(torch.int32 if table.numel() < 1 << 31 else torch.int64)
            for d in moving:
                sums = sums.cumsum(d, dtype=sums.dtype)
                sums = torch.cat((torch.zeros_like(sums.narrow(d, 0, 1)), sums), d)
            self._counts[key] = sums
        return self._counts[key]

    # --- number tables: minima and maxima over windows -------------------------------------------------

    def _search_windows(
        self, slot: int, moving: list[int], extents: list[int], los: list[Tensor], his: list[Tensor]
    ) -> tuple[Tensor, Tensor]:
        axis = max(moving, key=lambda d: extents[d])
        others = sorted((d for d in moving if d != axis), key=lambda d: extents[d])
        enumerated: list[int] = []
        points = 1
        for d in others:
            if points * extents[d] <= MOST_ENUMERATED:
                enumerated.append(d)
                points *= extents[d]
        whole = tuple(sorted(set(others) - set(enumerated)))
        windows = self._windows(slot, whole, axis)
        lo: Tensor | None = None
        hi: Tensor | None = None
        for steps in itertools.product(*(range(extents[d]) for d in enumerated)):
            index = list(los)
            for d, step in zip(enumerated, steps, strict=True):
                index[d] = (los[d] + step).minimum(his[d])
            for d in whole:
                index[d] = torch.zeros_like(los[d])
            low, high = windows.query(index, los[axis], his[axis])
            lo, hi = (low, high) if lo is None or hi is None else (lo.minimum(low), hi.maximum(high))
        assert lo is not None and hi is not None
        return lo, hi

    def _windows(self, slot: int, whole: tuple[int, ...], axis: int) -> _Extremes:
        key = (slot, whole, axis)
        if key not in self._extremes:
            lo, hi = _extremes_of(self.captured.operands[slot], whole)
            self._extremes[key] = _Extremes(lo, hi, axis)
        return self._extremes[key]

    # --- where a needle falls in a sorted table --------------------------------------------------------

    def search(self, slot: int, side: str, needle: Ends, lead: Sequence[Ends]) -> Ends:
        """Number of elements of the sorted vector table[lead...] below the needle."""
        table = self.captured.operands[slot]
        count = table.shape[-1]
        ends = [_wrapped(lo, hi, size) for (lo, hi), size in zip(lead, table.shape, strict=False)]
        if not self.is_sorted(slot) or table.is_floating_point() or any(lo is not hi for lo, hi in ends):
            return 0, count
        vectors = table.reshape(-1, count)
        row: Value = 0
        for (lo, _), size in zip(ends, table.shape, strict=False):
            row = row * size + lo
        if vectors.shape[0] == 1:
            row = 0
        lo, hi = (_search_rows(vectors, row, end, side) for end in needle)
        return lo, hi


class _Extremes:
    """Minima and maxima of one table over windows of 1, 2, 4, ... elements along one dimension."""

    def __init__(self, lo: Tensor, hi: Tensor, axis: int) -> None:
        self.axis = axis
        self.granule = 1
        if lo.numel() > LARGE_TABLE:
            self.granule = GRANULE
            lo, hi = _pooled(lo, axis, torch.amin), _pooled(hi, axis, torch.amax)
        self._levels = [(_narrow(lo), _narrow(hi))]

    def query(self, index: list[Tensor], lo: Tensor, hi: Tensor) -> tuple[Tensor, Tensor]:
        if self.granule > 1:
            lo, hi = lo // self.granule, hi // self.granule
        level = torch.frexp((hi - lo + 1).double()).exponent - 1
        least = torch.empty_like(lo, dtype=self._levels[0][0].dtype)
        greatest = torch.empty_like(least)
        for k in level.unique().tolist():
            chosen = level == k
            at = [i[chosen] for i in index]
            ends = lo[chosen], hi[chosen] - (1 << k) + 1
            for result, table, join in zip(
                (least, greatest), self._level(k), (torch.minimum, torch.maximum), strict=True
            ):
                first, second = (table[(*at[: self.axis], end, *at[self.axis + 1 :])] for end in ends)
                result[chosen] = join(first, second)
        return least, greatest

    def _level(self, k: int) -> tuple[Tensor, Tensor]:
        while len(self._levels) <= k:
            step = 1 << (len(self._levels) - 1)
            lo, hi = self._levels[-1]
            kept = lo.shape[self.axis] - step
            self._levels.append(
                (
                    torch.minimum(lo.narrow(self.axis, 0, kept), lo.narrow(self.axis, step, kept)),
                    torch.maximum(hi.narrow(self.axis, 0, kept), hi.narrow(self.axis, step, kept)),
                )
            )
        return self._levels[k]


# --- small helpers ----------------------------------------------------------------------------------------


def _anything(table: Tensor) -> tuple[Value, Value, bool]:
    if table.dtype == torch.bool:
        return False, True, False
    if table.is_floating_point():
        return -float("inf"), float("inf"), True
    return torch.iinfo(table.dtype).min, torch.iinfo(table.dtype).max, False


def _unread(table: Tensor, largest: int) -> tuple[Value, Value, bool]:
    """Contents that are not read, integers below `largest`."""
    lo, hi, nan = _anything(table)
    if table.dtype == torch.bool or table.is_floating_point():
        return lo, hi, nan
    return max(lo, 1 - largest), min(hi, largest - 1), nan


def _wrapped(lo: Value, hi: Value, size: int) -> Ends:
    """Indices as positions from the front: negative ones count from the end, none out of range ever runs."""
    if isinstance(lo, Tensor) or isinstance(hi, Tensor):
        same = lo is hi
        lo, hi = torch.as_tensor(lo), torch.as_tensor(hi)
        split = (lo < 0) & (hi >= 0)
        low = torch.where(split, 0, torch.where(lo < 0, lo + size, lo)).clamp(0, max(size - 1, 0))
        if same:
            return low, low
        high = torch.where(split, size - 1, torch.where(hi < 0, hi + size, hi)).clamp(0, max(size - 1, 0))
        return low, high
    first, last = (lo + size * (lo < 0), hi + size * (hi < 0)) if (lo < 0) == (hi < 0) else (0, size - 1)
    first, last = (min(max(end, 0), max(size - 1, 0)) for end in (first, last))
    return (first, first) if first == last else (first, last)


def _gather(table: Tensor, index: list[Value]) -> Any:
    element = table[tuple(index)]
    return _widened(element) if element.ndim or table.is_floating_point() else element.item()


def _widened(x: Tensor) -> Tensor:
    """Integers as int64: sums of a narrow table's elements must not wrap."""
    return x if x.dtype == torch.bool or x.is_floating_point() else x.to(torch.int64)


def _broadcast(ends: list[Ends]) -> tuple[list[Tensor], list[Tensor]]:
    flat = torch.broadcast_tensors(*(torch.as_tensor(end) for pair in ends for end in pair))
    return list(flat[::2]), list(flat[1::2])


def _extremes_of(table: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Minimum and maximum over `dims`, which are kept with extent 1; NaN counts as neither."""
    low = high = table
    if table.is_floating_point() and bool(table.isnan().any()):
        low, high = (
            table.nan_to_num(x, posinf=float("inf"), neginf=-float("inf"))
            for x in (float("inf"), -float("inf"))
        )
    if not dims:
        return low, high
    return low.amin(dims, keepdim=True), high.amax(dims, keepdim=True)


def _narrow(table: Tensor) -> Tensor:
    """int64 tables of small numbers as int32: half the memory of every window."""
    if table.dtype != torch.int64 or table.numel() == 0:
        return table
    fits = bool((table.amin() >= -(1 << 31)) & (table.amax() < 1 << 31))
    return table.to(torch.int32) if fits else table


def _pooled(table: Tensor, axis: int, fold: Callable[..., Tensor]) -> Tensor:
    size = table.shape[axis]
    whole = size // GRANULE * GRANULE
    parts = [fold(table.narrow(axis, 0, whole).unflatten(axis, (-1, GRANULE)), axis + 1)] if whole else []
    if whole < size:
        parts.append(fold(table.narrow(axis, whole, size - whole), axis, keepdim=True))
    return torch.cat(parts, axis)


def _search_rows(vectors: Tensor, row: Value, needle: Value, side: str) -> Value:
    """searchsorted where each needle names its own row; numbers in, numbers out."""
    limits = torch.iinfo(torch.int64)
    if not isinstance(needle, Tensor) and not limits.min <= needle <= limits.max:
        return 0 if needle < 0 else vectors.shape[1]
    rows, exact = torch.broadcast_tensors(torch.as_tensor(row), torch.as_tensor(needle))
    result = torch.empty_like(exact)
    for r in rows.unique().tolist():
        chosen = rows == r
        result[chosen] = torch.searchsorted(vectors[r].to(torch.int64), exact[chosen].contiguous(), side=side)
    return result if result.ndim else int(result.item())
