"""Kernels that are compiled in the background, for calls that others serve meanwhile.

A thread has other processes compile them (ahead.py: the compiler holds the interpreter's lock for all of its
time) and waits. What is made lies in the cache on disk then, and whoever asked is told. What goes wrong is
raised by no call: it is said once, as a warning, and kept for whoever explains.

Nothing is remembered of a process that this one was forked from, and nothing outlives the interpreter.
FA4FLEX_BACKGROUND=0 turns it off, and so does a cache that is not kept on disk.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from fa4flex.compiler import ahead, cache
from ptxsim.active import simulating

SWITCH = "FA4FLEX_BACKGROUND"
LOOK = 0.02
"""Seconds between looks of the thread: nobody waits for it."""

PATIENCE = 2.0
"""Seconds that the thread has to end with the interpreter."""


ATTEMPTS = 2
"""Processes that are started for a kernel whose file is not there, when none said why."""


class Job(NamedTuple):
    """A kernel to compile: its key, its name, what worker.py reads, and the folder where its file will be."""

    key: str
    name: str
    text: bytes
    folder: Path


class Awaited:
    """Kernels that are being compiled.

    over      True when all of them are on disk
    error     why they never will be, in words; "" as long as nobody knows of a reason
    settled   set when either is so, and whoever asked has been told
    """

    def __init__(self, jobs: Sequence[Job], then: Callable[[], object]) -> None:
        self.jobs, self.then = tuple(jobs), then
        self.over, self.error = False, ""
        self.settled = threading.Event()
        _all.add(self)

    @property
    def state(self) -> str:
        """State of the compilation, in words."""
        if self.error:
            return f"could not be compiled, so that it stays so: {self.error}"
        return "has been compiled, and takes over" if self.over else "is being compiled"


_all: weakref.WeakSet[Awaited] = weakref.WeakSet()
_asked: queue.SimpleQueue[Awaited | None] = queue.SimpleQueue()
_thread: threading.Thread | None = None
_beginning = threading.Lock()
_ending = False
_said: set[str] = set()


def on() -> bool:
    """True if kernels may be compiled in the background."""
    if os.environ.get(SWITCH, "1").strip().lower() in ("0", "off", "false", "no"):
        return False
    return not simulating() and cache.directory() is not None


def begin(jobs: Sequence[Job], then: Callable[[], object]) -> Awaited:
    """Have these kernels compiled. `then` is called, by another thread, when all of them are on disk."""
    global _thread
    made = Awaited(jobs, then)
    _asked.put(made)
    with _beginning:
        if not _ending and (_thread is None or not _thread.is_alive()):
            _thread = threading.Thread(target=_work, args=(_asked,), name="fa4flex compiles", daemon=True)
            _thread.start()
    return made


def _work(asked: queue.SimpleQueue[Awaited | None]) -> None:
    while (awaited := asked.get()) is not None and not _ending:
        try:
            awaited.error = _compiled(awaited.jobs)
            if not awaited.error and not _ending:
                awaited.over = True
                awaited.then()
        except Exception as error:  # nobody who could be told is waiting
            awaited.error = f"{type(error).__name__}: {error}"
        if awaited.error and not _ending:
            _say(awaited)
        awaited.settled.set()


def wait() -> None:
    """Wait until nothing is being compiled in the background."""
    for awaited in list(_all):
        while not awaited.settled.wait(LOOK) and not _ending:
            pass


def _compiled(jobs: Sequence[Job]) -> str:
    """The reason why some of these cannot be compiled, when it is known; "" when all of them are."""
    for job in jobs:
        if not ahead.failed(job.key) and not cache.holds(job.folder, job.key):
            ahead.start(job.key, job.text, least=1)
    return next((reason for reason in map(_reason, jobs) if reason), "")


def _reason(job: Job) -> str:
    for _ in range(ATTEMPTS):
        if cache.holds(job.folder, job.key):
            return ""
        if ahead.failed(job.key):
            break
        while not ahead.start(job.key, job.text, least=1):
            if _ending:
                return "the interpreter ends"
            time.sleep(LOOK)
        ahead.wait(job.key, LOOK)
    held = cache.holds(job.folder, job.key)
    return "" if held else ahead.failed(job.key) or f"{job.folder} does not keep what is put there"


def _say(awaited: Awaited) -> None:
    keys = {job.key for job in awaited.jobs}
    if keys <= _said:
        return
    _said.update(keys)
    names = ", ".join(job.name for job in awaited.jobs)
    with contextlib.suppress(Warning):  # where warnings are errors, they are none of this thread's
        warnings.warn(
            f"fa4flex could not compile a faster kernel in the background ({names}): {awaited.error}. Calls"
            f" go on with a slower kernel, whose results are as right. {SWITCH}=0 compiles in the call that"
            " wants it, which raises the whole error.",
            RuntimeWarning,
            stacklevel=2,
        )


@atexit.register
def end() -> None:
    """End the thread, and the processes that it waits for."""
    global _ending
    _ending = True
    ahead.end_all()
    _asked.put(None)
    if _thread is not None and _thread.is_alive():
        _thread.join(PATIENCE)


def _in_child() -> None:
    """A forked process has no thread: what its parent waits for, this one does not get to know of."""
    global _asked, _thread, _beginning
    for awaited in list(_all):
        if not awaited.over and not awaited.error:
            awaited.error = "the process that was forked waits for it"
        awaited.settled.set()
    _asked, _thread, _beginning = queue.SimpleQueue(), None, threading.Lock()


os.register_at_fork(after_in_child=_in_child)
