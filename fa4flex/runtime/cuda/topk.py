"""The k largest scores of rows, by one launch, for which the host reads no contents."""

from __future__ import annotations

import torch
from torch import Tensor

from fa4flex.codegen.emit.source import Source
from fa4flex.compiler.compile import Kernel, compile_kernel
from fa4flex.compiler.signature import Signature
from fa4flex.kernels.plan.problem import Problem
from fa4flex.kernels.topk.config import MOST_SELECTED, MOST_UNITS, SHORT, LongConfig, ShortConfig
from fa4flex.runtime.cuda.device.device import require_not_capturing, target_of
from ptxsim.active import simulating, target

TOGETHER = 4
"""Scores that threads read at once, where rows begin at multiples of 16 bytes."""

UNITS = 1 << 18, MOST_UNITS
"""Units of long rows, at most, that kernels have memory for."""


def takes(scores: Tensor, k: int) -> bool:
    """True if a kernel selects k of each row of scores [..., C]."""
    there = scores.is_cuda or simulating()
    units = scores.shape[-1]
    fits = units <= SHORT or (units <= MOST_UNITS and k <= MOST_SELECTED)
    return there and fits and scores.dtype == torch.float32 and scores.numel() > 0


def topk(scores: Tensor, k: int, forced: Tensor | None) -> tuple[Tensor, Tensor]:
    """(ids int32 [..., k], ascending with -1 behind them, counts int32 [...]) of the k largest scores of rows
    [..., C]; of equal ones lower units come first, and none is -inf or NaN.

    forced   int32 [R, 4], of rows that take turns: units [0, a), [b, c) and [d, C) are selected whatever
             their scores are, k at most
    """
    shape = scores.shape[:-1]
    rows = scores.detach().reshape(-1, scores.shape[-1])
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    ids = torch.empty((rows.shape[0], k), dtype=torch.int32, device=rows.device)
    counts = torch.empty(rows.shape[0], dtype=torch.int32, device=rows.device)
    _kernel(rows, forced).launch(rows, ids, counts, forced)
    return ids.view(*shape, k), counts.view(shape)


_kernels: dict[tuple[object, ...], Kernel] = {}
"""Kernels by their configuration and the GPU."""


def _kernel(rows: Tensor, forced: Tensor | None) -> Kernel:
    config = _config(rows, forced is not None)
    key = config, rows.get_device(), target()
    result = _kernels.get(key)
    if result is None:
        require_not_capturing()
        signature = Signature(given=("forced",) if forced is not None else ())
        result = compile_kernel(_source(config), Problem(64, 64), signature, target_of(rows.device).name)
        _kernels[key] = result
    return result


def _config(rows: Tensor, forced: bool) -> ShortConfig | LongConfig:
    units = rows.shape[1]
    if units <= SHORT:
        return ShortConfig(each=max(1 << (-(-units // 32) - 1).bit_length(), 1), forced=forced)
    even = units % TOGETHER == 0 and rows.stride(0) % TOGETHER == 0 and rows.data_ptr() % 16 == 0
    return LongConfig(next(n for n in UNITS if units <= n), TOGETHER if even else 1, forced)


def _source(config: ShortConfig | LongConfig) -> Source:
    module, name = ("short", "ShortRows") if isinstance(config, ShortConfig) else ("long", "LongRows")
    text = (
        '"""Selects the largest scores of rows."""\n\n'
        f"from fa4flex.kernels.topk.config import {type(config).__name__}\n"
        f"from fa4flex.kernels.topk.{module} import {name}\n\n"
        f"kernel = {name}({config!r})\n"
    )
    return Source("topk", text)
