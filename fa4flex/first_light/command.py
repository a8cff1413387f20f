"""`python -m fa4flex first-light`: checks every pipeline, times it, and writes one report to attach to an
issue."""

from __future__ import annotations

import argparse
import fnmatch
import json
import secrets
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from fa4flex.errors import InputError
from fa4flex.first_light import report
from fa4flex.first_light.processes import SANITIZERS, Done, Task, run_all

SECONDS = 600.0
MOST_SECONDS = {"right": 90.0, "fast": 60.0}
"""Seconds after which a case is ended: kernels compile in three to ten."""
SIMULATED_SECONDS = 600.0
SHARES = {"right": 0.4, "fast": 0.4, "under a tool": 0.2}
"""Shares of the time that is left for each step, in their order; what a step leaves over goes to the next.
Tools of compute-sanitizer come last, as they may take any time."""
END_SECONDS = 10.0
"""Seconds for the end of the run: for processes that hardly die, and the report."""

AT_ONCE = 4
"""Cases that are checked side by side: they wait for their compilers, hardly for the GPU."""

RECORDED_SEED = 0
"""Seed of inputs whose results the simulator has recorded."""


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--device", default="cuda", help="cuda (default), or a simulated chip: sm_90a, sm_100a")
    add("--cases", default="", metavar="A,B", help="only these cases and rows: names or patterns")
    add("--time-limit", type=float, default=SECONDS, metavar="SECONDS", help=f"default {SECONDS:.0f}")
    add("--seed", type=int, metavar="N", help="of inputs that are drawn anew (default: fresh, and printed)")
    add("--out", type=Path, default=Path(), metavar="FOLDER", help="for the report (default: here)")


def run(arguments: argparse.Namespace) -> int:
    """Exit status: 1 where a case is wrong, hangs or faults, or where none ran, else 0."""
    device, start = arguments.device, time.monotonic()
    _check(device)
    seed = secrets.randbelow(2**31) if arguments.seed is None else arguments.seed
    tasks = tasks_of(device, arguments.cases, seed)
    about = report.about(device, seed)
    print(report.heading(about), flush=True)
    bar, done = Bar(len(tasks)), list[Done]()
    for part, until in parts_of(tasks, start, arguments.time_limit):
        # What is timed runs alone.
        at_once = AT_ONCE if device == "cuda" and part[0].step == "right" else 1
        done += run_all(part, at_once, until, bar.tell)
    verdicts = [report.verdict(one) for one in done]
    text = report.anonymous(f"{report.heading(about)}\n\n{report.text(verdicts)}\n")
    found = report.anonymous(report.as_json(about, done, verdicts))
    print(f"\n{report.text(verdicts)}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    for suffix, written in (("txt", text), ("json", json.dumps(found, indent=1) + "\n")):
        path = arguments.out / f"first-light.{suffix}"
        path.write_text(written)
        print(f"wrote {path}")
    passed = {each.passed for each in verdicts}
    return 0 if True in passed and False not in passed else 1


def _check(device: str) -> None:
    """Raises InputError for a device that is not there."""
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise InputError(
            "no CUDA device is visible", "a GPU", "add --device sm_100a to run the smallest cases simulated"
        )
    if device not in ("cuda", "sm_90a", "sm_100a"):
        raise InputError(f"--device {device}", "cuda, sm_90a or sm_100a", "leave it out for the GPU")


def parts_of(tasks: Sequence[Task], start: float, seconds: float) -> list[tuple[list[Task], float]]:
    """Tasks of each step that has any, and when the last of them must have ended, by time.monotonic(): a run
    that began at `start` takes `seconds` at most."""
    parts = {step: [task for task in tasks if _step(task) == step] for step in SHARES}
    shares = {step: share for step, share in SHARES.items() if parts[step]}
    usable, found, passed = seconds - min(END_SECONDS, seconds / 2), [], 0.0
    for step, share in shares.items():
        passed += share / sum(shares.values())
        found.append((parts[step], start + passed * usable))
    return found


def _step(task: Task) -> str:
    return "under a tool" if task.under else task.step


def tasks_of(device: str, patterns: str, seed: int) -> list[Task]:
    """All processes of a run, in order. Raises InputError for a pattern that no case fits."""
    from fa4flex.first_light.cases import CASES
    from fa4flex.first_light.rows import ROWS

    simulated = device != "cuda"
    limit = SIMULATED_SECONDS if simulated else MOST_SECONDS["right"]
    chosen = [case for case in CASES if case.recorded or not simulated]
    tasks = []
    for case in chosen:
        if case.recorded:
            tasks.append(Task(device, "right", case.name, RECORDED_SEED, limit, recorded=True))
        if not simulated:
            tasks.append(Task(device, "right", case.name, seed, limit))
    if not simulated:
        tasks += [Task(device, "fast", name, seed, MOST_SECONDS["fast"]) for name in ROWS]
        if sanitizer := shutil.which("compute-sanitizer"):
            small = [case.name for case in CASES if case.recorded]
            tasks += [
                Task(device, "right", name, seed, 2 * limit, (sanitizer, "--tool", tool))
                for tool in SANITIZERS
                for name in small
            ]
    wanted = [x for x in patterns.split(",") if x]
    for pattern in wanted:
        if not any(fits(task.name, pattern) for task in tasks):
            names = ", ".join(dict.fromkeys(task.name for task in tasks))
            raise InputError(f"--cases {pattern!r}", f"some of {names}", "check the spelling")
    return [task for task in tasks if not wanted or any(fits(task.name, x) for x in wanted)]


def fits(name: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(name, pattern) or pattern in name


class Bar:
    """A line that grows in place on a terminal, and a line per case elsewhere."""

    def __init__(self, count: int) -> None:
        self.count, self.done, self.start = count, 0, time.monotonic()

    def tell(self, done: Done) -> None:
        self.done += 1
        word = report.verdict(done).word
        said = f"{self.done:3d}/{self.count} {time.monotonic() - self.start:4.0f} s  {done.task.name}: {word}"
        if not sys.stdout.isatty():
            print(said, flush=True)
            return
        full = 30 * self.done // self.count
        print(f"\r[{'#' * full}{'.' * (30 - full)}] {said[:60]:60}", end="", flush=True)
