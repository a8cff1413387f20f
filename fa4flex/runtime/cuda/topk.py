"""The k largest scores of rows, by one launch, for which the host reads no contents."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from fa4flex.codegen.emit.source import Source
from fa4flex.compiler.compile import Kernel, compile_kernel
from fa4flex.compiler.signature import Signature
from fa4flex.kernels.plan.problem import Problem
from fa4flex.kernels.topk.config import MOST_SELECTED, MOST_UNITS, SHORT, LongConfig, ShortConfig
from fa4flex.runtime.cuda.device.kept_kernels import KeptKernels

TOGETHER = 4
"""Scores that threads read at once, where rows begin at multiples of 16 bytes."""

SIZES = (1 << 16, 6144, 4096), (1 << 18, 6144, 4096), (MOST_UNITS, 8192, 8192)
"""Units of long rows, at most, that kernels have memory for; units that are held, and of samples."""


def takes(scores: Tensor, k: int) -> bool:
    """True if a kernel selects k of each row of scores [..., C]."""
    units = scores.shape[-1]
    fits = units <= SHORT or (units <= MOST_UNITS and k <= MOST_SELECTED)
    return fits and scores.dtype == torch.float32 and scores.numel() > 0


def topk(scores: Tensor, k: int, forced: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """(ids int32 [..., k], ascending with -1 behind them, counts int32 [...]) of the k largest scores of rows
    [..., C]; of equal ones lower units come first, and none is -inf or NaN.

    forced   int32 [R, 4], of rows that take turns: units [0, a), [b, c) and [d, C) are selected whatever
             their scores are, k at most

    Returns None while a CUDA graph is captured, before the first call of its kind.
    """
    shape = scores.shape[:-1]
    rows = scores.detach().reshape(-1, scores.shape[-1])
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    config = _config(rows, forced is not None)
    if _kernels.must_wait(config, rows):
        return None
    ids = torch.empty((rows.shape[0], k), dtype=torch.int32, device=rows.device)
    counts = torch.empty(rows.shape[0], dtype=torch.int32, device=rows.device)
    _kernels.of(config, rows, partial(_compiled, config)).launch(rows, ids, counts, forced)
    return ids.view(*shape, k), counts.view(shape)


_kernels = KeptKernels()


def _compiled(config: ShortConfig | LongConfig, arch: str) -> Kernel:
    signature = Signature(given=("forced",) * config.forced)
    return compile_kernel(_source(config), Problem(64, 64), signature, arch)


def _config(rows: Tensor, forced: bool) -> ShortConfig | LongConfig:
    units = rows.shape[1]
    if units <= SHORT:
        return ShortConfig(each=max(1 << (-(-units // 32) - 1).bit_length(), 1), forced=forced)
    even = units % TOGETHER == 0 and rows.stride(0) % TOGETHER == 0 and rows.data_ptr() % 16 == 0
    size = next(size for size in SIZES if units <= size[0])
    return LongConfig(*size, together=TOGETHER if even else 1, forced=forced)


def _source(config: ShortConfig | LongConfig) -> Source:
    module, name = ("short", "ShortRows") if isinstance(config, ShortConfig) else ("long", "LongRows")
    text = (
        '"""Selects the largest scores of rows."""\n\n'
        f"from fa4flex.kernels.topk.config import {type(config).__name__}\n"
        f"from fa4flex.kernels.topk.{module} import {name}\n\n"
        f"kernel = {name}({config!r})\n"
    )
    return Source("topk", text)
