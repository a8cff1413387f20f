"""Base of the asynchronous instructions: how an operation knows what its issuer knew, and groups of
operations that a thread commits and waits for."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ptxsim.isa.table import Wait
from ptxsim.ptx.nodes import Instruction
from ptxsim.state.barriers import MBarrier
from ptxsim.state.cta import Cta, Warp
from ptxsim.state.operation import Operation
from ptxsim.state.registers import LANES, Mask, lanes_of
from ptxsim.watch.clock import Clock
from ptxsim.watch.lanes import LaneAccess
from ptxsim.watch.order import ASYNC, Access
from ptxsim.watch.shadow import Where

LOADS = "loads in flight"


@dataclass(frozen=True)
class Errand:
    """An asynchronous access under way: the number of its access and what it may rely on."""

    number: int
    clock: Clock
    agent: int
    epoch: int
    load: int = -1
    by_lane: list[LaneAccess] = field(default_factory=list)
    """Reads that the lane which waits for it knows to be over then, and no other lane."""

    @classmethod
    def in_queue(
        cls, warp: Warp, queue: str, who: str, instruction: Instruction, reduces: bool = False
    ) -> Errand:
        """The next of a queue whose operations end in order."""
        order = warp.cta.cluster.order
        agent = order.agent(queue)
        clock = warp.release()
        own = order.clocks[agent]
        epoch = int(own.epochs[agent])
        own.epochs[agent] += 1
        clock.epochs[agent] = epoch - 1
        number = order.add(Access(agent, epoch, ASYNC, who, instruction, reduces=reduces))
        return cls(number, clock, agent, epoch)

    @classmethod
    def alone(
        cls, warp: Warp, who: str, instruction: Instruction, reduces: bool = False, proxy: str = ASYNC
    ) -> Errand:
        """One that is waited for by itself, at an mbarrier."""
        order = warp.cta.cluster.order
        agent, load = order.agent(LOADS), order.loads
        order.loads += 1
        clock = warp.release()
        number = order.add(Access(agent, 0, proxy, who, instruction, load, reduces))
        return cls(number, clock, agent, 0, load)

    def reads(self, cta: Cta, start: int, size: int) -> None:
        """It reads bytes of shared memory."""
        self.moves(cta, size)
        cta.shadow.read(self.number, byte_granules(cta, start, size), self.clock)

    def reads_chunks(self, cta: Cta, chunks: NDArray[np.intp], size: int) -> None:
        """It reads 16-byte chunks of shared memory, of which `size` bytes are its own share."""
        self.moves(cta, size)
        cta.shadow.read(self.number, chunk_granules(chunks, cta.launch.granule), self.clock)

    def writes(self, cta: Cta, start: int, size: int) -> None:
        self.moves(cta, size)
        cta.shadow.write(self.number, byte_granules(cta, start, size), self.clock)

    def reads_global(self, warp: Warp, starts: NDArray[np.int64], size: int) -> None:
        """It reads `size` bytes of global memory from each of some addresses on."""
        written = warp.cta.launch.written
        if len(starts) and written.near(int(starts.min()), int(starts.max()) + size):
            where = rows_of_granules(starts, size, written.granule).reshape(-1)
            written.read(warp.cta.cluster.order, self.number, where, self.clock)

    def writes_global(
        self, warp: Warp, starts: NDArray[np.int64], size: int, changed: Callable[[], NDArray[np.bool_]]
    ) -> None:
        """It writes `size` bytes of global memory from each of some addresses on; `changed` says which of
        them become others, bool [addresses, size]."""
        if not len(starts):
            return
        written = warp.cta.launch.written
        where = rows_of_granules(starts, size, written.granule)
        missing = where.shape[1] * written.granule - size

        def which() -> NDArray[np.bool_]:
            bytes = np.pad(changed().reshape(len(starts), size), ((0, 0), (0, missing)))
            return bytes.reshape(*where.shape, -1).any(axis=2).reshape(-1)

        written.write(warp.cta.cluster.order, self.number, where.reshape(-1), self.clock, which)

    def moves(self, cta: Cta, size: int) -> None:
        """It takes that many bytes of shared memory's bandwidth. The memory must still be there."""
        cluster = cta.cluster
        if cta.ended is not None:
            text = f"accesses the shared memory of CTA {cta.rank}, which is gone"
            cluster.order.report("exited", text, self.number, cta.ended)
        cluster.shared[cluster.order.accesses[self.number].instruction.line] += size

    def signals(self, warp: Warp, barrier: MBarrier) -> None:
        """Its end is signalled to an mbarrier, which must have been made visible to the asynchronous
        proxy."""
        order = warp.cta.cluster.order
        if barrier.announced or self.agent in barrier.users:
            return
        barrier.users.add(self.agent)
        if not (order.known(barrier.made, self.clock) and order.visible(barrier.made, self.clock)):
            order.report(
                "missing fence", f"signals {barrier.place} before it can see", self.number, barrier.made
            )


def rows_of_granules(starts: NDArray[np.int64], size: int, granule: int) -> NDArray[np.int64]:
    """Granules [addresses, granules] of as many bytes from addresses on that are multiples of 16."""
    return starts[:, None] // granule + np.arange(-(-size // granule))


def chunk_granules(chunks: NDArray[np.intp], granule: int) -> NDArray[np.intp]:
    each = 16 // granule
    return (chunks[:, None] * each + np.arange(each)).reshape(-1) if each > 1 else chunks


def byte_granules(cta: Cta, start: int, size: int) -> Where:
    granule = cta.launch.granule
    return slice(start // granule, -(-(start + size) // granule))


@dataclass(frozen=True)
class Group:
    """Operations committed together, by the instruction on a PTX line."""

    started: list[tuple[Operation, Errand]]
    line: int


@dataclass
class Groups:
    """Operations of one kind that the lanes of a warp have started, in groups as they committed them."""

    open: list[tuple[int, Operation, Errand]] = field(default_factory=list)
    """(lane, operation, errand) since the last commit."""
    closed: list[list[Group]] = field(default_factory=lambda: [[] for _ in range(LANES)])
    """Committed groups by lane, the oldest group first."""

    def add(self, lane: int, operation: Operation, errand: Errand) -> None:
        self.open.append((lane, operation, errand))

    def commit(self, mask: Mask, line: int) -> None:
        mine: dict[int, list[tuple[Operation, Errand]]] = {}
        for lane, operation, errand in self.open:
            mine.setdefault(lane, []).append((operation, errand))
        nothing = Group([], line)
        for lane in lanes_of(mask):
            self.closed[lane].append(Group(mine.pop(lane), line) if lane in mine else nothing)
        self.open = [entry for entry in self.open if entry[0] in mine]

    def wait(self, warp: Warp, mask: Mask, left: int, what: str, line: int) -> Wait | None:
        """Until at most `left` groups of each lane are under way; then the warp knows that the others are
        over. `line` is that of the instruction that waits."""
        over = [
            group
            for lane in lanes_of(mask)
            for group in self.closed[lane][: max(0, len(self.closed[lane]) - left)]
        ]
        pending = [operation for group in over for operation, _ in group.started if not operation.landed]
        if pending:
            signal = pending[0].signals[0]
            return Wait(lambda: all(o.landed for o in pending), f"{len(pending)} {what}", signal)
        order = warp.cta.cluster.order
        clock = order.clocks[warp.agent]
        for group in over:
            for _, errand in group.started:
                if clock.epochs[errand.agent] < errand.epoch:
                    clock.epochs[errand.agent] = errand.epoch
                    order.learns(warp.agent, (line, group.line))
                    for access in errand.by_lane:
                        warp.lanes.keep(access)
        for lane in lanes_of(mask):
            if len(self.closed[lane]) > left:
                self.closed[lane] = self.closed[lane][len(self.closed[lane]) - left :]
        return None

    def unwaited(self) -> list[Operation]:
        """Operations that nobody has waited for."""
        closed = [o for lane in self.closed for group in lane for o, _ in group.started]
        return [o for _, o, _ in self.open] + closed


def groups(warp: Warp, kind: str) -> Groups:
    """The warp's groups of a kind."""
    found = warp.started.get(kind)
    if found is None:
        found = warp.started[kind] = Groups()
    return found


def submit(
    warp: Warp,
    instruction: Instruction,
    land: Callable[[], None],
    signals: tuple[object, ...],
    queue: Hashable = None,
) -> Operation:
    operation = Operation(instruction, land, signals, queue)
    warp.cta.cluster.units.submit(operation)
    return operation
