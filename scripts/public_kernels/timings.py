"""Every launch of a kernel under several timings, from the same contents of memory."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ptxsim.doors.launch import Launch
from ptxsim.run.launch import Shape, launch
from ptxsim.run.timing import Timing
from ptxsim.state.memory import HostMemory
from ptxsim.watch.findings import Fault, Finding

TIMINGS = (("eager", 0), ("late", 1), ("random", 1), ("random", 2), ("random", 3))


class InOrder(Timing):
    """Cancels clusters in their order, as chips do; the ISA does not promise it."""

    def cancels(self, waiting: int) -> int | None:
        chosen = super().cancels(waiting)
        return None if chosen is None else 0


Contents = dict[int, bytes]
"""Bytes of the storages of tensors, by address."""


@dataclass
class Runner:
    """Executes launches on a simulated GPU of `arch`.

    `plain` are parts of the names of kernels that only prepare tensors, and run under the first timing alone.
    `in_order` is for kernels that rely on the order in which clusters are cancelled.
    """

    arch: str
    timings: Sequence[tuple[str, int]] = TIMINGS
    plain: tuple[str, ...] = ()
    in_order: bool = False
    launches: int = 0
    findings: dict[str, Finding] = field(default_factory=dict)
    """First findings of each kernel, kind and pair of opcodes, under any timing."""
    varies: bool = False
    """True if some launch left different bits under different timings."""

    def run(self, captured: Launch) -> None:
        """Raises Fault where a launch cannot be finished. Memory is left as the last timing leaves it."""
        shape = Shape(captured.grid, captured.block, captured.cluster, captured.shared_bytes)
        prepares = any(part in captured.kernel for part in self.plain)
        self.launches += not prepares
        timings = self.timings[:1] if prepares else self.timings
        before, first = contents() if len(timings) > 1 else {}, None
        for number, (name, seed) in enumerate(timings):
            if number:
                restore(before)
            timing = (InOrder if self.in_order else Timing)(name, seed)
            result = launch(captured.ptx, captured.kernel, shape, captured.params, HostMemory(), timing)
            for finding in result.findings:
                self.findings.setdefault(_alike(captured.kernel, finding), finding)
            if result.fault is not None:
                raise Fault(result.fault)
            if len(timings) > 1:
                after = contents(before)
                first = first or after
                self.varies |= after != first


def _alike(kernel: str, finding: Finding) -> str:
    """Key that findings have in common that say the same of several instructions of a kernel."""
    opcodes = (part.opcode if part else "" for part in (finding.instruction, finding.other))
    return " ".join((kernel, finding.kind, *opcodes))


def contents(only: Contents | None = None) -> Contents:
    """Contents of this process's tensors, or of those whose storages are among `only`."""
    if only is not None:
        return {address: ctypes.string_at(address, len(data)) for address, data in only.items()}
    found: Contents = {}
    with torch._C.DisableTorchFunction():
        for item in gc.get_objects():
            if type(item) in (torch.Tensor, torch.nn.Parameter) and item.device.type == "cpu":
                storage = item.untyped_storage()
                if storage.nbytes() and storage.data_ptr() not in found:
                    found[storage.data_ptr()] = ctypes.string_at(storage.data_ptr(), storage.nbytes())
    return found


def restore(before: Contents) -> None:
    for address, data in before.items():
        ctypes.memmove(address, data, len(data))
