"""Simulated GPUs, for which CPU tensors stand in: launches are caught by whoever simulates it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol


class Keeper(Protocol):
    """Whoever catches launches knows how a compiled kernel becomes bytes that a later process can launch."""

    @property
    def IDENTITY(self) -> str:
        """Part of the key of kept bytes: it changes with what they mean."""

    def packed(self, compiled: Any) -> bytes: ...

    def loaded(self, content: bytes) -> Callable[..., Any]: ...


_active: list[tuple[str, Keeper | None, int | None]] = []
"""Targets of the simulated GPUs that are active, the innermost last, who keeps their kernels, and how many
multiprocessors they have, if not as many as the chip."""


def simulating() -> bool:
    return bool(_active)


def target() -> str:
    """Part of a kernel's identity besides what it is made of: "" unless simulated."""
    if not _active:
        return ""
    arch, keeper, _ = _active[-1]
    return f"simulated {arch} {keeper.IDENTITY if keeper else ''}"


def gpu() -> tuple[str, int | None] | None:
    """Part of a launch's look, as a CUDA device is of others: the same tensors may be on another simulated
    GPU next, with as few multiprocessors as a test wants. None unless simulated."""
    return (target(), _active[-1][2]) if _active else None


def keeper() -> Keeper | None:
    """Keeper of the kernels of the innermost simulated GPU; None where nothing is kept of them."""
    return _active[-1][1]


@contextlib.contextmanager
def simulated(arch: str, keeper: Keeper | None = None, sms: int | None = None) -> Iterator[None]:
    """Within, calls with CPU tensors are compiled and launched as those with CUDA tensors are. `sms` is how
    many multiprocessors the GPU has, if not as many as the chip."""
    _active.append((arch, keeper, sms))
    try:
        yield
    finally:
        _active.remove((arch, keeper, sms))
