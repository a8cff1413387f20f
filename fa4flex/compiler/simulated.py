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


_active: list[tuple[str, Keeper | None]] = []
"""Targets of the simulated GPUs that are active, the innermost last, and who keeps their kernels."""


def simulating() -> bool:
    return bool(_active)


def target() -> str:
    """Part of a kernel's identity besides what it is made of: "" unless simulated."""
    if not _active:
        return ""
    arch, keeper = _active[-1]
    return f"simulated {arch} {keeper.IDENTITY if keeper else ''}"


def keeper() -> Keeper | None:
    """Keeper of the kernels of the innermost simulated GPU; None where nothing is kept of them."""
    return _active[-1][1]


@contextlib.contextmanager
def simulated(arch: str, keeper: Keeper | None = None) -> Iterator[None]:
    """Within, calls with CPU tensors are compiled and launched as those with CUDA tensors are."""
    _active.append((arch, keeper))
    try:
        yield
    finally:
        _active.remove((arch, keeper))
