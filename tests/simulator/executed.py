"""Record of a simulated launch: what its warps did at barriers, under the names that the graph of its plan
has, and where that is not what the graph says."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from fa4flex import lower
from fa4flex.compiler.compile import Kernel
from fa4flex.compiler.signature import Signature
from fa4flex.kernels.plan.memory import ANSWER
from fa4flex.kernels.plan.signals import (
    CLUSTER,
    EVERYONE,
    Signal,
    arrivals_of,
    difference,
    expected,
    idle,
    rows_of,
)
from fa4flex.kernels.plan.topology import Topology
from ptxsim.doors import device
from ptxsim.doors.launch import Launch
from ptxsim.isa.access import Accessor, locate
from ptxsim.isa.mbarriers import cta_and_offset, distinct
from ptxsim.isa.operands import read
from ptxsim.isa.table import Act, Wait
from ptxsim.model import events
from ptxsim.model.events import Arrived, Committed, Loaded, Made, Met, Observer
from ptxsim.ptx.nodes import Instruction
from ptxsim.run import launch as launching
from ptxsim.run.program import Block, Program
from ptxsim.state.cta import Warp
from ptxsim.state.registers import Mask

Warps = tuple[int, int, int]
"""Cluster, CTA and warp."""


@dataclass(frozen=True)
class Waited:
    """A wait for an mbarrier's phase of this parity came to its end."""

    key: events.Key
    parity: int


@dataclass
class Trace:
    """Events of each warp at barriers, in order; `made` has initialisations: arrivals of a phase by CTA and
    offset; `lines` the lines of PTX that did all this."""

    warps: dict[Warps, list[Any]] = field(default_factory=lambda: defaultdict(list))
    made: dict[events.Key, int] = field(default_factory=dict)
    lines: set[int] = field(default_factory=set)

    def note(self, warp: Warp, event: Any) -> None:
        if isinstance(event, tuple):
            for one in event:
                self.note(warp, one)
        elif isinstance(event, Made):
            self.made[event.key] = event.count
        elif isinstance(event, Waited | Arrived | Met | Loaded | Committed):
            self.warps[warp.cta.cluster.number, warp.cta.rank, warp.index].append(event)

    def signals(self, topology: Topology, warp: Warps) -> list[Signal]:
        names = self.names(topology)
        found = [signal for event in self.warps[warp] for signal in _signals(names, topology, event)]
        return _joined(found)

    def names(self, topology: Topology) -> dict[events.Key, str]:
        """Names of mbarriers by CTA and offset."""
        first = min((offset for _, offset in self.made), default=0)
        return {
            (cta, first + 8 * i): name
            for cta, places in enumerate(topology.places)
            for i, name in enumerate(places)
            if name
        }


def differences(trace: Trace, topology: Topology, only: Warps | None = None) -> Iterator[str]:
    """Differences of a launch, or the `only` warp asked for, from what its graph says: in words, each CTA's
    counts of arrivals first."""
    names = trace.names(topology)
    counts = arrivals_of(topology)
    for key, name in names.items():
        if trace.made.get(key) != counts[name]:
            yield f"{name}: a phase of {trace.made.get(key)} arrivals, and {counts[name]} in the graph"
    if missing := counts.keys() - set(names.values()):
        yield f"no place in the kernel's memory: {', '.join(sorted(missing))}"
    roles = {(role.cta, role.warp + i): (role, i) for role in topology.roles for i in range(role.warps)}
    first = topology.roles[0]
    clusters = sorted({cluster for cluster, _, _ in trace.warps})
    for cluster in clusters:
        if topology.may_end and _did_nothing(trace, topology, cluster):
            continue
        rows = rows_of(topology, trace.signals(topology, (cluster, first.cta, first.warp)))
        every = {w for w in trace.warps if w[0] == cluster} | {(cluster, *where) for where in roles}
        for _, cta, warp in sorted(w for w in every if only in (None, w)):
            found = trace.signals(topology, (cluster, cta, warp))
            role, i = roles.get((cta, warp), (None, 0))
            wanted = idle(topology) if role is None else expected(topology, role, i, rows)
            one = difference("no role" if role is None else role.name, i if role else warp, wanted, found)
            if one is not None:
                yield f"{one}\n    of tiles with {rows} key tiles, cluster {cluster}"


def _did_nothing(trace: Trace, topology: Topology, cluster: int) -> bool:
    """True if all warps of a cluster did what a warp without a role does."""
    warps = (warp for warp in trace.warps if warp[0] == cluster)
    return all(trace.signals(topology, warp) == idle(topology) for warp in warps)


def _signals(names: dict[events.Key, str], topology: Topology, event: Any) -> Iterator[Signal]:
    def at(key: events.Key) -> str:
        return names.get(key, f"an mbarrier that the graph has not, at {key[1]:#x} of CTA {key[0]}")

    if isinstance(event, Waited):
        yield Signal("wait", at(event.key), event.parity)
    elif isinstance(event, Arrived):
        if event.bytes > 0 and event.arrivals == 1:
            yield Signal("expect", at(event.key), amount=event.bytes)
        elif event.bytes < 0:
            yield Signal("send", at(event.key), amount=-event.bytes)
        else:
            yield Signal("arrive", at(event.key), amount=event.arrivals)
    elif isinstance(event, Loaded):
        for _, size, key in event.copies:
            yield Signal("copy", at(key), amount=size)
    elif isinstance(event, Committed):
        for key in event.keys:
            yield Signal("commit", at(key))
    elif isinstance(event, Met):
        yield _met(topology, event)


def _met(topology: Topology, event: Met) -> Signal:
    does = "sync" if event.stays else "give"
    if event.key == events.CLUSTER:
        return Signal(does, CLUSTER)  # type: ignore[arg-type]
    cta, number = event.key[0], -1 - event.key[1]
    if number == 0:
        return Signal(does, EVERYONE)  # type: ignore[arg-type]
    named = {
        n: (b.name, f" {i}" if b.stages > 1 else "")
        for b in topology.barriers
        for i, n in enumerate(b.numbers)
    }
    name, stage = named.get(number + 16 * cta, (f"named barrier {number}", ""))
    return Signal(does, name + stage, amount=event.threads)  # type: ignore[arg-type]


def _joined(signals: list[Signal]) -> list[Signal]:
    """Signals with consecutive sends to one barrier joined."""
    found: list[Signal] = []
    for signal in signals:
        if signal.does == "send" and found and (found[-1].does, found[-1].at) == ("send", signal.at):
            found[-1] = dataclasses.replace(signal, amount=found[-1].amount + signal.amount)
        else:
            found.append(signal)
    return found


# --- how it is written down ----------------------------------------------------------------------------


def noting(program: Program, trace: Trace) -> Program:
    """The program, which writes down what it does at barriers."""
    blocks = {
        start: block if block.act is None else _noting(program.kernel.body[start], block, trace)
        for start, block in program.blocks.items()
    }
    return dataclasses.replace(program, blocks=blocks)


def _noting(instruction: Instruction, block: Block, trace: Trace) -> Block:
    assert block.act is not None
    act, guard = block.act
    observer = _observer(instruction)
    if observer is None:
        return block
    begun: dict[Warp, Any] = {}

    def run(warp: Warp, mask: Mask) -> Wait | None:
        if warp not in begun:
            begun[warp] = observer.before(warp, mask)
        wait = act.run(warp, mask)
        if wait is None:
            trace.lines.add(instruction.line)
            trace.note(warp, observer.after(warp, mask, begun.pop(warp)))
        return wait

    return dataclasses.replace(block, act=(Act(run, act.signals), guard))


WATCHED = (
    "mbarrier.",
    "st.async",
    "barrier",
    "bar.",
    "cp.async.bulk",
    "cp.async.mbarrier",
    "tcgen05.commit",
    "clusterlaunch",
)


def _observer(instruction: Instruction) -> Observer | None:
    if not instruction.opcode.startswith(WATCHED) or instruction.opcode.startswith("bar.warp"):
        return None
    if instruction.opcode.startswith(("mbarrier.try_wait", "mbarrier.test_wait")):
        return _wait(instruction)
    if instruction.opcode.startswith("clusterlaunchcontrol.try_cancel"):
        return _asking(instruction)
    if instruction.opcode.startswith("cp.async.mbarrier.arrive"):
        return _landing(instruction)
    return events.observer(instruction)


def _landing(instruction: Instruction) -> Observer:
    """Each lane arrives, once its copies so far have landed."""
    where, access = locate(instruction.operands[0]), Accessor(instruction, "shared")

    def before(warp: Warp, mask: Mask) -> Any:
        found = []
        for address, lanes in distinct(where(warp), mask):
            cta, offset = cta_and_offset(access, warp, address)
            found.append(Arrived((cta.rank, offset), len(lanes)))
        return tuple(found)

    return Observer(lambda warp, mask, found: found, before)


def _wait(instruction: Instruction) -> Observer:
    done, where = read(instruction.operands[0], "pred"), locate(instruction.operands[1])
    parity, access = read(instruction.operands[2], "u32"), Accessor(instruction, "shared")

    def before(warp: Warp, mask: Mask) -> Any:
        found = []
        for address, lanes in distinct(where(warp), mask):
            cta, offset = cta_and_offset(access, warp, address)
            found.append((lanes[0], Waited((cta.rank, offset), int(parity(warp)[lanes[0]]) & 1)))
        return found

    def after(warp: Warp, mask: Mask, found: Any) -> Any:
        return tuple(waited for lane, waited in found if done(warp)[lane])

    return Observer(after, before)


def _asking(instruction: Instruction) -> Observer:
    """The answer comes as a copy does, to each CTA of a cluster where it is multicast."""
    where, access = locate(instruction.operands[1]), Accessor(instruction, "shared")
    everywhere = any(modifier.startswith("multicast") for modifier in instruction.modifiers)

    def after(warp: Warp, mask: Mask, before: Any) -> Any:
        (address, _) = next(distinct(where(warp), mask))
        cta, offset = cta_and_offset(access, warp, address)
        ranks = [one.rank for one in warp.cta.cluster.ctas] if everywhere else [cta.rank]
        return Loaded(tuple((rank, ANSWER, (rank, offset)) for rank in ranks))

    return Observer(after)


# --- launches of plans ---------------------------------------------------------------------------------


_planned: list[tuple[Any, tuple[Any, ...]]] = []
"""Plans of the kernels that are being launched, and their arguments. What is ready to launch is kept from one
test to the next."""


@dataclass(frozen=True, eq=False)
class Executed:
    """A launch, what it did, and the tensors that it may read and write again."""

    topology: Topology
    launch: Launch
    trace: Trace
    arguments: tuple[Any, ...]


@dataclass
class Compared:
    """Launches whose plans have a graph: how many, and where one was not what its graph says."""

    launches: int = 0
    differences: list[str] = field(default_factory=list)
    kept: list[Executed] = field(default_factory=list)


@contextlib.contextmanager
def comparing(keep: bool = False) -> Iterator[Compared]:
    """Within, each launch of a simulated GPU is compared with the graph of its plan. What is around a
    backward kernel has none."""
    compared, run = Compared(), device.Gpu.run
    compile_kernel = lower.Lowered.compile

    def compiled(lowered: lower.Lowered, signature: Signature) -> Kernel:
        kernel = compile_kernel(lowered, signature)

        def launch(*arguments: Any) -> None:
            _planned.append((lowered.plan, arguments))
            try:
                kernel.launch(*arguments)
            finally:
                _planned.pop()

        return dataclasses.replace(kernel, launch=launch)

    def compare(gpu: device.Gpu, launch: Launch) -> None:
        plan, arguments = _planned[-1] if _planned else (None, ())
        topology = _topology_of(plan, launch)
        if _changed or topology is None or not any(topology.places) or not _is_main(launch):
            return run(gpu, launch)
        trace = Trace()
        if keep:
            compared.kept.append(Executed(topology, launch, trace, arguments))
        program_of = launching.program_of
        with patch.object(launching, "program_of", lambda *of: noting(program_of(*of), trace)):
            run(gpu, launch)
        compared.launches += 1
        compared.differences += differences(trace, topology)
        return None

    with patch.object(lower.Lowered, "compile", compiled), patch.object(device.Gpu, "run", compare):
        yield compared


_changed: list[None] = []


@contextlib.contextmanager
def uncompared() -> Iterator[None]:
    """Within, launches are of programs that were changed, of which graphs say nothing."""
    _changed.append(None)
    try:
        yield
    finally:
        _changed.pop()


def _topology_of(plan: Any, launch: Launch) -> Topology | None:
    """The graph of a launch: of a plan's only kernel, or of the one of that name. Kernels of block tables
    have one role, and no graph."""
    named = getattr(plan, "topologies", {})
    found = next((one for name, one in named.items() if name in launch.kernel), None)
    return found or getattr(plan, "topology", None)


def _is_main(launch: Launch) -> bool:
    """True if it is the kernel of a pipeline: those around it have no barriers in memory."""
    body = launching.module_of(launch.ptx).kernels[launch.kernel].body
    return any(instruction.opcode.startswith("mbarrier.init") for instruction in body)
