"""Bulk copies: TMA tensor tiles and plain ranges, in and out of shared memory (PTX ISA, "cp.async.bulk",
"cp.async.bulk.tensor", "cp.reduce.async.bulk")."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptxsim.isa.access import Accessor, locate
from ptxsim.isa.asynchronous import Errand, byte_granules, groups, submit
from ptxsim.isa.mbarriers import barrier_at, cta_and_offset
from ptxsim.isa.operands import Read, read
from ptxsim.isa.syntax import SPACES, Form
from ptxsim.isa.table import Act, Wait, translates
from ptxsim.ptx.nodes import Address, Instruction, Operand
from ptxsim.state.barriers import MBarrier
from ptxsim.state.cta import Cta, Warp
from ptxsim.state.memory import BadAccess
from ptxsim.state.registers import ONE_LANE, Mask, lanes_of
from ptxsim.state.window import RANK_SHIFT
from ptxsim.units import tma
from ptxsim.units.reduction import DTYPES
from ptxsim.units.reduction import reduce as reduced
from ptxsim.watch.findings import Fault, Finding
from ptxsim.watch.lanes import LaneAccess

BULK = "bulk copies out of shared memory"
WRITES = "writes of bulk copies"
REDUCTIONS = ("add", "min", "max", "inc", "dec", "and", "or", "xor")


@dataclass(frozen=True)
class Tile:
    """The [map, {coordinates}] operand of a tensor copy."""

    map: Read
    coordinates: tuple[Read, ...]

    @classmethod
    def of(cls, operand: Operand) -> Tile:
        assert isinstance(operand, Address)
        where = locate(Address(operand.base, operand.offset))
        return cls(where, tuple(read(c, "s32") for c in operand.coords))

    def at(self, warp: Warp, lane: int) -> tuple[tma.TensorMap, tuple[int, ...]]:
        raw = warp.cta.launch.memory.window(int(self.map(warp)[lane]), 64).tobytes()
        return tma.TensorMap.decode(raw), tuple(int(c(warp)[lane]) for c in self.coordinates)


# --- into shared memory, signalled at an mbarrier -----------------------------------------------------------


def _destinations(access: Accessor, warp: Warp, address: int, mask: int | None) -> list[tuple[Cta, int]]:
    """Destinations of a copy: the CTA of the address, or all CTAs of a multicast mask at the same offset."""
    cta, offset = cta_and_offset(access, warp, address)
    if mask is None:
        return [(cta, offset)]
    return [(access.cta(warp, rank), offset) for rank in range(16) if mask >> rank & 1]


def _signalled(access: Accessor, warp: Warp, address: int, to: Cta, multicast: bool, pair: bool) -> MBarrier:
    """The mbarrier told of what arrives in a CTA: with multicast that of each destination, and with
    .cta_group::2 the one in the destination's pair whose parity is that of the address given."""
    if not multicast:
        return barrier_at(access, warp, address)
    home, offset = cta_and_offset(access, warp, address)
    rank = to.rank & ~1 | home.rank & 1 if pair else to.rank
    return barrier_at(access, warp, rank << RANK_SHIFT | offset)


def _arriving(
    access: Accessor,
    warp: Warp,
    errand: Errand,
    arrivals: list[tuple[Cta, int, MBarrier]],
    fetch: Callable[[int], NDArray[Any]],
    counted: int | None = None,
) -> None:
    """Start a copy whose bytes are `fetch(offset)`, for each (CTA, offset, mbarrier). `counted` bytes are
    completed, all of them by default."""

    def land() -> None:
        for cta, offset, barrier in arrivals:
            try:
                image = fetch(offset)
                cta.shared.window(offset, image.size)[:] = image
            except BadAccess as bad:
                raise fault(warp, access.instruction, bad) from None
            errand.writes(cta, offset, image.size)
            warp.cta.cluster.traffic["TMA bytes in"] += image.size
            barrier.learn(errand.load)
            barrier.deliver(image.size if counted is None else counted)

    for _, _, barrier in arrivals:
        errand.signals(warp, barrier)
    submit(warp, access.instruction, land, tuple(b for _, _, b in arrivals))


def fault(warp: Warp, instruction: Instruction, bad: BadAccess) -> Fault:
    text = f"an operation of {warp} accesses {bad.size} bytes at {bad.address:#x} of {bad.where}"
    return Fault(Finding(bad.kind, text, instruction))


def _aligned(warp: Warp, instruction: Instruction, address: int, to: int, what: str) -> None:
    if address % to:
        text = f"{warp} gives {what} at {address:#x}, which is no multiple of {to}"
        raise Fault(Finding("misaligned", text, instruction))


def _placed(
    warp: Warp, instruction: Instruction, map: tma.TensorMap, at: tuple[int, ...], writes: bool
) -> None:
    """Faults where hardware takes a box's place for an illegal instruction, wherever the tensor ends."""
    if at[0] * map.bits % 128 or (map.padded and at[0] % 128):
        text = f"{warp} gives a box at {at} of {map.element}: the first is no multiple of 16 bytes"
        raise Fault(Finding("misaligned", text, instruction))
    if writes and min(at) < 0:
        text = f"{warp} writes a box at {at}, which begins before the tensor"
        raise Fault(Finding("out of bounds", text, instruction))


def _mapped(warp: Warp, instruction: Instruction, map: tma.TensorMap) -> None:
    """Faults where hardware takes a load for an illegal access: it looks up the base of a tensor, even where
    strides lead from there to memory that is mapped. Stores do not."""
    try:
        warp.cta.launch.memory.window(map.address, 1)
    except BadAccess as bad:
        text = f"{warp} loads by a tensor map whose base, {map.address:#x}, is not mapped"
        raise Fault(Finding(bad.kind, text, instruction)) from None


@translates("cp.async.bulk.tensor")
def tensor_copy(instruction: Instruction, form: Form) -> Act:
    if _out_of(instruction):
        return _tensor_store(instruction, None)
    access, multicast = Accessor(instruction, "shared"), instruction.has("multicast::cluster")
    target, tile = locate(instruction.operands[0]), Tile.of(instruction.operands[1])
    barrier = locate(instruction.operands[2])
    ranks = read(instruction.operands[3], "u16") if multicast else None
    pair = instruction.has("cta_group::2")

    def run(warp: Warp, mask: Mask) -> None:
        for lane in lanes_of(mask):
            map, coordinates = tile.at(warp, lane)
            chosen = int(ranks(warp)[lane]) if ranks else None
            places = _destinations(access, warp, int(target(warp)[lane]), chosen)
            _aligned(warp, instruction, places[0][1], 128, "a destination")
            _placed(warp, instruction, map, coordinates, writes=False)
            _mapped(warp, instruction, map)
            at = int(barrier(warp)[lane])
            arrivals = [(c, o, _signalled(access, warp, at, c, multicast, pair)) for c, o in places]
            errand = Errand.alone(warp, f"a TMA load of {warp}", instruction)
            memory = warp.cta.launch.memory

            def fetch(
                offset: int, map: tma.TensorMap = map, at: tuple[int, ...] = coordinates
            ) -> NDArray[Any]:
                box = tma.box_at(map, at)
                if _near(warp, box):
                    errand.reads_global(warp, *box.rows())  # noqa: B023
                return tma.to_shared(map, offset, tma.load(map, box, memory))  # noqa: B023

            _arriving(access, warp, errand, arrivals, fetch, map.box_bytes)

    return Act(run)


@translates("cp.async.bulk")
def copy(instruction: Instruction, form: Form) -> Act:
    """A range of bytes: global to shared, shared to another CTA's shared, or shared to global."""
    if _out_of(instruction):
        return _range_out(instruction, None)
    return _range_in(instruction, "global" in form.flags, None)


def _out_of(instruction: Instruction) -> bool:
    """True if it copies from shared to global memory: state spaces stand in the order of the operands."""
    return next(m for m in instruction.modifiers if m in SPACES) == "global"


def _range_in(instruction: Instruction, from_global: bool, operation: tuple[str, str] | None) -> Act:
    access, multicast = Accessor(instruction, "shared"), instruction.has("multicast::cluster")
    target, source = (locate(o) for o in instruction.operands[:2])
    size, barrier = read(instruction.operands[2], "u32"), locate(instruction.operands[3])
    ranks = read(instruction.operands[4], "u16") if multicast else None

    def run(warp: Warp, mask: Mask) -> None:
        for lane in lanes_of(mask):
            chosen = int(ranks(warp)[lane]) if ranks else None
            places = _destinations(access, warp, int(target(warp)[lane]), chosen)
            at, origin, count = int(barrier(warp)[lane]), int(source(warp)[lane]), int(size(warp)[lane])
            for what, number in (("a destination", places[0][1]), ("a source", origin), ("a size", count)):
                _aligned(warp, instruction, number, 16, what)
            arrivals = [(c, o, _signalled(access, warp, at, c, multicast, False)) for c, o in places]
            errand = Errand.alone(warp, f"a bulk copy of {warp}", instruction, operation is not None)
            own, place = cta_and_offset(access, warp, origin) if not from_global else (warp.cta, 0)

            def fetch(
                offset: int,
                own: Cta = own,
                place: int = place,
                origin: int = origin,
                count: int = count,
                errand: Errand = errand,
                arrivals: list[tuple[Cta, int, MBarrier]] = arrivals,
            ) -> NDArray[Any]:
                if from_global:
                    errand.reads_global(warp, np.array([origin]), count)
                    return warp.cta.launch.memory.window(origin, count)
                errand.reads(own, place, count)
                data = own.shared.window(place, count)
                if operation is None:
                    return data
                before = arrivals[0][0].shared.window(offset, count)
                return reduce_bytes(before, data, *operation)

            _arriving(access, warp, errand, arrivals, fetch)

    return Act(run)


def _near(warp: Warp, box: tma.Box) -> bool:
    """True if this launch may have written to the box."""
    if box.empty:
        return False
    span = sum((extent - 1) * stride for extent, stride in zip(box.extents, box.strides))
    return warp.cta.launch.written.near(box.address, box.address + span + 1)


# --- out of shared memory, in groups that threads commit ----------------------------------------------------


def store_queue(warp: Warp) -> str:
    """Name of the queue of a warp's bulk stores."""
    return f"bulk copies of {warp}"


def _out(
    warp: Warp,
    instruction: Instruction,
    lane: int,
    source: tuple[Cta, int, int],
    write: Callable[[NDArray[Any], Errand], None],
) -> None:
    """Start a copy of (CTA, offset, bytes) of shared memory that ends in `write`, which the errand given to
    it does: it is over later than the reading."""
    cta, offset, size = source
    reduces = instruction.has("reduce")
    errand = Errand.in_queue(warp, store_queue(warp), f"a bulk store of {warp}", instruction)
    writes = Errand.in_queue(
        warp, f"writes of {store_queue(warp)}", f"a bulk store of {warp}", instruction, reduces
    )

    def land() -> None:
        try:
            data = cta.shared.window(offset, size)
            errand.reads(cta, offset, size)
            where = byte_granules(cta, offset, size)
            errand.by_lane.append(LaneAccess(errand.number, cta.shadow, where, ONE_LANE[lane], False))
            write(data, writes)
        except BadAccess as bad:
            raise fault(warp, instruction, bad) from None
        cta.cluster.traffic["TMA bytes out"] += size

    kind, written = groups(warp, BULK), groups(warp, WRITES)
    operation = submit(warp, instruction, land, (kind,), ("bulk", warp.agent))
    kind.add(lane, operation, errand)
    written.add(lane, operation, writes)


def _tensor_store(instruction: Instruction, operation: str | None) -> Act:
    access = Accessor(instruction, "shared")
    tile, source = Tile.of(instruction.operands[0]), locate(instruction.operands[1])

    def run(warp: Warp, mask: Mask) -> None:
        started, memory = set(), warp.cta.launch.memory
        for lane in lanes_of(mask):
            map, coordinates = tile.at(warp, lane)
            cta, offset = cta_and_offset(access, warp, int(source(warp)[lane]))
            _aligned(warp, instruction, offset, 128, "a source")
            _placed(warp, instruction, map, coordinates, writes=True)

            def write(
                data: NDArray[Any],
                errand: Errand,
                map: tma.TensorMap = map,
                at: tuple[int, ...] = coordinates,
                offset: int = offset,
            ) -> None:
                box, dense = tma.box_at(map, at), tma.from_shared(map, offset, data)

                def changed() -> NDArray[np.bool_]:
                    return box.view(memory) != dense.reshape(box.shape)[box.inside]

                errand.writes_global(warp, *box.rows(), changed)
                tma.store(map, box, dense, memory, operation)

            # Lanes that store the same tile twice store the same bytes: once is enough.
            same = map, coordinates, offset
            if operation is None and same in started:
                continue
            started.add(same)
            _out(warp, instruction, lane, (cta, offset, map.box_bytes), write)

    return Act(run)


def _range_out(instruction: Instruction, operation: tuple[str, str] | None) -> Act:
    access = Accessor(instruction, "shared")
    target, source = (locate(o) for o in instruction.operands[:2])
    size = read(instruction.operands[2], "u32")

    def run(warp: Warp, mask: Mask) -> None:
        memory = warp.cta.launch.memory
        for lane in lanes_of(mask):
            to, count = int(target(warp)[lane]), int(size(warp)[lane])
            cta, offset = cta_and_offset(access, warp, int(source(warp)[lane]))
            for what, number in (("a destination", to), ("a source", offset), ("a size", count)):
                _aligned(warp, instruction, number, 16, what)

            def write(data: NDArray[Any], errand: Errand, to: int = to, count: int = count) -> None:
                there = memory.window(to, count)
                errand.writes_global(warp, np.array([to]), count, lambda: there != data)
                there[:] = data if operation is None else reduce_bytes(there, data, *operation)

            _out(warp, instruction, lane, (cta, offset, count), write)

    return Act(run)


@translates("cp.reduce.async.bulk.tensor")
def tensor_reduce(instruction: Instruction, form: Form) -> Act:
    return _tensor_store(instruction, form.named["reduced"])


@translates("cp.reduce.async.bulk")
def reduce(instruction: Instruction, form: Form) -> Act:
    what = form.one_of(*REDUCTIONS), form.type
    return _range_out(instruction, what) if _out_of(instruction) else _range_in(instruction, False, what)


def reduce_bytes(there: NDArray[Any], data: NDArray[Any], operation: str, type: str) -> NDArray[Any]:
    """Contents of memory after `data` was combined with what was `there`."""
    before, new = (np.ascontiguousarray(x).view(DTYPES[type]) for x in (there, data))
    return reduced(operation, type, before, new).view(np.uint8)


@translates("cp.async.bulk.commit_group")
def commit_group(instruction: Instruction, form: Form) -> Act:
    def run(warp: Warp, mask: Mask) -> None:
        groups(warp, BULK).commit(mask, instruction.line)
        groups(warp, WRITES).commit(mask, instruction.line)

    return Act(run)


@translates("cp.async.bulk.wait_group")
def wait_group(instruction: Instruction, form: Form) -> Act:
    """.read waits until the sources are read, else until the results are visible as well: both happen at once
    here, but a warp knows what it has waited for."""
    left, kinds = read(instruction.operands[0], "u32"), [BULK]
    if not instruction.has("read"):
        kinds.append(WRITES)

    def run(warp: Warp, mask: Mask) -> Wait | None:
        for kind in kinds:
            wait = groups(warp, kind).wait(warp, mask, int(left(warp)[0]), BULK, instruction.line)
            if wait is not None:
                return wait
        return None

    return Act(run)
