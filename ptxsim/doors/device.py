"""A simulated GPU around ordinary code: every kernel that CuTe DSL launches within runs on the CPU,
watched."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from ptxsim.active import simulated
from ptxsim.doors import kept
from ptxsim.doors.capture import capturing
from ptxsim.doors.launch import EARLY, Launch
from ptxsim.run import report
from ptxsim.run.coverage import coverage
from ptxsim.run.launch import Result, Shape, launch
from ptxsim.run.timing import Timing
from ptxsim.state.memory import HostMemory
from ptxsim.watch.findings import Fault, Finding, Findings, Place
from ptxsim.watch.launches import Launches


@dataclass
class Gpu:
    """Launches so far, and what was found in them."""

    arch: str
    timing: str
    seed: int
    together: int = 1
    results: list[Result] = field(default_factory=list)
    launches: Launches = field(default_factory=Launches, repr=False)

    @property
    def findings(self) -> list[Finding]:
        """Each of a kernel once, however often it was launched."""
        found: dict[str, Findings] = {}
        for result in self.results:
            mine = found.setdefault(result.kernel, Findings())
            for finding in result.findings:
                mine.add(finding)
        return [finding for mine in found.values() for finding in mine]

    def report(self, unexecuted: bool = False) -> str:
        """Each launch: findings, what the warps executed, how busy the units would be. Then of each kernel
        how many of its instructions and barriers any of its launches executed; with `unexecuted` also which
        instructions none did, by opcode with their PTX lines."""
        told: dict[str, set[Place]] = {}
        parts = []
        for result in self.results:
            before = told.setdefault(result.kernel, set())
            parts.append(report.text(result, before))
            before.update(finding.place for finding in result.findings)
        for each in coverage(self.results):
            parts.append(f"{each.kernel[: report.NAME]}: {each}")
            if unexecuted and each.missed:
                parts.append(each.unexecuted())
        return "\n".join(parts) or "nothing was launched"

    def run(self, captured: Launch) -> None:
        """Prints what the kernel does. Raises Fault where the launch cannot be finished: a hang, an access
        outside memory."""
        early = bool(captured.attributes.get(EARLY))
        shape = Shape(captured.grid, captured.block, captured.cluster, captured.shared_bytes, early)
        timing = Timing(self.timing, self.seed)
        memory, together = HostMemory(launches=self.launches), self.together
        result = launch(captured.ptx, captured.kernel, shape, captured.params, memory, timing, together)
        self.results.append(result)
        print(result.printed, end="")
        if result.fault is not None:
            raise Fault(result.fault)


@contextlib.contextmanager
def device(
    arch: str, seed: int = 0, timing: str = "late", sms: int | None = None, together: int = 1
) -> Iterator[Gpu]:
    """Within, CuTe-DSL functions compile for `arch` ("sm_90a" or "sm_100a") and run on CPU tensors.

    `timing` is when asynchronous operations land and whose turn it is: "eager", "late" or "random", drawn
    from `seed` (run/timing.py). `sms` is how many multiprocessors host code is told of: few make a persistent
    kernel loop. `together` clusters of a launch run at the same time; others begin as those end, or where all
    wait for them. Raises InputError for an unknown timing, UnsupportedError for an unknown arch.
    """
    Timing(timing, seed)
    gpu = Gpu(arch, timing, seed, together)
    with capturing(arch, gpu.run, sms), simulated(arch, kept, sms):
        yield gpu
