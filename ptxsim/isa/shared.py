"""Plain loads and stores of shared memory by all 32 lanes: where they go is looked up if the same addresses
were met before, as they are in every turn of a loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptxsim.isa.access import Accessor, bandwidth, granules
from ptxsim.isa.table import Step
from ptxsim.isa.together import rows_of
from ptxsim.ptx.nodes import Address, Instruction, Operand, Reg
from ptxsim.state.cta import Cta, Warp
from ptxsim.state.memory import BadAccess
from ptxsim.state.registers import Mask
from ptxsim.state.window import OFFSET_MASK, RANK_SHIFT
from ptxsim.watch.lanes import LaneAccess
from ptxsim.watch.shadow import Where

REMEMBERED = 8192
"""Places of a launch that are kept."""


@dataclass(frozen=True)
class Spot:
    """Shared memory that an access of 32 lanes touches: its CTA, as rows of its values, and as granules."""

    rank: int
    rows: Where
    granules: Where
    bandwidth: int


class Whole:
    """An instruction's accesses to [register + offset] in shared memory: `count` values of `size` bytes."""

    def __init__(self, instruction: Instruction, address: Address, size: int, count: int) -> None:
        assert isinstance(address.base, Reg)
        self.instruction, self.size, self.count = instruction, size, count
        self.base, self.offset = address.base.index, address.offset
        self._access = Accessor(instruction, "shared")

    def find(self, warp: Warp) -> tuple[Cta, Spot] | None:
        """None where it goes to several CTAs, or nowhere: then it is not for here."""
        known = warp.cta.launch.spots
        register = warp.u32[self.base]
        key = register.tobytes(), self.offset, self.size * self.count
        spot = known.get(key)
        if spot is None:
            spot = self._look(warp, register)
            if spot is None:
                return None
            if len(known) >= REMEMBERED:
                known.clear()
            known[key] = spot
        return warp.cta.cluster.ctas[spot.rank], spot

    def _look(self, warp: Warp, register: NDArray[np.uint32]) -> Spot | None:
        addresses = register.astype(np.int64) + self.offset & 0xFFFFFFFF
        ranks, offsets = addresses >> RANK_SHIFT, addresses & OFFSET_MASK
        ctas, rank, width = warp.cta.cluster.ctas, int(ranks[0]), self.size * self.count
        if (ranks != rank).any() or rank >= len(ctas):
            return None
        try:
            rows = ctas[rank].shared.rows(offsets, width)
        except BadAccess:
            return None
        touched = granules(offsets, width, warp.cta.launch.granule)
        return Spot(rank, _dense(rows), _dense(touched), bandwidth(offsets, width))

    def load(self, warp: Warp) -> NDArray[Any] | None:
        """Unsigned [32, count], to be copied before anything else happens."""
        found = self.find(warp)
        if found is None:
            return None
        cta, spot = found
        order = cta.cluster.order
        number = order.warp_access(warp.agent, self.instruction)
        cta.cluster.shared[self.instruction.line] += spot.bandwidth
        cta.shadow.read(number, spot.granules, order.clocks[warp.agent])
        warp.lanes.add(order, LaneAccess(number, cta.shadow, spot.granules, None, False), False)
        return cta.shared.values(self.size, self.count)[spot.rows]

    def store(self, warp: Warp, values: NDArray[Any]) -> bool:
        """Store unsigned [32, count]."""
        found = self.find(warp)
        if found is None:
            return False
        cta, spot = found
        all_values, order = cta.shared.values(self.size, self.count), cta.cluster.order
        same = all_values[spot.rows].tobytes() == values.tobytes()
        all_values[spot.rows] = values
        number = order.warp_access(warp.agent, self.instruction)
        cta.cluster.shared[self.instruction.line] += spot.bandwidth
        cta.shadow.write(number, spot.granules, order.clocks[warp.agent], same)
        warp.lanes.add(order, LaneAccess(number, cta.shadow, spot.granules, None, True), same)
        return True


def quick_load(
    instruction: Instruction, targets: tuple[Operand, ...], size: int, count: int, usual: Step
) -> Step:
    """`usual`, quicker where all lanes load from one CTA's shared memory into registers of the same width."""
    whole, place = _whole(instruction, instruction.operands[1], size, count), register_rows(targets, size)
    if whole is None or place is None:
        return usual
    view, rows = place

    def step(warp: Warp, mask: Mask) -> None:
        values = whole.load(warp) if mask is None else None
        if values is None:
            usual(warp, mask)
        else:
            warp.tables[view][rows] = values.T

    return step


def quick_store(
    instruction: Instruction, sources: tuple[Operand, ...], size: int, count: int, usual: Step
) -> Step:
    """`usual`, quicker where all lanes store registers of the same width to one CTA's shared memory."""
    whole, place = _whole(instruction, instruction.operands[0], size, count), register_rows(sources, size)
    if whole is None or place is None:
        return usual
    view, rows = place

    def step(warp: Warp, mask: Mask) -> None:
        if mask is not None or not whole.store(warp, warp.tables[view][rows].T):
            usual(warp, mask)

    return step


def _whole(instruction: Instruction, address: Operand, size: int, count: int) -> Whole | None:
    if isinstance(address, Address) and isinstance(address.base, Reg) and address.base.file == 32:
        return Whole(instruction, address, size, count)
    return None


def register_rows(operands: tuple[Operand, ...], size: int) -> tuple[str, Any] | None:
    """The view and the rows of registers that are `size` bytes wide; None where any operand is another."""
    registers = [o.index for o in operands if isinstance(o, Reg) and o.file == 8 * size]
    return (f"u{8 * size}", rows_of(registers)) if len(registers) == len(operands) and size < 16 else None


def _dense(numbers: NDArray[Any]) -> Where:
    """A slice where they are consecutive: the same in less time."""
    first, size = int(numbers[0]), len(numbers)
    consecutive = (numbers == np.arange(first, first + size)).all()
    return slice(first, first + size) if consecutive else numbers
