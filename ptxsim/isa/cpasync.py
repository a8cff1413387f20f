"""Copies of 4, 8 or 16 bytes per lane from global to shared memory that go on in the background (PTX ISA,
"Data Movement and Conversion Instructions: cp.async, cp.async.commit_group, cp.async.wait_group,
cp.async.wait_all", "cp.async.mbarrier.arrive").

The copies of a warp are a queue: they land in the order of their issue, each with all its lanes. Groups
belong to lanes; as the queue is in order, a group is told by the last copy in it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ptxsim.isa.access import Accessor, bandwidth, granules, lanes, locate
from ptxsim.isa.mbarriers import barrier_at, distinct, guarded, must_know_init
from ptxsim.isa.operands import Read, read
from ptxsim.isa.syntax import Form
from ptxsim.isa.table import Act, Step, Unmodelled, Wait, translates
from ptxsim.ptx.nodes import Imm, Instruction, Negated, Operand, Reg
from ptxsim.state.barriers import MBarrier
from ptxsim.state.cta import Warp
from ptxsim.state.memory import BadAccess
from ptxsim.state.operation import Operation
from ptxsim.state.registers import LANES, Mask
from ptxsim.state.window import OFFSET_MASK, RANK_SHIFT, SHARED_WINDOW
from ptxsim.watch.findings import Fault, Finding
from ptxsim.watch.lanes import MOST, LaneAccess
from ptxsim.watch.order import GENERIC, Access

KIND = "cp.async"
MOST_GROUPS = 32
"""Committed groups of a lane that can be told apart; cp.async.wait_group takes smaller numbers."""
_Addresses = NDArray[np.int64]


class Copies:
    """The cp.async of one warp, numbered from 1: the epochs of an agent that stands for the queue.

    `last` [32] is each lane's last copy, `committed` [groups, 32] the last of each of its groups, the newest
    group first; 0 where there is none.
    """

    def __init__(self, warp: Warp) -> None:
        self.agent = warp.cta.cluster.order.agent(f"cp.async of {warp}")
        self.queue = KIND, warp.agent
        self.issued = 0
        self.last = np.zeros(LANES, np.int64)
        self.committed = np.zeros((MOST_GROUPS, LANES), np.int64)
        self.flying: dict[int, Operation] = {}
        self.known: dict[int, LaneAccess] = {}
        """Writes by lane, of each copy until the warp knows of it."""

    @classmethod
    def of(cls, warp: Warp) -> Copies:
        found = warp.started.get(KIND)
        if found is None:
            found = warp.started[KIND] = cls(warp)
        return found

    def issue(self, mask: Mask) -> int:
        """The number of the copy that these lanes start now."""
        self.issued += 1
        self.last[_some(mask)] = self.issued
        return self.issued

    def commit(self, mask: Mask) -> None:
        who = _some(mask)
        self.committed[1:, who] = self.committed[:-1, who]
        self.committed[0, who] = self.last[who]

    def latest(self, mask: Mask, left: int) -> int:
        """The last copy that has landed when each of the lanes has at most `left` groups under way."""
        return int(self.committed[left, _some(mask)].max())

    def unwaited(self) -> list[Operation]:
        """Copies that have not landed."""
        return list(self.flying.values())

    def landed(self, number: int, access: LaneAccess) -> None:
        """A copy has landed. Warps that wait for theirs at an mbarrier never ask for what is kept here."""
        if len(self.known) >= MOST:
            del self.known[next(iter(self.known))]
        self.known[number] = access

    def end(self, warp: Warp, target: int) -> None:
        """The lanes of the warp know, each of its own, that copies are over."""
        epochs = warp.cta.cluster.order.clocks[warp.agent].epochs
        before = int(epochs[self.agent])
        for number in [number for number in self.known if number <= target]:
            access = self.known.pop(number)
            if number > before:
                warp.lanes.keep(access)
        epochs[self.agent] = max(before, target)


def _some(mask: Mask) -> slice | NDArray[np.bool_]:
    return slice(None) if mask is None else mask


# --- copies -------------------------------------------------------------------------------------------------


@translates("cp.async.ca", "cp.async.cg")
def copy(instruction: Instruction, form: Form) -> Step:
    """[dst], [src], size {, bytes to read, or a predicate to read none} {, policy}: the rest is zeros."""
    target, source = (locate(operand) for operand in instruction.operands[:2])
    (length,) = instruction.operands[2:3]
    assert isinstance(length, Imm)
    size = int(length.value)
    amount, access = _amount(instruction, size), Accessor(instruction, "shared")

    def step(warp: Warp, mask: Mask) -> None:
        warp.acting = mask
        offsets = _own(access, warp, lanes(target(warp), mask))
        sources = lanes(source(warp), mask).copy()  # the register itself may change before the copy lands
        errand = _Copy(access, warp, Copies.of(warp).issue(mask), offsets, sources, size)
        if amount is not None:
            errand.amounts = lanes(amount(warp), mask).astype(np.int64)
            if (errand.amounts > size).any():
                text = f"{warp} copies {errand.amounts.max()} bytes into {size}"
                raise Fault(Finding("misuse", text, instruction))
        errand.start()

    return step


def _amount(instruction: Instruction, size: int) -> Read | None:
    """Number of bytes that each lane reads; None for all."""
    rest = list(instruction.operands[3:])
    if instruction.has("L2::cache_hint") and rest and _is_policy(rest[-1]):
        rest.pop()
    if not rest:
        return None
    if isinstance(rest[0], Negated) or (isinstance(rest[0], Reg) and rest[0].type == "pred"):
        ignored = read(rest[0], "pred")
        return lambda warp: np.where(ignored(warp), 0, size)
    return read(rest[0], "u32")


def _is_policy(operand: Operand) -> bool:
    return isinstance(operand, Reg) and operand.file == 64


def _own(access: Accessor, warp: Warp, addresses: _Addresses) -> _Addresses:
    """Offsets in the shared memory of the warp's own CTA."""
    plain = addresses & (SHARED_WINDOW - 1)
    if (plain >> RANK_SHIFT != warp.cta.rank).any():
        raise Fault(
            Finding("misuse", f"{warp} copies to the shared memory of another CTA", access.instruction)
        )
    return plain & OFFSET_MASK


class _Copy:
    """Effect of one cp.async of a warp when it lands. `amounts` are bytes to read by lane, None for all."""

    def __init__(
        self, access: Accessor, warp: Warp, number: int, offsets: _Addresses, sources: _Addresses, size: int
    ) -> None:
        self.instruction, self.warp, self.number = access.instruction, warp, number
        self.offsets, self.sources, self.size = offsets, sources, size
        self.amounts: NDArray[np.int64] | None = None
        self.copies, order = Copies.of(warp), warp.cta.cluster.order
        self.clock = warp.release()
        who = order.names[self.copies.agent]
        self.access = order.add(Access(self.copies.agent, number, GENERIC, who, self.instruction))
        cta, mask = warp.cta, warp.acting
        self.where = granules(offsets, size, cta.launch.granule)
        self.writes = LaneAccess(self.access, cta.shadow, self.where, mask, True)
        warp.lanes.meet(order, self.writes)

    def start(self) -> None:
        operation = Operation(self.instruction, self.land, (self,), self.copies.queue)
        self.copies.flying[self.number] = operation
        self.warp.cta.cluster.units.submit(operation)

    def land(self) -> None:
        cta = self.warp.cta
        del self.copies.flying[self.number]
        try:
            cta.shared.store(self.offsets, self._values())
        except BadAccess as bad:
            text = f"cp.async of {self.warp} accesses {bad.size} bytes at {bad.address:#x} of {bad.where}"
            raise Fault(Finding(bad.kind, text, self.instruction)) from None
        cta.cluster.shared[self.instruction.line] += bandwidth(self.offsets, self.size)
        cta.shadow.write(self.access, self.where, self.clock)
        self.copies.landed(self.number, self.writes)

    def _read(self) -> None:
        """Checks that this launch's writes to the sources are over."""
        sources = self.sources if self.amounts is None else self.sources[self.amounts > 0]
        written = self.warp.cta.launch.written
        if len(sources) and written.near(int(sources.min()), int(sources.max()) + self.size):
            where = granules(sources, self.size, written.granule)
            written.read(self.warp.cta.cluster.order, self.access, where, self.clock)

    def _values(self) -> NDArray[np.uint32]:
        """uint32 [lanes, size / 4]."""
        memory, words = self.warp.cta.launch.memory, self.size // 4
        self._read()
        if self.amounts is None:
            return memory.load(self.sources, 4, words)
        values = np.zeros((len(self.sources), words), np.uint32)
        whole = self.amounts == self.size
        if whole.any():
            values[whole] = memory.load(self.sources[whole], 4, words)
        for lane in np.flatnonzero(~whole & (self.amounts > 0)):
            address, amount = int(self.sources[lane]), int(self.amounts[lane])
            if address % self.size:
                raise BadAccess("misaligned", address, self.size, "global memory")
            values[lane].view(np.uint8)[:amount] = memory.window(address, amount)
        return values


# --- completion ---------------------------------------------------------------------------------------------


@translates("cp.async.commit_group")
def commit_group(instruction: Instruction, form: Form) -> Step:
    return lambda warp, mask: Copies.of(warp).commit(mask)


@translates("cp.async.wait_group", "cp.async.wait_all")
def wait_group(instruction: Instruction, form: Form) -> Act:
    """wait_group N: until each lane has at most N groups under way. wait_all commits and waits for all."""
    every = instruction.parts[2] == "wait_all"
    left = Imm(0) if every else instruction.operands[0]
    if not isinstance(left, Imm) or not 0 <= left.value < MOST_GROUPS:
        raise Unmodelled(instruction)
    count = int(left.value)

    def run(warp: Warp, mask: Mask) -> Wait | None:
        copies = Copies.of(warp)
        target = int(copies.last[_some(mask)].max()) if every else copies.latest(mask, count)
        flying = copies.flying.get(target)
        if flying is not None:
            return Wait(lambda: flying.landed, f"{instruction.opcode} {count}", flying.signals[0])
        if every:
            copies.commit(mask)
        copies.end(warp, target)
        return None

    return Act(run)


@translates("cp.async.mbarrier.arrive")
def mbarrier_arrive(instruction: Instruction, form: Form) -> Act:
    """Every lane arrives once when its copies so far have landed. Without .noinc the barrier expects that
    arrival in addition to those that it was initialised for."""
    where, access = locate(instruction.operands[0]), Accessor(instruction, "shared")
    counted = instruction.has("noinc")

    def run(warp: Warp, mask: Mask) -> None:
        for address, who in distinct(where(warp), mask):
            barrier = barrier_at(access, warp, address)
            must_know_init(access, warp, barrier)
            if not counted:
                barrier.pending += len(who)
            _arrive_later(access, warp, barrier, who)

    return Act(run, signals=True)


def _arrive_later(access: Accessor, warp: Warp, barrier: MBarrier, who: NDArray[np.intp]) -> None:
    copies, cluster = Copies.of(warp), warp.cta.cluster
    clock, count = warp.release(), len(who)
    clock.epochs[copies.agent] = max(int(clock.epochs[copies.agent]), int(copies.last[who].max()))

    def land() -> None:
        guarded(access, warp, lambda: barrier.arrive(count, clock, access.instruction.line))

    cluster.units.submit(Operation(access.instruction, land, (barrier,), copies.queue))
