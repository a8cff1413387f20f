"""Compilations in processes of their own, whose results wait on disk: a first call needs two passes compiled.

Two compilations in one process end it, and the compiler holds the interpreter's lock, so that threads are of
no use. A process starts in a tenth of a second, imports the compiler alone, and puts what it makes into the
cache on disk (cache.py), where this process finds it. It can only save time: where it fails or is late,
this process compiles, and raises what there is to raise.

What is remembered here is which processes run, by the key of their kernel, until they are waited for. None
outlives the interpreter, and children of a fork know of none.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import subprocess
import sys
from pathlib import Path

from fa4flex.compiler import cache

WORKER = "fa4flex.compiler.worker"
PATIENCE = 5.0
"""Seconds that a process which is told to end has for it."""

MOST_RUNNING = 2
"""Processes at a time: each takes a core and half a gigabyte."""

_running: dict[str, subprocess.Popen[bytes]] = {}


def useful() -> bool:
    """True if another process would run beside this one."""
    return bool(sys.executable) and len(os.sched_getaffinity(0)) > 1


def start(key: str, job: bytes) -> None:
    """Have `job`, as worker.py reads it, done by a process, if that can be had and few run yet."""
    for known in [known for known, process in list(_running.items()) if process.poll() is not None]:
        _running.pop(known, None)
    if key in _running or len(_running) >= MOST_RUNNING:
        return
    with contextlib.suppress(OSError):
        process = subprocess.Popen(
            [sys.executable, "-m", WORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,  # what goes wrong there goes wrong here again, where it is raised
            env=_environment(),
        )
        _running[key] = process
        assert process.stdin is not None
        with process.stdin as pipe:
            pipe.write(job)


def wait(key: str) -> None:
    """Return when no process works on `key`."""
    process = _running.pop(key, None)
    if process is None:
        return
    try:
        process.wait(cache.WAIT)
    except subprocess.TimeoutExpired:
        _end([process])


def _environment() -> dict[str, str]:
    """The package that is running, wherever it came from, and no GPU, of which a compiler needs nothing."""
    root, others = str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")
    path = os.pathsep.join([root, others]) if others else root
    return {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        with contextlib.suppress(OSError):
            process.terminate()
    for process in processes:
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@atexit.register
def _end_all() -> None:
    _end(list(_running.values()))
    _running.clear()


os.register_at_fork(after_in_child=_running.clear)
