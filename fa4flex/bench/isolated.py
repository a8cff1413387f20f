"""Processes that do one piece of work after another, each within a limit; one that dies is replaced."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from subprocess import PIPE
from typing import Any

MARK = "\x1e"
"""Begin of a line that is for the parent, in JSON. All others are what libraries print."""
LAST_WORDS = 2000
"""Characters of a process's output that are kept where it ended by itself."""


@dataclass(frozen=True)
class Answer:
    """Outcome of a request.

    said    what the process answered; None where it died or was ended
    at      its last word on what it was doing
    why     how it ended, with its last words
    late    True if it was ended after the limit
    """

    said: dict[str, Any] | None
    at: str = ""
    why: str = ""
    late: bool = False


def tell(**words: Any) -> None:
    """Tell the parent; to be called in the process."""
    print(f"{MARK}{json.dumps(words)}", flush=True)


def begin(command: Sequence[str], **more: Any) -> subprocess.Popen[str]:
    """Start a process that leads a group of its own, for `end`. Its errors are part of its output; more: as
    Popen takes it."""
    return subprocess.Popen(
        command, stderr=subprocess.STDOUT, text=True, start_new_session=True, **{"stdout": PIPE, **more}
    )


def end(process: subprocess.Popen[str], seconds: float = 5.0) -> None:
    """Kill a process that leads a group of its own, with all its children. One that waits for a broken driver
    may not end even so: it is left to itself."""
    with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=seconds)


@dataclass
class Worker:
    """A process of `command`, which reads requests in JSON, a line each, and answers with `tell(answer=...)`;
    before, as often as it likes, `tell(at=...)`. It is begun at the first request, and anew after one that it
    did not outlive."""

    command: Sequence[str]
    process: subprocess.Popen[str] | None = None
    lines: queue.SimpleQueue[str | None] = field(default_factory=queue.SimpleQueue)

    def ask(self, request: dict[str, Any], seconds: float) -> Answer:
        """Answer to a request, or how the process ended: after `seconds` it is killed."""
        until = time.monotonic() + seconds
        process = self._begun()
        assert process.stdin is not None
        with contextlib.suppress(OSError):  # of a dead process, whose last lines are read below
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
        at, words = "", ""
        while True:
            try:
                line = self.lines.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                self.close()
                return Answer(None, at, f"still running after {seconds:.0f} s, and was ended", late=True)
            if line is None:
                status = process.wait()
                self.close()
                return Answer(None, at, f"its process ended with status {status}: {_flat(words)}")
            if not line.startswith(MARK):
                words = (words + line)[-LAST_WORDS:]
                continue
            said = json.loads(line[len(MARK) :])
            if "answer" in said:
                return Answer(said["answer"], at)
            at = said["at"]

    def close(self) -> None:
        """End the process. The next request begins another."""
        if self.process is not None:
            end(self.process)
            assert self.process.stdin is not None
            with contextlib.suppress(OSError):  # of a request that it has not read
                self.process.stdin.close()
        self.process = None

    def _begun(self) -> subprocess.Popen[str]:
        if self.process is None:
            self.lines = queue.SimpleQueue()
            self.process = begin(self.command, stdin=PIPE)
            threading.Thread(target=_read, args=(self.process, self.lines), daemon=True).start()
        return self.process


def _read(process: subprocess.Popen[str], lines: queue.SimpleQueue[str | None]) -> None:
    assert process.stdout is not None
    with process.stdout:
        for line in process.stdout:
            lines.put(line)
    lines.put(None)


def _flat(words: str) -> str:
    return " ".join(words.split())[-200:]
