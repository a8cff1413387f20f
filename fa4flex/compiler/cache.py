"""Compiled kernels on disk: one file per key, written whole, verified when it is read.

The directory is $FA4FLEX_CACHE_DIR, else $XDG_CACHE_HOME/fa4flex, else ~/.cache/fa4flex; FA4FLEX_CACHE=0
turns it off. A file in it is code that this process will run, so a directory that somebody else owns or
may write to is not used. Files are the newest MOST_ENTRIES (some 100 kB each); the longest unused go first.

A file is complete or absent: it is written under another name and moved into place. Its last bytes are a
digest of what comes before, so a damaged file is found, and built again. Locks only save work: processes
that start at once compile a kernel once. A process that waits too long, or whose file system knows no
locks, compiles as well, and the last one to finish replaces an equal file.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

MOST_ENTRIES = 2048
WAIT = 120.0
"""Seconds to wait for another process that compiles the same kernel."""

SIMULATED = ".sim"
"""Suffix of kernels of simulated GPUs."""
REPORT = ".report"
"""Suffix of reports on kernels."""
SUFFIXES = (".so", ".o", SIMULATED, REPORT)
_MAGIC = b"FA4FLEX1"
_TRAILER = len(_MAGIC) + hashlib.sha256().digest_size
_warned: set[str] = set()


def directory() -> Path | None:
    """Directory of kept kernels, or None where none are kept: turned off, or not safe (warned about once)."""
    if os.environ.get("FA4FLEX_CACHE", "1").strip().lower() in ("0", "off", "false", "no"):
        return None
    value = os.environ.get("FA4FLEX_CACHE_DIR")
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    path = Path(value) if value else Path(base) / "fa4flex"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        unsafe = _unsafe(path)
    except OSError as error:
        unsafe = str(error)
    if unsafe:
        _warn_once(path, unsafe)
    return None if unsafe else path


def _unsafe(path: Path) -> str:
    """Reason why the directory cannot be trusted, in words; "" if it can."""
    result = path.stat()
    if result.st_uid != os.getuid():
        return f"it belongs to user {result.st_uid}, this process to {os.getuid()}"
    if result.st_mode & 0o022:
        return f"others may write to it (mode {result.st_mode & 0o777:o}); chmod 700 makes it private"
    return "" if os.access(path, os.W_OK | os.X_OK) else "this process may not write to it"


def _warn_once(path: Path, reason: str) -> None:
    if str(path) not in _warned:
        _warned.add(str(path))
        warnings.warn(
            f"fa4flex compiles kernels anew in each process: {path} is not used as their cache, because "
            f"{reason}. Set FA4FLEX_CACHE_DIR to a directory of your own, or FA4FLEX_CACHE=0.",
            RuntimeWarning,
            stacklevel=2,
        )


def find(folder: Path, key: str) -> Path | None:
    """The verified file of `key`, or None. A file that is damaged is removed."""
    for suffix in SUFFIXES:
        path = folder / (key + suffix)
        try:
            content = path.read_bytes()
        except OSError:
            continue
        if _sealed(content):
            with contextlib.suppress(OSError):
                os.utime(path)  # marks it as used
            return path
        path.unlink(missing_ok=True)
    return None


def content(path: Path) -> bytes:
    """Content of a verified file, without its digest."""
    return path.read_bytes()[:-_TRAILER]


def holds(folder: Path, key: str) -> bool:
    """True if there is a file of `key`, be it damaged."""
    return any((folder / (key + suffix)).exists() for suffix in SUFFIXES)


def empty(folder: Path) -> bool:
    """True if nothing is kept there."""
    return not any(path.suffix in SUFFIXES for path in folder.iterdir())


def store(folder: Path, key: str, suffix: str, content: bytes) -> Path:
    """Put `content` under `key`, at once and readable by this user alone."""
    path = folder / (key + suffix)
    descriptor, temporary = tempfile.mkstemp(prefix=".", suffix=".partial", dir=folder)  # mode 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(seal(content))
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    _drop_oldest(folder)
    return path


def obtain(folder: Path, key: str, build: Callable[[], tuple[str, bytes]]) -> tuple[Path, bool]:
    """The file of `key`, and whether `build`, which returns (suffix, content), had to be called."""
    result = find(folder, key)
    if result is not None:
        return result, False
    with locked(folder / f"{key}.lock"):
        result = find(folder, key)  # the process that held the lock may have stored it
        if result is not None:
            return result, False
        return store(folder, key, *build()), True


@contextlib.contextmanager
def locked(path: Path, wait: float = WAIT) -> Iterator[None]:
    """Hold a lock file, or go on without after `wait` seconds or where files cannot be locked."""
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError:
        yield
        return
    try:
        held = _acquire(descriptor, time.monotonic() + wait)
        yield
        if held:
            path.unlink(missing_ok=True)  # whoever waits for this file looks for the kernel next
    finally:
        os.close(descriptor)


def _acquire(descriptor: int, deadline: float) -> bool:
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        except OSError:
            return False


def seal(content: bytes) -> bytes:
    """`content` with its digest behind it, which readers of object files do not look at."""
    return content + _MAGIC + hashlib.sha256(content).digest()


def _sealed(content: bytes) -> bool:
    body, trailer = content[:-_TRAILER], content[-_TRAILER:]
    return len(content) > _TRAILER and trailer == _MAGIC + hashlib.sha256(body).digest()


def _drop_oldest(folder: Path) -> None:
    """Keep the MOST_ENTRIES files used last. Another process may remove the same ones meanwhile."""
    entries: list[tuple[float, Path]] = []
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            if path.suffix in SUFFIXES:
                with contextlib.suppress(OSError):
                    entries.append((path.stat().st_mtime, path))
    for _, path in sorted(entries)[: max(0, len(entries) - MOST_ENTRIES)]:
        with contextlib.suppress(OSError):
            path.unlink()
