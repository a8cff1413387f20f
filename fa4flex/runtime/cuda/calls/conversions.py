"""Tensors that kernels do not read as they are given, and what makes them readable at every launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fa4flex.kernels.plan.looks import Array, Captured, Columns, Heads, Look
from fa4flex.primitives.kv_scales import E4M3
from fa4flex.runtime.cuda.calls.looks import ALIGNMENT

Conversion = Callable[[Any], Any]
"""A function of a tensor, or of a tuple of captured tensors."""


def conversion(look: Look, value: Any) -> Conversion | None:
    """Conversion that makes an argument look as its row says, this one and those that look like it; None
    where it is as it should be, or is not given."""
    match look:
        case Heads() | Columns() if value is not None and (value.dtype == E4M3 or not tma_able(value)):
            if value.dtype != E4M3:
                return compact
            return _bytes if tma_able(value) else lambda x: _bytes(compact(x))
        case Array(dtype, _, unit) if value is not None:
            kind = getattr(torch, dtype)
            if value.dtype != kind or (unit and value.stride(-1) != 1):
                return _array_of(kind)
        case Captured("tensors") if any(map(_needs_view, value)):
            places = tuple(i for i, x in enumerate(value) if _needs_view(x))
            return lambda tensors: _readable(tensors, places)
    return None


def tma_able(x: Tensor) -> bool:
    """True if the tensor memory accelerator can read x: 16-byte steps, except along the last dimension."""
    per_step = ALIGNMENT // x.element_size()
    steps = all(s % per_step == 0 for s in x.stride()[:-1])
    return x.stride(-1) == 1 and steps and x.data_ptr() % ALIGNMENT == 0


def _bytes(x: Tensor) -> Tensor:
    """An e4m3 cache as kernels are handed it."""
    return x.detach().view(torch.uint8)


def compact(x: Tensor) -> Tensor:
    """A contiguous copy, without gradient."""
    return x.detach().clone(memory_format=torch.contiguous_format)


@cache
def _array_of(dtype: torch.dtype) -> Conversion:
    return lambda x: x.detach().to(dtype).contiguous()


def _needs_view(x: Tensor) -> bool:
    return x.dtype == torch.bool or x.ndim == 0


def _readable(tensors: Sequence[Tensor], places: tuple[int, ...]) -> tuple[Tensor, ...]:
    results = list(tensors)
    for i in places:
        x = results[i].detach()
        x = x.view(torch.uint8) if x.dtype == torch.bool else x
        results[i] = x.reshape(1) if x.ndim == 0 else x
    return tuple(results)
