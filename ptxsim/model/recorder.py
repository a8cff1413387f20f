"""Trace of one cluster's warps: what they executed, in order, with what their barriers, copies and MMAs
referred to.

A kernel runs once, functionally; a translated program whose blocks also write down what they are is run in
place of its own. Time plays no part: the trace holds for every chip of the architecture.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ptxsim.active import simulated
from ptxsim.doors import kept
from ptxsim.doors.capture import capturing
from ptxsim.doors.device import Gpu
from ptxsim.doors.launch import Launch
from ptxsim.errors import InputError
from ptxsim.isa.table import Act, Wait
from ptxsim.model import events
from ptxsim.model.events import Event
from ptxsim.ptx.nodes import Kernel
from ptxsim.run.launch import Shape, execute, module_of, program_of
from ptxsim.run.program import Block, Program
from ptxsim.run.timing import Timing
from ptxsim.state.cta import Warp
from ptxsim.state.memory import HostMemory
from ptxsim.state.registers import Mask

Entry = tuple[int, int, Event | None]
"""(first, stop) of instructions of the kernel's body that were executed one after another, and what the last
of them did to others, where it did."""


@dataclass(frozen=True)
class WarpTrace:
    """`rank` is the CTA's in its cluster, `index` the warp's in its CTA."""

    rank: int
    index: int
    entries: tuple[Entry, ...] = field(repr=False)


@dataclass(frozen=True)
class Trace:
    """A cluster's warps. `ctas` is how many CTAs the cluster has; `grid` counts those of the launch."""

    kernel: Kernel = field(repr=False)
    arch: str
    ctas: int
    grid: int
    warps: tuple[WarpTrace, ...] = field(repr=False)


def record(launch: Launch, memory: HostMemory | None = None) -> Trace:
    """Run a captured launch and write down its first cluster. Raises the finding that ended it early."""
    program = program_of(launch.ptx, launch.kernel)
    module = module_of(launch.ptx)
    if not module.target.startswith("sm_10"):
        raise InputError(f"a kernel for {module.target}", "one for sm_100a", "compile it for Blackwell")
    notes: dict[tuple[int, int], list[Entry]] = {}
    shape = Shape(launch.grid, launch.block, launch.cluster, launch.shared_bytes)
    result = execute(module, _noting(program, notes), shape, launch.params, memory, Timing("eager", 0))
    if result.fault is not None:
        raise InputError(f"a launch that ends early: {result.fault}", "one that runs to its end", "mend it")
    x, y, z = launch.cluster
    ranks = {rank for rank, _ in notes}
    warps = tuple(WarpTrace(rank, index, tuple(notes[rank, index])) for rank, index in sorted(notes))
    assert len(ranks) == x * y * z or len(ranks) == 1
    grid = launch.grid[0] * launch.grid[1] * launch.grid[2]
    return Trace(program.kernel, module.target, len(ranks), grid, warps)


@dataclass
class Recorder:
    """Takes launches as a simulated GPU does, and keeps the traces of those with MMAs in tensor memory."""

    traces: list[Trace] = field(default_factory=list)

    def run(self, captured: Launch) -> None:
        if any(
            i.opcode.startswith("tcgen05.mma") for i in module_of(captured.ptx).kernels[captured.kernel].body
        ):
            self.traces.append(record(captured))
        else:
            Gpu("sm_100a", "eager", 0).run(captured)


@contextlib.contextmanager
def recording(arch: str = "sm_100a", sms: int | None = None) -> Iterator[Recorder]:
    """Within, CuTe-DSL functions compile for `arch`, run on CPU tensors, and leave their traces.

    `sms` is how many multiprocessors host code is told of.
    """
    recorder = Recorder()
    with capturing(arch, recorder.run, sms), simulated(arch, kept, sms):
        yield recorder


def _noting(program: Program, notes: dict[tuple[int, int], list[Entry]]) -> Program:
    """A program of which every executed block is written down, by CTA and warp of the first cluster."""

    def note(warp: Warp, entry: Entry) -> None:
        if warp.cta.cluster.number == 0:
            notes.setdefault((warp.cta.rank, warp.index), []).append(entry)

    blocks = {start: _block(program.kernel, block, note) for start, block in program.blocks.items()}
    return dataclasses.replace(program, blocks=blocks)


Note = Callable[[Warp, Entry], None]


def _block(kernel: Kernel, block: Block, note: Note) -> Block:
    if block.act is None:
        plain: Entry = block.start, block.stop, None
        steps = [(lambda warp, mask: note(warp, plain), None), *block.steps]
        return dataclasses.replace(block, steps=steps)
    act, guard = block.act
    observe = events.observer(kernel.body[block.start])
    begun: dict[Warp, Any] = {}
    """Observations of the warps at the instruction, which is tried again until it need not wait."""

    def run(warp: Warp, mask: Mask) -> Wait | None:
        if warp not in begun:
            begun[warp] = observe.before(warp, mask)
        wait = act.run(warp, mask)
        if wait is None:
            note(warp, (block.start, block.stop, observe.after(warp, mask, begun.pop(warp))))
        return wait

    return dataclasses.replace(block, act=(Act(run, act.signals), guard))
