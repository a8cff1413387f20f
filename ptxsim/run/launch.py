"""Runs one launch: memory laid out, clusters formed, warps scheduled, findings gathered."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod

import numpy as np

from ptxsim.errors import InputError
from ptxsim.isa.access import space_of
from ptxsim.ptx import parse
from ptxsim.ptx.nodes import WIDTHS, Instruction, Kernel, Module
from ptxsim.run.program import Program
from ptxsim.run.scheduler import Scheduler
from ptxsim.run.timing import Timing
from ptxsim.state.cta import Grid, Triple
from ptxsim.state.memory import HostMemory
from ptxsim.state.waiting import Waiting
from ptxsim.state.window import RESERVED_SHARED
from ptxsim.watch.findings import REMARKS, Fault, Finding, Findings
from ptxsim.watch.launches import Dependence

SHARED_BYTES = 228 << 10
"""Shared memory of a multiprocessor."""


@dataclass(frozen=True)
class Shape:
    """Launch configuration: CTAs, threads of a CTA, CTAs of a cluster, bytes of dynamic shared memory; and
    whether it may begin before the launch before it is over (programmatic stream serialization)."""

    grid: Triple
    block: Triple
    cluster: Triple = (1, 1, 1)
    shared_bytes: int = 0
    early: bool = False


@dataclass
class Result:
    """Result of a launch. `findings` is empty where nothing is wrong; `fault` is the one that ended it early.
    `remarks` are on what works, though not by the letter of the PTX ISA."""

    kernel: str
    arch: str
    shape: Shape
    findings: list[Finding]
    remarks: list[Finding]
    fault: Finding | None
    seconds: float
    executed: Counter[tuple[int, int, int]] = field(repr=False)
    traffic: Counter[str]
    shared: Counter[int] = field(repr=False)
    """Bytes that went through shared memory, by PTX line (see run/counts.py)."""
    program: Program = field(repr=False)
    turns: list[tuple[int, int, int, int, int]] = field(repr=False)
    useful: frozenset[int] = field(repr=False)
    """PTX lines of barriers, arrivals and waits by which some warp learned that something is over."""
    printed: str = field(default="", repr=False)
    """Text that threads have printed, in the order in which they did."""


@lru_cache(maxsize=32)
def module_of(text: str) -> Module:
    return parse(text)


@lru_cache(maxsize=32)
def program_of(text: str, kernel: str) -> Program:
    """Raises InputError where the text has no such entry, Unmodelled for instructions that are not known."""
    module = module_of(text)
    if kernel not in module.kernels:
        names = ", ".join(module.kernels) or "none"
        raise InputError(f"kernel {kernel!r}", f"an entry of the PTX text: {names}", "name one of them")
    return Program.of(module.kernels[kernel])


def launch(
    text: str,
    kernel: str,
    shape: Shape,
    parameters: bytes,
    memory: HostMemory | None = None,
    timing: Timing | None = None,
    together: int = 1,
) -> Result:
    """Run one launch of an entry of a PTX module.

    `parameters` are the kernel's parameters in order, each at its declared alignment. `memory` is global
    memory: by default all of this process's. `together` clusters run at the same time. Raises InputError and
    Unmodelled before anything runs; what goes wrong while it runs is in the result.
    """
    return execute(module_of(text), program_of(text, kernel), shape, parameters, memory, timing, together)


def execute(
    module: Module,
    program: Program,
    shape: Shape,
    parameters: bytes,
    memory: HostMemory | None = None,
    timing: Timing | None = None,
    together: int = 1,
) -> Result:
    """Launch an entry that is translated already, as `launch` does."""
    memory, timing = memory or HostMemory(), timing or Timing("eager", 0)
    findings = Findings()
    grid = _grid(module, program.kernel, shape, parameters, memory, findings)
    waiting = Waiting(grid, timing.cancels)
    grid.cancel = waiting.cancel
    scheduler = Scheduler(program, timing, waiting, together)
    fault, started = None, time.perf_counter()
    with np.errstate(all="ignore"):
        try:
            scheduler.run()
        except Fault as found:
            fault = found.finding
            findings.add(fault)
    if memory.launches is not None:
        past = grid.dependence.past(program.kernel.name, grid.written.log, memory.contents)
        memory.launches.add(past)
    return Result(
        program.kernel.name,
        module.target,
        shape,
        [finding for finding in findings if finding.kind not in REMARKS],
        [finding for finding in findings if finding.kind in REMARKS],
        fault,
        time.perf_counter() - started,
        Counter(scheduler.executed),
        sum((cluster.traffic for cluster in waiting.made), Counter()),
        sum((cluster.shared for cluster in waiting.made), Counter()),
        program,
        scheduler.turns,
        frozenset(line for cluster in waiting.made for line in cluster.order.useful),
        "".join(grid.printed),
    )


def _grid(
    module: Module, kernel: Kernel, shape: Shape, parameters: bytes, memory: HostMemory, findings: Findings
) -> Grid:
    symbols = _parameters(kernel, parameters, memory)
    shared, local = {}, {}
    static, dynamic, local_bytes = RESERVED_SHARED, [], 0
    for variable in (*module.variables, *kernel.variables):
        if variable.space == "shared" and not variable.size:
            dynamic.append(variable.name)
        elif variable.space == "shared":
            static = _aligned(static, variable.align)
            shared[variable.name] = static
            static += variable.size
        elif variable.space == "local":
            local_bytes = _aligned(local_bytes, variable.align)
            local[variable.name] = local_bytes
            local_bytes += variable.size
        else:
            content = variable.initial.ljust(variable.size, b"\0")
            symbols[variable.name] = memory.allocate(variable.name, content, variable.space != "const")
    static = _aligned(static, 1024 if dynamic else 16)
    shared |= dict.fromkeys(dynamic, static)
    cluster = shape.cluster if prod(shape.cluster) > 1 else (kernel.cluster or (1, 1, 1))
    return Grid(
        shape.grid,
        shape.block,
        cluster,
        shape.shared_bytes,
        static,
        _granule(kernel.body, "shared"),
        symbols,
        shared,
        local,
        kernel.registers,
        _aligned(local_bytes, 32),
        memory,
        findings,
        module.target,
        _dependence(kernel, shape, memory, findings),
        resident=max(1, min(kernel.resident, SHARED_BYTES // (static + shape.shared_bytes))),
        explicit_cluster=prod(cluster) > 1,
        global_granule=_granule(kernel.body, "global"),
    )


def _dependence(kernel: Kernel, shape: Shape, memory: HostMemory, findings: Findings) -> Dependence:
    granule = _granule(kernel.body, "global")
    if memory.launches is None:
        return Dependence(findings, granule)
    found = memory.launches.dependence(findings, granule, shape.early, memory.contents)
    found.remembers = any(each.opcode == "griddepcontrol.launch_dependents" for each in kernel.body)
    return found


def _parameters(kernel: Kernel, content: bytes, memory: HostMemory) -> dict[str, int]:
    """Addresses of the parameters, which lie in one block of constant memory."""
    places, end = {}, 0
    for parameter in kernel.parameters:
        end = _aligned(end, parameter.align)
        places[parameter.name] = end
        end += parameter.size
    if end > len(content):
        expected = f"{end} bytes for {', '.join(f'{p.size}' for p in kernel.parameters)}"
        raise InputError(f"{len(content)} bytes of parameters", expected, "lay them out at their alignments")
    base = memory.allocate("kernel parameters", content or b"\0", writable=False)
    return {name: base + at for name, at in places.items()}


def _granule(body: tuple[Instruction, ...], space: str) -> int:
    """The smallest piece of a memory that a plain access of the kernel touches, 4 bytes at most."""
    widths = [4]
    for instruction in body:
        if instruction.name in ("ld", "st", "atom", "red") and space_of(instruction) in (space, ""):
            widths += [WIDTHS[m] // 8 for m in instruction.modifiers if m in WIDTHS]
    return min(widths)


def _aligned(offset: int, to: int) -> int:
    return -(-offset // to) * to
