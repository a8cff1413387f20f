"""Sequences in many processes at once: GPUs wait for hosts, which compile and compare."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from fa4flex.bench.isolated import begin, end

COMPOSITIONS = 4
"""Seeds of compositions that processes share: each other one compiles kernels of its own."""
GRACE = 90.0
"""Seconds for which a process may go on after its time: a sequence is not broken off."""


@dataclass
class Running:
    """A process of one seed."""

    seed: int
    process: subprocess.Popen[str]
    log: Path

    def counts(self) -> tuple[int, int, int] | None:
        """Calls, sequences and failures, or None if it was ended before it said them."""
        line = re.search(r"(\d+) calls in (\d+) sequences, .*: (\d+) failures", self.log.read_text())
        return None if line is None else (int(line[1]), int(line[2]), int(line[3]))


def started(options: Sequence[str], seed: int, mods_seed: int, gpu: int | None, log: Path) -> Running:
    command = [sys.executable, str(Path(__file__).parent), *options]
    command += ["--seed", str(seed), "--mods-seed", str(mods_seed)]
    more = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": str(gpu)}
    with log.open("w") as out:
        process = begin(command, stdout=out, env={**os.environ, **more})
    return Running(seed, process, log)


def run_many(options: Sequence[str], seed: int, jobs: int, seconds: float, folder: Path) -> int:
    """Exit status: 0 if all of them ended, and found nothing. Logs are files of the folder, by seed."""
    gpus = torch.cuda.device_count() if "cuda" in options else 0
    folder.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + seconds + GRACE
    running = [
        started(
            [*options, "--time", str(seconds)],
            seed + i,
            seed + i % COMPOSITIONS,
            i % gpus if gpus else None,
            folder / f"{seed + i}.log",
        )
        for i in range(jobs)
    ]
    wait(running, until)
    return report(running)


def wait(running: Sequence[Running], until: float) -> None:
    """Wait for processes until that time, by time.monotonic(), and then end them with their children."""
    for one in running:
        try:
            one.process.wait(max(until - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            end(one.process)


def report(running: Sequence[Running]) -> int:
    total, wrong = [0, 0, 0], 0
    for one in running:
        counts = one.counts()
        total = [a + b for a, b in zip(total, counts or (0, 0, 0), strict=True)]
        if one.process.returncode == 0 and counts is not None:
            continue
        wrong += 1
        print(
            f"--- seed {one.seed}: exit status {one.process.returncode}",
            one.log.read_text()[-3000:],
            sep="\n",
        )
    calls, sequences, failures = total
    print(
        f"TOTAL {calls} calls in {sequences} sequences of {len(running)} processes: "
        f"{failures} failures, {wrong} processes with failures or without an end"
    )
    return 1 if wrong or failures else 0
