"""Compilations in processes of their own, whose results wait on disk: a first call needs two passes compiled.

Two compilations in one process end it, and the compiler holds the interpreter's lock, so that threads are of
no use. A process starts in a tenth of a second, imports the compiler without torch (worker.py), and puts
what it makes into the cache on disk (cache.py), where this process finds it. Where it fails or is late, this
process compiles, and raises what there is to raise.

What is remembered here is which processes run, by the key of their kernel, until they are waited for. None
outlives the interpreter, and children of a fork know of none.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

from fa4flex.compiler import cache

WORKER = "fa4flex.compiler.worker"
PATIENCE = 5.0
"""Seconds that a process which is told to end has for it."""

MOST_RUNNING = 3
"""Processes at a time, where there are as many processors beside this process': each takes one, and half a
gigabyte. Three are for gradients of a first call, and for tables or lengths of both passes."""

LOOK = 0.005
"""Seconds between looks whether a process has ended: a first call waits that much too long at most."""

_running: dict[str, subprocess.Popen[bytes]] = {}


def useful() -> bool:
    """True if another process would run beside this one."""
    return bool(sys.executable) and _others() > 0


def start(key: str, job: bytes) -> None:
    """Have `job`, as worker.py reads it, done by a process, if that can be had and few run yet."""
    for known in [known for known, process in list(_running.items()) if process.poll() is not None]:
        _running.pop(known, None)
    if key in _running or len(_running) >= min(MOST_RUNNING, _others()):
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
    process, deadline = _running.get(key), time.monotonic() + cache.WAIT
    if process is None:
        return
    # Popen.wait looks every 50 ms. One whose waiting is interrupted is known still, and ends with the
    # interpreter.
    while process.poll() is None:
        if time.monotonic() > deadline:
            _end([process])
        else:
            time.sleep(LOOK)
    _running.pop(key, None)


def _others() -> int:
    """Number of processors that this process may use, but for one that it needs itself."""
    return len(os.sched_getaffinity(0)) - 1


def _environment() -> dict[str, str]:
    """The package that is running, wherever it came from, and one thread for numpy, which begins one per
    processor otherwise. GPUs stay visible: a driver that is asked about them where none is (worker.py does
    not ask) takes seconds to say so."""
    root, others = str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")
    path = os.pathsep.join([root, others]) if others else root
    return {**os.environ, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"}


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
