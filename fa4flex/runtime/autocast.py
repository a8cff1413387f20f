"""Autocast, as torch's attention has it: q, k and v are cast, what is computed with them is not."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from fa4flex.torch_internals import any_autocast

QKV = tuple[Tensor, Tensor, Tensor]


def active(x: Tensor) -> bool:
    """True in an autocast region for the tensor's device."""
    if not any_autocast() or not isinstance(x, Tensor):
        return False
    return torch.is_autocast_enabled(x.device.type)


def off(x: Tensor) -> AbstractContextManager[Any]:
    """A region without autocast for the tensor's device: what computes chooses its own dtypes."""
    return torch.autocast(x.device.type, enabled=False) if active(x) else nullcontext()


def cast(q: Tensor, k: Tensor, v: Tensor) -> QKV:
    """q, k, v in autocast's dtype where it is active; float64 and other devices' tensors stay as they are."""
    if not active(q):
        return q, k, v
    device = q.device.type
    dtype = torch.get_autocast_dtype(device)
    return _cast(q, device, dtype), _cast(k, device, dtype), _cast(v, device, dtype)


def _cast(x: Tensor, device: str, dtype: torch.dtype) -> Tensor:
    if not isinstance(x, Tensor) or x.device.type != device:
        return x
    return x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x
