"""Tensors that kernels do not read as they are given, and what makes them readable at every launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fa4flex.runtime.cuda.call import Call

ALIGNMENT = 16
"""Bytes that addresses and strides of what the tensor memory accelerator reads are multiples of."""


def input_conversions(call: Call) -> dict[int, Callable[[Tensor], Tensor]]:
    """Conversions that tensors must go through at every launch, by position in _arguments(call)."""
    conversions: dict[int, Callable[[Tensor], Tensor]] = {}
    for i, x in enumerate(_arguments(call)):
        if x is None:
            continue
        if i < 3:
            if not tma_able(x):
                conversions[i] = _compact
        elif i == 3:
            if x.dtype != torch.float32 or x.stride(-1) != 1:
                conversions[i] = _float_vector
        elif i < 8:
            if x.dtype != torch.int32 or x.stride(-1) != 1:
                conversions[i] = _int_vector
        elif x.dtype == torch.bool or x.ndim == 0:
            conversions[i] = _readable
    return conversions


def _arguments(call: Call) -> tuple[Tensor | None, ...]:
    return (call.q, call.k, call.v, call.sinks, *call.lengths, *call.operands)


def converted(call: Call, conversions: dict[int, Callable[[Tensor], Tensor]]) -> tuple[Any, ...]:
    """(q, k, v, sinks, lengths, operands) as kernels read them."""
    given: list[Any] = list(_arguments(call))
    for i, convert in conversions.items():
        given[i] = convert(given[i])
    return (*given[:4], given[4:8], tuple(given[8:]))


def tma_able(x: Tensor) -> bool:
    """Whether the tensor memory accelerator can read x: 16-byte steps, except along the last dimension."""
    per_step = ALIGNMENT // x.element_size()
    steps = all(s % per_step == 0 for s in x.stride()[:-1])
    return x.stride(-1) == 1 and steps and x.data_ptr() % ALIGNMENT == 0


def _compact(x: Tensor) -> Tensor:
    return x.detach().clone(memory_format=torch.contiguous_format)


def _float_vector(x: Tensor) -> Tensor:
    return x.detach().float().contiguous()


def _int_vector(x: Tensor) -> Tensor:
    return x.to(torch.int32).contiguous()


def _readable(x: Tensor) -> Tensor:
    x = x.detach()
    x = x.view(torch.uint8) if x.dtype == torch.bool else x
    return x.reshape(1) if x.ndim == 0 else x
