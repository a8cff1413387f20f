"""Compilations in processes of their own, whose results wait on disk: a first call needs two passes compiled.

Two compilations in one process end it, and the compiler holds the interpreter's lock, so that threads are of
no use. A process starts in a tenth of a second, imports the compiler without torch (worker.py), and puts
what it makes into the cache on disk (cache.py), where this process finds it. Where it fails or is late, this
process compiles, and raises what there is to raise.

What is remembered here is which processes run, by the key of their kernel, until they are waited for, and
what was said by those that failed. None outlives the interpreter, and children of a fork know of none.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import IO, NamedTuple

from fa4flex.compiler import cache

WORKER = "fa4flex.compiler.worker"
PATIENCE = 5.0
"""Seconds that a process which is told to end has for it."""

MOST_RUNNING = 3
"""Processes at a time, where there are as many processors beside this process': each takes one, and half a
gigabyte. Three are for gradients of a first call, and for tables or lengths of both passes."""

LOOK = 0.005
"""Seconds between looks whether a process has ended: a first call waits that much too long at most."""

MOST_SAID = 2000
"""Characters of what a process said last that are read."""


class Running(NamedTuple):
    """A process, and the file of what it says of errors, which is closed with it."""

    process: subprocess.Popen[bytes]
    errors: IO[bytes]


_running: dict[str, Running] = {}
_prepared: list[Running] = []
_failed: dict[str, str] = {}
_starting = threading.Lock()


def useful() -> bool:
    """True if another process would run beside this one."""
    return bool(sys.executable) and _others() > 0


def start(key: str, job: bytes, least: int = 0) -> bool:
    """Have `job`, as worker.py reads it, done by a process, if that can be had and few run yet; `least` may
    run whatever processors there are. True if one works on it."""
    with _starting:
        for known in [known for known, one in list(_running.items()) if one.process.poll() is not None]:
            _forget(known)
        if key in _running:
            return True
        if len(_running) >= min(MOST_RUNNING, max(_others(), least)):
            return False
        with contextlib.suppress(OSError):
            running = _running[key] = _prepared.pop() if _prepared else _begun()
            assert running.process.stdin is not None
            with running.process.stdin as pipe:
                pipe.write(job)
        return key in _running


def prepare(arch: str) -> None:
    """Begin a process that imports the compiler while its job, for this chip, is still to be found out."""
    with _starting, contextlib.suppress(OSError):
        if not _running and not _prepared:
            _prepared.append(_begun(arch))


def dismiss() -> None:
    """End a process that was prepared and has no job."""
    with _starting:
        idle = [_prepared.pop() for _ in range(len(_prepared))]
    _end([running.process for running in idle])


def _begun(*arguments: str) -> Running:
    errors = tempfile.TemporaryFile()  # noqa: SIM115
    process = subprocess.Popen(
        [sys.executable, "-m", WORKER, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=errors,
        env=_environment(),
    )
    return Running(process, errors)


def wait(key: str, look: float = LOOK) -> None:
    """Return when no process works on `key`; looks come after so many seconds."""
    running, deadline = _running.get(key), time.monotonic() + cache.WAIT
    if running is None:
        return
    # Popen.wait looks every 50 ms. One whose waiting is interrupted is known still, and ends with the
    # interpreter.
    while running.process.poll() is None:
        if time.monotonic() > deadline:
            _end([running.process])
        else:
            time.sleep(look)
    _forget(key)


def failed(key: str) -> str:
    """Error of the last process that failed to compile `key`; "" if none did."""
    return _failed.get(key, "")


def _forget(key: str) -> None:
    """Take note of a process that has ended."""
    running = _running.pop(key, None)
    if running is None:  # another thread was faster
        return
    process, errors = running
    with errors:
        if process.returncode:
            errors.seek(max(errors.seek(0, os.SEEK_END) - MOST_SAID, 0))
            told = _last_error(errors.read().decode(errors="replace"))
            _failed[key] = told or f"the process ended with {process.returncode}"
        else:
            _failed.pop(key, None)


def _last_error(text: str) -> str:
    """The error that ended a process, as one line: its first line is not indented, its others are."""
    lines = text.strip().splitlines()
    first = max((i for i, line in enumerate(lines) if line[:1].strip()), default=0)
    return "; ".join(line.strip() for line in lines[first:])


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
def end_all() -> None:
    """End all processes."""
    dismiss()
    _end([running.process for running in list(_running.values())])
    _running.clear()


def _in_child() -> None:
    global _starting
    _running.clear()
    _prepared.clear()
    _starting = threading.Lock()


os.register_at_fork(after_in_child=_in_child)
