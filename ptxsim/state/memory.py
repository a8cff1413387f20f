"""Bytes that can be addressed: shared memory, and host memory in the role of global memory.

Loads and stores take many addresses at once and move `count` values of `size` bytes at each of them.
"""

from __future__ import annotations

import bisect
import ctypes
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptxsim.watch.launches import Launches

Bytes = NDArray[np.uint8]
Values = NDArray[Any]
Addresses = NDArray[np.int64]

UNSIGNED: dict[int, np.dtype[Any]] = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}
ALIGNMENT = 32
"""The widest access (v8.b32); regions are viewed from multiples of it."""


def extent(addresses: Addresses, width: int) -> tuple[int, int]:
    """First address, and the end of `width` bytes at the last one."""
    return int(np.minimum.reduce(addresses)), int(np.maximum.reduce(addresses)) + width


class BadAccess(Exception):
    """`kind` is "out of bounds" or "misaligned", `address` the first bad one of `size` bytes."""

    def __init__(self, kind: str, address: int, size: int, where: str) -> None:
        self.kind, self.address, self.size, self.where = kind, address, size, where
        super().__init__(f"{kind}: {size} bytes at {address:#x} of {where}")


class Region:
    """Bytes [start, stop) of one address space, which can be read and written as values of any size."""

    def __init__(self, name: str, start: int, data: Bytes, writable: bool = True) -> None:
        """`data` begins at `start`, a multiple of ALIGNMENT; its length is a multiple too, beyond `stop`."""
        self.name, self.start, self.data, self.writable = name, start, data, writable
        self.low, self.stop = start, start + data.size
        self._views: dict[tuple[int, int], Values] = {}

    def bound(self, low: int, stop: int) -> Region:
        """Allow access to [low, stop) only."""
        self.low, self.stop = low, stop
        return self

    def load(self, addresses: Addresses, size: int, count: int = 1) -> Values:
        """uint8 ... uint64 [len(addresses), count]. Raises BadAccess."""
        return self.values(size, count)[self.rows(addresses, size * count)]

    def store(self, addresses: Addresses, values: Values) -> None:
        """`values` is unsigned [len(addresses), count]; of equal addresses the last one wins."""
        size, count = values.dtype.itemsize, values.shape[1]
        if not self.writable:
            raise BadAccess("read only", int(addresses[0]), size * count, self.name)
        self.values(size, count)[self.rows(addresses, size * count)] = values

    def window(self, address: int, size: int) -> Bytes:
        """The bytes themselves, to read and write. Raises BadAccess."""
        if not (self.low <= address and address + size <= self.stop):
            raise BadAccess("out of bounds", address, size, self.name)
        return self.data[address - self.start : address - self.start + size]

    def values(self, size: int, count: int) -> Values:
        """All of it as unsigned [rows, count] of `size` bytes."""
        view = self._views.get((size, count))
        if view is None:
            view = self._views[size, count] = self.data.view(UNSIGNED[size]).reshape(-1, count)
        return view

    def rows(self, addresses: Addresses, width: int) -> Addresses:
        """Rows of `width` bytes at these addresses. Raises BadAccess."""
        # All bits that any address has: enough to see that they are aligned, and usually that they fit.
        every = int(np.bitwise_or.reduce(addresses))
        if not self.low and not every & (width - 1) and 0 <= every <= self.stop - width:
            return addresses // width
        lowest, stop = extent(addresses, width)
        if lowest < self.low or stop > self.stop:
            bad = lowest if lowest < self.low else stop - width
            raise BadAccess("out of bounds", bad, width, self.name)
        if every & (width - 1):  # `start` is a multiple of every width
            bad = int(addresses[(addresses & (width - 1)) != 0][0])
            raise BadAccess("misaligned", bad, width, self.name)
        return (addresses - self.start) // width


def fresh(name: str, start: int, size: int, fill: int = 0xA5) -> Region:
    """A region of its own bytes, poisoned with `fill`."""
    rounded = -(-max(size, 1) // ALIGNMENT) * ALIGNMENT
    return Region(name, start, np.full(rounded, fill, np.uint8)).bound(start, start + size)


class HostMemory:
    """Global memory: this process's own, at its own addresses.

    Buffers that were registered are bounded exactly. Other addresses are allowed where the process has memory
    at all, unless `strict`.
    """

    def __init__(self, strict: bool = False, launches: Launches | None = None) -> None:
        """`launches` are those before, if what they do to the memory is to be remembered."""
        self.strict, self.launches = strict, launches
        self._starts: list[int] = []
        self._regions: list[Region] = []
        self._mapped: list[Mapping] = []
        self._used: list[Region] = []
        """Those of the mappings that were accessed, the last ones first."""
        self._kept: list[Any] = []

    def register(self, name: str, address: int, size: int, keep: Any = None, writable: bool = True) -> Region:
        """Bound a buffer of `size` bytes; `keep` is what owns it."""
        region = _host_region(name, address, address + size, writable)
        position = bisect.bisect_right(self._starts, address)
        if position and self._starts[position - 1] == address:
            self._regions[position - 1] = region
        else:
            self._starts.insert(position, address)
            self._regions.insert(position, region)
        self._kept.append(keep)
        return region

    def allocate(self, name: str, content: bytes, writable: bool = True) -> int:
        """A new buffer holding `content`; returns its address, a multiple of 128."""
        storage = np.zeros(len(content) + 128, np.uint8)
        start = -storage.ctypes.data % 128
        storage[start : start + len(content)] = np.frombuffer(content, np.uint8)
        address = storage.ctypes.data + start
        self.register(name, address, len(content), storage, writable)
        return address

    def find(self, address: int) -> Region:
        """The region that holds an address. Raises BadAccess."""
        position = bisect.bisect_right(self._starts, address) - 1
        if position >= 0 and self._regions[position].low <= address < self._regions[position].stop:
            return self._regions[position]
        if not self.strict:
            for region in self._used:
                if region.low <= address < region.stop:
                    return region
            for fresh_look in (False, True):
                if fresh_look:
                    self._mapped, self._used = _mappings(), []
                for low, stop, writable in self._mapped:
                    if low <= address < stop:
                        region = _host_region("unregistered host memory", low, stop, writable)
                        self._used.insert(0, region)
                        return region
        raise BadAccess("out of bounds", address, 1, "global memory")

    def load(self, addresses: Addresses, size: int, count: int = 1) -> Values:
        region = self.find(int(addresses[0]))
        try:
            return region.load(addresses, size, count)
        except BadAccess as bad:
            if len(addresses) == 1 or bad.kind != "out of bounds":
                raise
        return np.concatenate([self.load(addresses[i : i + 1], size, count) for i in range(len(addresses))])

    def store(self, addresses: Addresses, values: Values) -> None:
        region = self.find(int(addresses[0]))
        try:
            region.store(addresses, values)
        except BadAccess as bad:
            if len(addresses) == 1 or bad.kind != "out of bounds":
                raise
            for i in range(len(addresses)):
                self.store(addresses[i : i + 1], values[i : i + 1])

    def window(self, address: int, size: int) -> Bytes:
        return self.find(address).window(address, size)

    def contents(self, granules: Addresses, size: int) -> Bytes | None:
        """Bytes [granules, size] at multiples of `size`, which ascend; None where some cannot be read."""
        starts = np.flatnonzero(np.diff(granules, prepend=-2) != 1)
        found = [np.zeros(0, np.uint8)]
        try:
            runs = (run for run in np.split(granules, starts[1:]) if len(run))
            found += [self.window(int(run[0]) * size, len(run) * size) for run in runs]
        except BadAccess:
            return None
        return np.concatenate(found).reshape(-1, size)


def _host_region(name: str, low: int, stop: int, writable: bool) -> Region:
    start, end = low // ALIGNMENT * ALIGNMENT, -(-stop // ALIGNMENT) * ALIGNMENT
    buffer = (ctypes.c_uint8 * (end - start)).from_address(start)
    return Region(name, start, np.frombuffer(memoryview(buffer), np.uint8), writable).bound(low, stop)


Mapping = tuple[int, int, bool]
"""First address, end, and whether it may be written to."""


def _mappings() -> list[Mapping]:
    """Mappings that the process may read now. Those that follow one another are one: a tensor may lie in
    both, as where a heap has grown since a fork."""
    spans: list[Mapping] = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, rights = line.split()[:2]
        low, stop = (int(x, 16) for x in span.split("-"))
        if rights[0] != "r" or line.endswith(("[vvar]", "[vsyscall]")):
            continue
        writable = rights[1] == "w"
        if spans and spans[-1][1:] == (low, writable):
            low = spans.pop()[0]
        spans.append((low, stop, writable))
    return spans
