"""The k largest scores of rows, by one launch, for which the host reads no contents."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from fa4flex.codegen.emit.source import Source
from fa4flex.compiler.compile import Kernel, compile_kernel
from fa4flex.kernels.plan.arguments import RULE
from fa4flex.kernels.plan.problem import Problem
from fa4flex.kernels.topk.config import MOST_SELECTED, MOST_UNITS, SHORT, LongConfig, ShortConfig
from fa4flex.primitives.units import SEEN, Rule
from fa4flex.runtime.cuda.device.kept_kernels import KeptKernels

TOGETHER = 4
"""Scores that threads read at once, where rows begin at multiples of 16 bytes."""

SIZES = (1 << 16, 6144, 4096), (1 << 18, 6144, 4096), (MOST_UNITS, 8192, 8192)
"""Units of long rows, at most, that kernels have memory for; units that are held, and of samples."""


MOST_TOKENS = 1 << 28
"""Tokens of rows and of units whose places no sum of three passes 32 bits with."""


def takes(scores: Tensor, k: int, rule: Rule | None = None) -> bool:
    """True if a kernel selects k of each row of scores [..., C]."""
    units = scores.shape[-1]
    fits = units <= SHORT or (units <= MOST_UNITS and k <= MOST_SELECTED)
    if rule is not None:
        fits = fits and max(rule.q_len + rule.queries, rule.kv_len + rule.keys) <= MOST_TOKENS
        fits = fits and max(rule.first, rule.own, rule.last) <= units
    return fits and scores.dtype == torch.float32 and scores.numel() > 0


def topk(scores: Tensor, k: int, rule: Rule | None) -> tuple[Tensor, Tensor] | None:
    """(ids int32 [..., k], ascending with -1 behind them, counts int32 [...]) of the k largest scores of rows
    [..., R, C] that the rule leaves, those that it forces among them, k at most; of equal ones lower units
    come first, and none is -inf or NaN.

    Returns None while a CUDA graph is captured, before the first call of its kind.
    """
    shape = scores.shape[:-1]
    rows = scores.detach().reshape(-1, scores.shape[-1])
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    config = _config(rows, rule is not None)
    if _kernels.must_wait(config, rows):
        return None
    ids = torch.empty((rows.shape[0], k), dtype=torch.int32, device=rows.device)
    counts = torch.empty(rows.shape[0], dtype=torch.int32, device=rows.device)
    numbers = (None,) * len(RULE) if rule is None else numbers_of(rule)
    _kernels.of(config, rows, partial(_compiled, config)).launch(rows, ids, counts, *numbers)
    return ids.view(*shape, k), counts.view(shape)


def numbers_of(rule: Rule) -> tuple[int, ...]:
    """The rule as kernels are told of it: see Numbers in kernels/topk/rows.py."""
    reach = {"all": rule.kv_len + rule.q_len, "causal": rule.queries, "whole": 1}[SEEN[rule.seen]]
    more = rule.keys - 1 if SEEN[rule.seen] == "causal" else 0
    sizes = rule.rows, rule.queries, rule.keys, rule.kv_len - rule.q_len, rule.kv_len
    return *sizes, reach, more, rule.first, rule.own, rule.last


_kernels = KeptKernels()


def _compiled(config: ShortConfig | LongConfig, arch: str) -> Kernel:
    return compile_kernel(_source(config), Problem(64, 64), arch=arch)


def _config(rows: Tensor, ruled: bool) -> ShortConfig | LongConfig:
    units = rows.shape[1]
    if units <= SHORT:
        return ShortConfig(each=max(1 << (-(-units // 32) - 1).bit_length(), 1), ruled=ruled)
    even = units % TOGETHER == 0 and rows.stride(0) % TOGETHER == 0 and rows.data_ptr() % 16 == 0
    size = next(size for size in SIZES if units <= size[0])
    return LongConfig(*size, together=TOGETHER if even else 1, ruled=ruled)


def _source(config: ShortConfig | LongConfig) -> Source:
    module, name = ("short", "ShortRows") if isinstance(config, ShortConfig) else ("long", "LongRows")
    text = (
        '"""Selects the largest scores of rows."""\n\n'
        f"from fa4flex.kernels.topk.config import {type(config).__name__}\n"
        f"from fa4flex.kernels.topk.{module} import {name}\n\n"
        f"kernel = {name}({config!r})\n"
    )
    return Source("topk", text)
