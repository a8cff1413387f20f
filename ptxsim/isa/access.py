"""Memory accesses of warps: from an address operand to bytes, watched.

Everything in here moves unsigned values [lanes, count] of 1, 2, 4 or 8 bytes; `lanes` are those in the mask.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptxsim.isa.operands import WrongOperand, constant_of, read
from ptxsim.isa.syntax import SPACES
from ptxsim.ptx.nodes import Address, Imm, Instruction, Operand, Reg, Symbol
from ptxsim.state.cta import Cta, Warp
from ptxsim.state.memory import BadAccess, extent
from ptxsim.state.registers import LANES, Mask
from ptxsim.state.window import LOCAL_WINDOW, OFFSET_MASK, RANK_SHIFT, SHARED_WINDOW
from ptxsim.watch.findings import Fault, Finding
from ptxsim.watch.flags import Strength
from ptxsim.watch.lanes import LaneAccess
from ptxsim.watch.order import Order

Addresses = NDArray[np.int64]
Locate = Callable[[Warp], Addresses]
"""Addresses [32] of an operand, as int64."""


def space_of(instruction: Instruction) -> str:
    """The state space among the modifiers, or "" for generic addresses."""
    return next((SPACES[part] for part in instruction.modifiers if part in SPACES), "")


def locate(operand: Operand) -> Locate:
    """Function that computes the addresses of an operand [a + offset]."""
    if not isinstance(operand, Address):
        operand = Address(operand) if isinstance(operand, Reg | Symbol | Imm) else operand
    if not isinstance(operand, Address):
        raise WrongOperand(f"a {operand.__class__.__name__} is no address")
    base, offset = operand.base, operand.offset
    if isinstance(base, Imm):
        constant = np.full(LANES, int(base.value) + offset, np.int64)
        return lambda warp: constant
    if isinstance(base, Symbol):
        name, plus = base.name, base.offset + offset
        return constant_of(operand, np.int64, lambda warp: warp.cta.symbols[name] + plus)
    value = read(base, "u32" if base.file == 32 else "s64")
    if base.file == 32:
        return lambda warp: value(warp).astype(np.int64) + offset & 0xFFFFFFFF
    return (lambda warp: value(warp) + offset) if offset else value


def lanes(values: NDArray[Any], mask: Mask) -> NDArray[Any]:
    """The rows of those lanes that take part."""
    return values if mask is None else values[mask]


Part = tuple[Any, Addresses, NDArray[np.intp] | None]
"""(memory: a CTA's shared memory, "global" or "local"; addresses in it; which of the lanes, None for all)"""


class Accessor:
    """Loads and stores of one instruction. `space` is "shared", "global", "local" or "" for generic."""

    def __init__(self, instruction: Instruction, space: str) -> None:
        self.instruction, self.space = instruction, space
        self.strength = Strength.of(instruction.opcode)
        self.by_lane = instruction.name in ("ld", "st") and not self.strength.strong
        self.constant = instruction.has("param") or instruction.has("const")

    def load(self, warp: Warp, addresses: Addresses, size: int, count: int) -> NDArray[Any]:
        """Unsigned [lanes, count] from `addresses` [lanes]."""
        parts = self._parts(warp, addresses)
        if self.strength.strong:
            self.observe(warp, parts)
        if len(parts) == 1:
            return self._load(warp, parts[0][0], parts[0][1], size, count)
        found = np.empty((len(addresses), count), f"u{size}")
        for space, offsets, where in parts:
            found[where] = self._load(warp, space, offsets, size, count)
        return found

    def store(self, warp: Warp, addresses: Addresses, values: NDArray[Any]) -> None:
        for space, offsets, where in self._parts(warp, addresses):
            self._store(warp, space, offsets, values if where is None else values[where])
            if self.strength.strong:
                self.tell(warp, space, offsets)

    def in_global_memory(self, warp: Warp, addresses: Addresses, width: int) -> list[NDArray[Any]] | None:
        """`width` bytes at each of the addresses, as they will be at any later time, or None where some lie
        in another memory."""
        if any(space != "global" for space, _, _ in self._parts(warp, addresses)):
            return None
        memory = warp.cta.launch.memory
        return [memory.window(address, width) for address in sorted(set(addresses.tolist()))]

    def observe(self, warp: Warp, parts: list[Part]) -> None:
        """The warp reads, by a strong access, what others may have told there."""
        flags, seen = warp.cta.launch.flags, warp.observed
        if not flags:
            return
        for space, offsets, _ in parts:
            for key in _keys(space, offsets):
                told = flags.read(key)
                if told is None:
                    continue
                if self.strength.acquires:
                    warp.cta.cluster.order.hears(warp.agent, told, self.instruction.line)
                elif not seen or seen[-1] is not told:
                    seen.append(told)

    def tell(self, warp: Warp, space: Any, offsets: Addresses, updates: bool = False) -> None:
        """The warp writes, by a strong access, what others may read there."""
        flags, told = warp.cta.launch.flags, warp.released
        if self.strength.releases:
            told = warp.tells(self.instruction.line)
        elif told is not None:
            told = told.but(warp.withheld(), warp.cta.cluster.number)
        if told is not None or flags:
            for key in _keys(space, offsets):
                flags.write(key, told, updates)

    def watch(
        self, warp: Warp, cta: Cta, offsets: Addresses, width: int, write: bool, same: bool = False
    ) -> None:
        """Tell the shadow of a CTA's shared memory that `width` bytes at each offset are accessed; `same` if
        what is written is there already."""
        order = cta.cluster.order
        number = order.warp_access(warp.agent, self.instruction)
        where = granules(offsets, width, cta.launch.granule)
        clock = order.clocks[warp.agent]
        cta.cluster.shared[self.instruction.line] += bandwidth(offsets, width)
        if write:
            cta.shadow.write(number, where, clock, same)
        else:
            cta.shadow.read(number, where, clock)
        if self._is_by_lane(warp, len(offsets)):
            warp.lanes.add(order, LaneAccess(number, cta.shadow, where, warp.acting, write), same)

    def _is_by_lane(self, warp: Warp, places: int) -> bool:
        """True if the order of the warp's lanes matters: each accesses a place of its own."""
        return self.by_lane and places == (LANES if warp.acting is None else warp.acting.sum())

    def _meet(self, warp: Warp, number: int, where: NDArray[np.intp], places: int, write: bool) -> None:
        """The warp accesses what it wrote itself to global memory."""
        if self._is_by_lane(warp, places):
            access = LaneAccess(number, None, where, warp.acting, write)
            warp.lanes.meet_globally(warp.cta.cluster.order, access, warp.cta.launch.written.granule)

    def _load(self, warp: Warp, space: Any, offsets: Addresses, size: int, count: int) -> NDArray[Any]:
        try:
            if isinstance(space, Cta):
                values = space.shared.load(offsets, size, count)
                self.watch(warp, space, offsets, size * count, write=False)
                return values
            if space == "local":
                return warp.local.load(offsets & (LOCAL_WINDOW - 1), size, count)
            launch = warp.cta.launch
            values = launch.memory.load(offsets, size, count)
            written = launch.written
            if written and not self.constant and written.near(*extent(offsets, size * count)):
                order, where = self._global(warp, offsets, size * count)
                number = order.warp_access(warp.agent, self.instruction)
                if written.read(order, number, where, order.clocks[warp.agent]):
                    self._meet(warp, number, where, len(offsets), write=False)
            return values
        except BadAccess as bad:
            raise self._fault(warp, bad) from None

    def _store(self, warp: Warp, space: Any, offsets: Addresses, values: NDArray[Any]) -> None:
        try:
            if isinstance(space, Cta):
                size, count = values.dtype.itemsize, values.shape[1]
                same = space.shared.load(offsets, size, count).tobytes() == values.tobytes()
                space.shared.store(offsets, values)
                self.watch(warp, space, offsets, size * count, write=True, same=same)
            elif space == "local":
                warp.local.store(offsets & (LOCAL_WINDOW - 1), values)
            else:
                self._store_globally(warp, offsets, values)
        except BadAccess as bad:
            raise self._fault(warp, bad) from None

    def _store_globally(self, warp: Warp, offsets: Addresses, values: NDArray[Any]) -> None:
        launch, (count, size) = warp.cta.launch, (values.shape[1], values.dtype.itemsize)

        def changed() -> NDArray[np.bool_]:
            different = (launch.memory.load(offsets, size, count) != values).any(axis=1)
            return different.repeat(len(where) // len(offsets))

        order, where = self._global(warp, offsets, size * count)
        number = order.warp_access(warp.agent, self.instruction)
        if launch.written.write(order, number, where, order.clocks[warp.agent], changed):
            self._meet(warp, number, where, len(offsets), write=True)
        if self._is_by_lane(warp, len(offsets)):
            warp.lanes.keep(LaneAccess(number, None, where, warp.acting, True))
        launch.memory.store(offsets, values)
        warp.cta.cluster.units.landings += 1

    def _global(self, warp: Warp, offsets: Addresses, width: int) -> tuple[Order, NDArray[np.intp]]:
        """The order that the warp takes part in, and the granules of global memory."""
        return warp.cta.cluster.order, granules(offsets, width, warp.cta.launch.written.granule)

    def _parts(self, warp: Warp, addresses: Addresses) -> list[Part]:
        """Addresses, which may lie in several memories, by memory."""
        space = self.space
        if space == "shared" or (space == "" and (addresses >= SHARED_WINDOW).all()):
            return self._of_shared(warp, addresses)
        if space or (addresses < LOCAL_WINDOW).all():
            return [(space or "global", addresses, None)]
        everyone = np.arange(len(addresses))
        found: list[Part] = []
        inside = addresses >= SHARED_WINDOW
        if inside.any():
            for part, offsets, where in self._of_shared(warp, addresses[inside]):
                mine = everyone[inside]
                found.append((part, offsets, mine if where is None else mine[where]))
        local = ~inside & (addresses >= LOCAL_WINDOW)
        for name, which in (("local", local), ("global", ~inside & ~local)):
            if which.any():
                found.append((name, addresses[which], everyone[which]))
        return found

    def _of_shared(self, warp: Warp, addresses: Addresses) -> list[Part]:
        plain = addresses & (SHARED_WINDOW - 1) if self.space == "" else addresses
        rank = int(np.bitwise_or.reduce(plain)) >> RANK_SHIFT
        if rank == 0 or int(np.bitwise_and.reduce(plain)) >> RANK_SHIFT == rank:
            offsets = plain & OFFSET_MASK if rank else plain
            return [(self.cta(warp, rank, int(offsets[0])), offsets, None)]
        ranks, offsets = plain >> RANK_SHIFT, plain & OFFSET_MASK
        everyone = np.arange(len(addresses))
        groups = [(int(r), ranks == r) for r in np.unique(ranks)]
        return [(self.cta(warp, r, int(offsets[at][0])), offsets[at], everyone[at]) for r, at in groups]

    def cta(self, warp: Warp, rank: int, offset: int = 0) -> Cta:
        """The CTA of a rank of the warp's cluster."""
        ctas = warp.cta.cluster.ctas
        if rank < len(ctas):
            found = ctas[rank]
            if found.ended is not None:
                order = warp.cta.cluster.order
                number = order.warp_access(warp.agent, self.instruction)
                text = f"accesses the shared memory of CTA {found.rank}, which is gone"
                order.report("exited", text, number, found.ended)
            return found
        bad = BadAccess("out of bounds", rank << RANK_SHIFT | offset, 1, f"a cluster of {len(ctas)} CTAs")
        raise self._fault(warp, bad)

    def _fault(self, warp: Warp, bad: BadAccess) -> Fault:
        return Fault(
            Finding(
                bad.kind,
                f"{warp} accesses {bad.size} bytes at {bad.address:#x} of {bad.where}",
                self.instruction,
            )
        )


def _keys(space: Any, offsets: Addresses) -> Iterator[Hashable]:
    """Keys of flags, by place; local memory has none."""
    places = set(offsets.tolist())
    if isinstance(space, Cta):
        number = space.cluster.number
        return ((number, space.rank, place) for place in places)
    return iter(places if space == "global" else ())


BANKS = 32
ROW = 4 * BANKS
"""Bytes of one word of every bank."""


def bandwidth(offsets: Addresses, width: int) -> int:
    """Bytes of shared memory's bandwidth that an access of a warp takes: 128 for every word in the bank from
    which most different words are wanted. That is the least it can take: hardware may split it further."""
    first = int(offsets[0]) & -ROW  # moved by whole rows, an access meets the same banks
    return _bandwidth((offsets - first).tobytes(), width)


@functools.lru_cache(maxsize=1 << 14)
def _bandwidth(places: bytes, width: int) -> int:
    """Bandwidth of an access whose first place is in the first row: few differ, and counting takes long."""
    words = np.unique(np.frombuffer(places, np.int64)[:, None] // 4 + np.arange(-(-width // 4)))
    return int(np.bincount(words % BANKS).max()) * ROW


def granules(offsets: Addresses, width: int, granule: int) -> NDArray[np.intp]:
    """Numbers of the granules that `width` bytes at each offset touch; some more than once."""
    first = offsets // granule
    if width <= granule:
        return first
    return (first[:, None] + np.arange(width // granule)).reshape(-1)
