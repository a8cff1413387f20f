"""Warps, CTAs and clusters: what threads have of their own, and the memory and barriers that they share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptxsim.ptx.nodes import Instruction
from ptxsim.state.barriers import MBarrier, Meeting, Round
from ptxsim.state.memory import HostMemory, Region, fresh
from ptxsim.state.operation import Units
from ptxsim.state.registers import LANES, Registers
from ptxsim.state.window import RANK_SHIFT
from ptxsim.watch.clock import NOTHING, Clock, Key
from ptxsim.watch.findings import Finding, Findings
from ptxsim.watch.flags import Flags, Told
from ptxsim.watch.lanes import LaneLog
from ptxsim.watch.launches import Dependence
from ptxsim.watch.order import GENERIC, Access, Order
from ptxsim.watch.shadow import Shadow
from ptxsim.watch.written import Written

Triple = tuple[int, int, int]
TENSOR_LANES, TENSOR_COLUMNS = 128, 512
TENSOR_BAND = 16
"""Lanes of tensor memory that are watched as one."""


@dataclass
class Grid:
    """State that all CTAs of a launch share. Sizes are in threads, CTAs and bytes."""

    grid: Triple
    block: Triple
    cluster: Triple
    shared_bytes: int
    """Dynamic shared memory."""
    static_bytes: int
    granule: int
    """Bytes of shared memory that are watched as one."""
    symbols: dict[str, int]
    """Addresses of parameters and of variables in global memory."""
    shared_symbols: dict[str, int]
    local_symbols: dict[str, int]
    """Offsets of variables in shared memory, and in a thread's local memory."""
    registers: dict[int, int]
    local_bytes: int
    memory: HostMemory
    findings: Findings
    arch: str
    dependence: Dependence
    """Order after earlier launches."""
    processors: int = 132
    resident: int = 1
    """CTAs that a multiprocessor has room for, which share its tensor memory."""
    explicit_cluster: bool = False
    time: int = 0
    flags: Flags = field(default_factory=Flags)
    """Flags of strong writes, by (cluster, CTA, offset) in shared memory and by address in global memory."""
    spots: dict[object, Any] = field(default_factory=dict)
    """Places in shared memory by the addresses that led there (isa/shared.Spot)."""
    constants: dict[object, NDArray[Any]] = field(default_factory=dict)
    """Kernel parameters as they were loaded, by who loads them."""
    cancel: Callable[[], Triple | None] | None = None
    """Takes a cluster that has not started out of the launch: see state/waiting.py."""
    global_granule: int = 4
    """Bytes of global memory that are watched as one."""
    written: Written = field(init=False)
    printed: list[str] = field(default_factory=list)
    """Text that threads have printed."""

    def __post_init__(self) -> None:
        self.written = Written(self.global_granule, self.findings, self.dependence)

    def clock(self) -> int:
        return self.time


class Warp(Registers):
    """32 lanes, their registers and where each of them is. `index` counts warps of the CTA. `agent` is its
    number for happens-before tracking."""

    def __init__(self, cta: Cta, index: int, threads: int, registers: dict[int, int], agent: int) -> None:
        super().__init__(registers)
        self.cta, self.index, self.agent = cta, index, agent
        self.live = np.arange(LANES) < threads
        """Lanes that exist and have not exited."""
        self.whole = threads >= LANES
        """True if all 32 lanes are alive."""
        self.groups: dict[int, NDArray[np.bool_]] = {0: self.live.copy()}
        """Lanes by program counter: indices into Kernel.body, and who is there."""
        self.local = fresh(f"the local memory of {self}", 0, LANES * cta.launch.local_bytes)
        """The lanes' bytes one after the other: local addresses tell lanes apart."""
        self.ticket: tuple[Meeting, Round] | None = None
        """The barrier that the warp has come to, and its round; held while the warp waits."""
        self.cluster_ticket: tuple[Meeting, Round] | None = None
        self.released: Told | None = None
        """Knowledge of the warp at its last fence that releases."""
        self.observed: list[Told] = []
        """Knowledge found by strong reads that no fence has acquired yet."""
        self.announced: set[MBarrier] = set()
        """mbarriers that the warp knew of at its last fence.mbarrier_init."""
        self.arrived_again = 0
        """Arrivals at the cluster's barrier before the warp had waited for the one before: so many waits more
        have nothing to wait for."""
        self.gives_up = False
        """True if the next try_wait answers false instead of waiting."""
        self.polled: dict[int, tuple[bytes, bytes]] = {}
        """Addresses of a load that acquires, and what it found there last, by PTX line of the load."""
        self.busy: dict[tuple[int, int], Instruction] = {}
        """Registers, by file and index, that a wgmma in flight reads or writes."""
        self.loading: dict[tuple[int, int], Instruction] = {}
        """Registers, by file and index, that a tcgen05.ld writes which was not waited for."""
        self.registers_each = 0
        """Registers of a thread that setmaxnreg asked for; 0 before that."""
        self.undefined: dict[tuple[int, int], tuple[NDArray[np.bool_], Instruction]] = {}
        """Registers, by file and index, that hold an undefined value: in which lanes, and what made it."""
        self.unfenced: set[tuple[int, int]] = set()
        """Registers used by other instructions since the last wgmma.fence."""
        self.fenced = False
        """True if there was a wgmma.fence at all."""
        self.started: dict[str, Any] = {}
        """Asynchronous operations by kind, in groups as they were committed (isa/asynchronous.Groups)."""
        self.acting: NDArray[np.bool_] | None = None
        """Lanes of the load, store or act that is executed, None for all."""
        self.lanes = LaneLog()
        """Accesses to shared memory since the lanes were ordered last."""
        self.carry = np.zeros(LANES, np.bool_)
        """The carry flag of add.cc and its kin."""
        self.constants: dict[object, NDArray[Any]] = {}
        """Values of special registers and addresses of variables, by how they are read."""

    def withheld(self) -> frozenset[Key]:
        """What other lanes than those that act did since the warp's lanes were ordered."""
        return self.lanes.withheld(self.cta.cluster.order, self.acting) if self.lanes.entries else NOTHING

    def release(self) -> Clock:
        """All that the lanes that act did, and the warp knows, to be handed to others."""
        withheld = self.withheld()
        clock = self.cta.cluster.order.release(self.agent)
        clock.withheld |= withheld
        return clock

    def tells(self, line: int) -> Told:
        """The same, to be read by others; by the instruction on a PTX line."""
        return Told.by(self.release(), self.cta.cluster.number, line)

    def alive(self) -> bool:
        return b"\1" in self.live.tobytes()

    def leave(self, lanes: NDArray[np.bool_]) -> None:
        """These lanes exit."""
        self.live &= ~lanes
        self.whole = False

    def __str__(self) -> str:
        return f"warp {self.index} of CTA {self.cta.rank}"


class Cta:
    """`rank` is within the cluster, `index` %ctaid."""

    def __init__(self, cluster: Cluster, rank: int, index: Triple) -> None:
        self.cluster, self.rank, self.index = cluster, rank, index
        self.launch = launch = cluster.launch
        self.threads = launch.block
        size = launch.static_bytes + launch.shared_bytes
        self.shared: Region = fresh(f"the shared memory of CTA {rank}", 0, size)
        self.shadow = Shadow(cluster.order, self.shared.data.size // launch.granule, self._shared_place)
        self.tensor: NDArray[np.uint32] = np.full((TENSOR_LANES, TENSOR_COLUMNS), 0xA5A5A5A5, np.uint32)
        bands = TENSOR_LANES // TENSOR_BAND
        self.tensor_shadow = Shadow(cluster.order, bands * TENSOR_COLUMNS, self._tensor_place)
        self.allocated: NDArray[np.int32] = np.zeros(TENSOR_COLUMNS, np.int32)
        """The PTX line that allocated each column of tensor memory, or 0."""
        self.freed: NDArray[np.bool_] = np.zeros(TENSOR_COLUMNS, np.bool_)
        """Columns of tensor memory that were allocated and are free again."""
        self.may_allocate = True
        self.pair_requests: dict[int, int] = {}
        """Number of the request of each agent that allocates together with the other CTA of its pair."""
        self.pair_requested = 0
        self.pair_granted: dict[int, int] = {}
        """First column for each request that the other CTA has completed."""
        self.mbarriers: dict[int, MBarrier] = {}
        self.products: dict[int, dict[int, Any]] = {}
        """Products that some warps of a warpgroup have yet to issue, by warpgroup and number."""
        self.reached: dict[int, int] = {}
        """Number of the last arrival of each agent of another CTA at an mbarrier here."""
        self.ended: int | None = None
        """Number of the access by which its last warp exited."""
        self.meetings: dict[int, Meeting] = {}
        self.symbols: dict[str, Any] = dict(launch.symbols)
        self.symbols |= {name: rank << RANK_SHIFT | at for name, at in launch.shared_symbols.items()}
        each = np.arange(LANES) * launch.local_bytes
        self.symbols |= {name: each + at for name, at in launch.local_symbols.items()}
        threads = prod(launch.block)
        self.warps = [
            Warp(
                self, i, threads - i * LANES, launch.registers, cluster.order.agent(f"warp {i} of CTA {rank}")
            )
            for i in range(-(-threads // LANES))
        ]

    def meeting(self, number: int) -> Meeting:
        found = self.meetings.get(number)
        if found is None:
            name = f"barrier {number} of CTA {self.rank}"
            found = self.meetings[number] = Meeting(name, self.cluster.capacity)
        return found

    def end(self, instruction: Instruction, told: Iterable[str] = ()) -> None:
        """The last warp exits, by this instruction: nobody may access the shared memory from now on. What
        agents of the names in `told` may still do was reported."""
        order = self.cluster.order
        clock = order.clocks[self.warps[0].agent].copy()
        for warp in self.warps:
            clock.join(order.clocks[warp.agent])
        agent = order.agent(f"CTA {self.rank}")
        self.ended = order.add(Access(agent, 1, GENERIC, f"CTA {self.rank}", instruction))
        self.shadow.end(self.ended, clock, {order.agent(name) for name in told})
        for arrival in self.reached.values():
            if not order.known(arrival, clock):
                text = "exits before it knows that an arrival at one of its mbarriers is over"
                order.report("unfinished", text, self.ended, arrival)

    def must_come(self, meeting: Meeting) -> set[int]:
        """Agents of the warps that have not exited, of the CTA, or of the cluster for its barrier."""
        ctas = self.cluster.ctas if meeting is self.cluster.meeting else (self,)
        return {warp.agent for cta in ctas for warp in cta.warps if warp.alive()}

    def living_threads(self) -> int:
        """Threads that have not exited, by whole warps."""
        return sum(LANES for warp in self.warps if warp.alive())

    def _shared_place(self, granule: int) -> str:
        return f"shared memory at {granule * self.launch.granule:#x} of CTA {self.rank}"

    def _tensor_place(self, granule: int) -> str:
        band, column = divmod(granule, TENSOR_COLUMNS)
        return f"tensor memory, column {column}, lanes from {band * TENSOR_BAND}, of CTA {self.rank}"


class Cluster:
    """CTAs that run together; also a single CTA is one."""

    def __init__(self, launch: Grid, number: int, indices: list[Triple], agents_a_warp: int = 8) -> None:
        warps = -(-prod(launch.block) // LANES) * len(indices)
        self.launch, self.number, self.processor = launch, number, number * len(indices) % launch.processors
        self.capacity = warps * agents_a_warp + len(indices) + len(launch.dependence.earlier) + 8
        self.order = Order(self.capacity, launch.findings, number)
        launch.dependence.begin(self.order)
        self.units = Units()
        self.meeting = Meeting("cluster barrier", self.capacity)
        self.traffic: Counter[str] = Counter()
        """Bytes and operations of the asynchronous units, for reports."""
        self.shared: Counter[int] = Counter()
        """Bytes that went through shared memory, by PTX line; of loads and stores 128 for every clock."""
        self.refused = False
        """True if a warp has seen that a request to cancel another cluster was refused."""
        self.ctas: list[Cta] = []
        for rank, index in enumerate(indices):
            self.ctas.append(Cta(self, rank, index))

    @property
    def warps(self) -> list[Warp]:
        return [warp for cta in self.ctas for warp in cta.warps]

    def check_left(self) -> None:
        """After the last warp exited: tensor memory must be free, and CTAs that share a multiprocessor must
        have been able to allocate meanwhile."""
        for cta in self.ctas:
            if self.launch.resident > 1 and cta.may_allocate and (cta.freed.any() or cta.allocated.any()):
                text = (
                    f"CTA {cta.rank} exits without tcgen05.relinquish_alloc_permit: until then none of the "
                    f"{self.launch.resident} CTAs that a multiprocessor has room for could allocate but it"
                )
                self.launch.findings.add(Finding("tensor memory", text))
            held = sorted({int(line) for line in cta.allocated} - {0})
            if held:
                text = f"CTA {cta.rank} exits with tensor memory allocated at PTX line {held[0]}"
                self.launch.findings.add(Finding("leak", text))
