"""Host time per call without a GPU: everything as on one, but compiled functions return at once.

    python benchmarks/host_time_stub.py [--rounds 15] [--only TEXT]

CPU tensors stand for those of a GPU, and torch's allocations on a CPU for those there. Each row has the
process time of a call in us, the least of the rounds' medians, and what it is over the repeated call's in the
same round, the median of the rounds: a machine that does other things meanwhile changes the ratio less.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any
from unittest import mock

import torch
from host_calls import Call, rows

from fa4flex import contents, lower
from fa4flex.kernels.plan.arguments import COUNTERS
from fa4flex.kernels.plan.target import SM90A
from fa4flex.primitives import blocks
from fa4flex.primitives import paging as paging_module
from fa4flex.primitives import varlen as varlen_module
from fa4flex.runtime import block_lists as runtime_lists
from fa4flex.runtime import compute
from fa4flex.runtime.cuda import block_lists as cuda_lists
from fa4flex.runtime.cuda import engine, in_place
from fa4flex.runtime.cuda.device import kept_kernels
from fa4flex.runtime.cuda.launches import ready, ready_backward

SAMPLES, CALLS = 12, 50


class Standin:
    """Stand-in for compiled kernels: it has their keys, and does nothing."""

    def __init__(self, source: Any, problem: Any, signature: Any, arch: str = "sm_90a") -> None:
        self.key = f"{source.key} {signature}"

    @staticmethod
    def launch(*given: Any) -> None:
        return None


def stand_in() -> None:
    """Make calls of CPU tensors go the way of a GPU's, up to the launches and without these."""
    zeros = torch.zeros(COUNTERS, dtype=torch.int32)
    for module in (ready, ready_backward):
        mock.patch.object(module, "counters", lambda device: zeros).start()
    for module in (engine, in_place, kept_kernels):
        mock.patch.object(module, "target_of", lambda device: SM90A).start()
    for module in (contents, varlen_module, paging_module, blocks):
        mock.patch.object(module, "checked_here", lambda x: False).start()
    mock.patch.object(contents.Alike, "made", lambda self, key, tensors, make: make()).start()
    mock.patch.object(blocks, "simulating", lambda: True).start()
    for module in (lower, cuda_lists):
        mock.patch.object(module, "compile_kernel", Standin).start()
    mock.patch.object(lower, "compile_ahead", lambda *given: None).start()
    mock.patch.object(compute, "on_gpu", lambda q: True).start()
    mock.patch.object(runtime_lists, "by_kernels", lambda *given: True).start()


# --- measuring ----------------------------------------------------------------------------------------------


def microseconds(call: Call) -> float:
    """Median process time per call."""
    found = []
    for _ in range(SAMPLES):
        start = time.process_time_ns()
        for _ in range(CALLS):
            call()
        found.append((time.process_time_ns() - start) / CALLS / 1000)
    return statistics.median(found)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", default="", help="rows whose names have this text in them")
    arguments = parser.parse_args()
    stand_in()
    torch.set_num_threads(1)
    every = rows()
    repeated = every["repeated"]
    every = {name: call for name, call in every.items() if arguments.only in name}
    for call in (repeated, *every.values()):
        microseconds(call)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in every}
    for _ in range(arguments.rounds):
        for name, call in every.items():
            unit, of_call = microseconds(repeated), microseconds(call)
            found[name].append((of_call, of_call / unit))
    for name, measured in found.items():
        least, ratio = min(x for x, _ in measured), statistics.median(x for _, x in measured)
        print(f"{name:44} {least:7.1f} us   {ratio:5.2f} of a repeated call", flush=True)


if __name__ == "__main__":
    main()
