"""Properties of tensors that launches depend on."""

from __future__ import annotations

from typing import Any

from torch import Tensor

ALIGNMENT = 16
"""Bytes that addresses and strides of what the tensor memory accelerator reads are multiples of."""


def heads_look(x: Tensor) -> tuple[Any, ...]:
    """Properties that a kernel is told of a tensor of heads, of any extents: dtype, device, and whether the
    tensor memory accelerator can read it (`tma_able` in conversions.py)."""
    *steps, unit = x.stride()
    size, places = x.element_size(), x.data_ptr()
    for step in steps:
        places |= step * size
    return x.dtype, x.get_device(), unit == 1 and places % ALIGNMENT == 0


def array_look(x: Tensor) -> tuple[Any, ...]:
    """Properties that a kernel is told of lengths and statistics, of any extents: dtype, device, whether the
    last stride is 1."""
    return x.dtype, x.get_device(), x.stride()[-1:] == (1,)


def memory_key(x: Tensor | None) -> Any:
    """Key of the memory that a tensor stands for, and of how it stands there."""
    return None if x is None else (x.data_ptr(), x.shape, x.stride(), x.dtype)


def layout_key(x: Tensor | None) -> Any:
    """Key of a tensor's layout: two tensors with the same one can take each other's place."""
    return None if x is None else (x.shape, x.stride(), x.dtype, x.get_device(), x.data_ptr() % ALIGNMENT)
