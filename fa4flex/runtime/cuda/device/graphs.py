"""Objects besides the user's tensors that captured CUDA graphs point to: they may be replayed at any time."""

from __future__ import annotations

from typing import Any

from fa4flex.runtime.cuda.device import counters

_held: list[Any] = []


def hold_if_captured(device: int, ready: Any) -> None:
    """Keep a launch and its tables for good where it is being captured on CUDA device number `device`, -1 for
    none: when tensors that it was proved with change, nothing else refers to it any more."""
    if device >= 0 and counters.being_captured(device):
        _held.append(ready)
