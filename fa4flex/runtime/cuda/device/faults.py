"""Faults that kernels found in contents of tensors, raised by the host without waiting for a device.

Kernels write to one table in the host's own pinned memory (kernels/plan/faults.py), and only where there is a
fault: a call costs a look at one number. An error is therefore one of an earlier call, also of a replayed
CUDA graph: whoever wants to know at once calls `synchronize`, or sets FA4FLEX_VALIDATE=1.
"""

from __future__ import annotations

import ctypes
import threading

import torch
from torch import Tensor

from fa4flex import later
from fa4flex.errors import EarlierError
from fa4flex.kernels.plan.faults import KINDS, ROWS, WORDS

pending = ctypes.c_int64(0)
"""The number in front of the table, wherever that is; without one, 0."""

_making = threading.Lock()
_table: Tensor | None = None
"""int64 [ROWS, WORDS]. It is never given back: graphs may be replayed at any time."""


def table() -> int:
    """Address of the table, for launches. Pinned memory is at the same address for all devices."""
    global _table, pending
    if _table is None:
        with _making:  # launches of all threads write to one
            if _table is None:
                made = torch.zeros(ROWS, WORDS, dtype=torch.int64, device="cpu", pin_memory=_pins())
                pending = ctypes.c_int64.from_address(made.data_ptr())
                _table = made
    return _table.data_ptr()


def _pins() -> bool:
    return torch.cuda.is_available()


def check() -> None:
    """Raise InputError if a kernel has found a fault by now, or a condition on contents did not hold, and
    forget it."""
    if pending.value:
        _raise()
    later.check()


def _raise() -> None:
    assert _table is not None
    rows = _table.tolist()
    _table.zero_()
    kind, numbers = next((kind, row[1:]) for kind, row in zip(KINDS, rows[1:], strict=True) if row[0])
    raise EarlierError(
        f"{kind.given.format(*numbers)}, in a call before this one: its result is not valid",
        kind.expected.format(*numbers),
        f"{kind.fix.format(*numbers)}; FA4FLEX_VALIDATE=1 checks each call before it is launched",
    )


def synchronize() -> None:
    """Wait for all work on all devices, then raise InputError if a kernel has found a fault."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        for device in range(torch.cuda.device_count()):
            torch.cuda.synchronize(device)
    check()
