"""Cases in processes of their own, some at a time, each with a limit: a kernel that hangs or faults ends its
process alone."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fa4flex.bench.isolated import begin, end

SANITIZERS = ("memcheck", "racecheck")
"""Tools of compute-sanitizer that are run over cases, where it is installed."""


@dataclass(frozen=True)
class Task:
    """Work of one process. seconds: its limit; `under`: a command to run it under; `recorded`: its inputs
    are those of which the simulator's results are kept."""

    device: str
    step: str
    name: str
    seed: int
    seconds: float
    under: tuple[str, ...] = ()
    recorded: bool = False

    @property
    def command(self) -> list[str]:
        worker = [sys.executable, "-m", "fa4flex.first_light.worker"]
        return [*self.under, *worker, self.device, self.step, self.name, str(self.seed)]


@dataclass(frozen=True)
class Done:
    """Outcome of a task: what its process said in JSON, with `error` or `output` where it failed."""

    task: Task
    seconds: float
    said: dict[str, Any]


def run_all(
    tasks: Sequence[Task], at_once: int, until: float, tell: Callable[[Done], None]
) -> Iterator[Done]:
    """Run tasks, `at_once` of them side by side, and `tell` of each as it ends; results come in the order of
    tasks. None runs after `until`, by time.monotonic(), and none that others wait behind takes more than half
    of the time that is left."""
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    results: dict[int, Done] = {}
    for n in range(len(tasks)):
        waiting.put(n)

    def work() -> None:
        while True:
            try:
                n = waiting.get_nowait()
            except queue.Empty:
                return
            left = until - time.monotonic()
            if not waiting.empty():
                left /= 2
            results[n] = _run(tasks[n], left) if left > 0 else Done(tasks[n], 0.0, {"skipped": "time limit"})
            tell(results[n])

    threads = [threading.Thread(target=work) for _ in range(min(at_once, len(tasks)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    yield from (results[n] for n in range(len(tasks)))


def _run(task: Task, most: float) -> Done:
    """The task in a process that leads a group of its own, so that all of it can be killed."""
    start, limit = time.monotonic(), min(task.seconds, most)
    process = begin(task.command)
    try:
        output, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        end(process)
        try:
            output, _ = process.communicate(timeout=1)
        except subprocess.TimeoutExpired:
            output = ""
        said = {"error": f"still running after {limit:.0f} s, and was ended", "output": output[-2000:]}
        return Done(
            task, time.monotonic() - start, said if limit == task.seconds else {"skipped": "time limit"}
        )
    return Done(task, time.monotonic() - start, _said(output, process.returncode))


def _said(output: str, status: int) -> dict[str, Any]:
    for line in reversed(output.splitlines()):
        if line.startswith("{"):
            said: dict[str, Any] = json.loads(line)
            said["sanitizer"] = [x.strip("= ") for x in output.splitlines() if "ERROR SUMMARY" in x]
            return said
    error = f"its process ended with status {status}"
    return {"error": error, "output": output[-2000:]}
