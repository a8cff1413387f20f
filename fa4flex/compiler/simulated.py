"""Simulated GPUs, for which CPU tensors stand in: launches are caught by whoever simulates it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

_archs: list[str] = []
"""Targets of the simulated GPUs that are active, the innermost last."""


def simulating() -> bool:
    return bool(_archs)


def target() -> str:
    """Part of a kernel's identity besides what it is made of: "" unless simulated."""
    return f"simulated {_archs[-1]}" if _archs else ""


@contextlib.contextmanager
def simulated(arch: str) -> Iterator[None]:
    """Within, calls with CPU tensors are compiled and launched as those with CUDA tensors are."""
    _archs.append(arch)
    try:
        yield
    finally:
        _archs.remove(arch)
