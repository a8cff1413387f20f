"""Rows for blocks of tokens, and scaled products of queries and keys, by one launch each, for which the host
reads no contents. None while a CUDA graph is captured, before the first call of its kind."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from fa4flex.codegen.emit.source import Source
from fa4flex.compiler.compile import Kernel, compile_kernel
from fa4flex.kernels.plan.problem import Problem
from fa4flex.kernels.pool import config as pooling
from fa4flex.kernels.scores import config as scoring
from fa4flex.runtime.call import name_of
from fa4flex.runtime.cuda.calls.conversions import tma_able
from fa4flex.runtime.cuda.device.kept_kernels import KeptKernels

NARROW = torch.bfloat16, torch.float16
MOST = (1 << 31) - 1

CHUNKS, BLOCKS = (64, 256), 528
"""Keys of a block of threads: many where there are so many blocks anyway, four for each multiprocessor of an
H200."""


def pools(x: Tensor, block: int) -> bool:
    """True if a kernel pools such tokens."""
    width = x.shape[3]
    fits = width % pooling.PIECE == 0 and width <= pooling.WIDEST and block <= pooling.LONGEST
    return fits and x.dtype in NARROW and x.numel() > 0 and tma_able(x) and x.shape[2] + block <= MOST


def pool(x: Tensor, block: int, how: pooling.How) -> Tensor | None:
    """Rows [B, H, R, D] of tokens [B, H, S, D] that `pools` takes, as `fa4flex::pool` says."""
    config = pooling.Config(name_of(x.dtype), x.shape[3], how, pooling.share_of(x.shape[3], block))
    if _kernels.must_wait(config, x):
        return None
    out = torch.empty((*x.shape[:2], -(-x.shape[2] // block), x.shape[3]), dtype=x.dtype, device=x.device)
    _kernels.of(config, x, partial(_compiled, config)).launch(x.detach(), out, block)
    return out


def multiplies(q: Tensor, k: Tensor) -> bool:
    """True if a kernel multiplies such queries and keys."""
    width, kinds = q.shape[3], {q.dtype, k.dtype}
    fits = width % scoring.PIECE == 0 and width <= scoring.WIDEST and len(kinds) == 1 and q.dtype in NARROW
    return fits and q.numel() > 0 and k.numel() > 0 and tma_able(q) and tma_able(k)


def scores(q: Tensor, k: Tensor, scale: float) -> Tensor | None:
    """scale * q.k, float32 [B, Hq, R, C], of tensors that `multiplies` takes."""
    (batch, heads, rows, width), count = q.shape, k.shape[2]
    config = scoring.Config(name_of(q.dtype), width, even=count % 4 == 0)
    if _kernels.must_wait(config, q):
        return None
    out = torch.empty((batch, heads, rows, count), dtype=torch.float32, device=q.device)
    few, many = CHUNKS
    blocks = -(-rows // config.rows) * batch * heads * -(-count // many)
    chunk = many if blocks >= BLOCKS else few
    to = (out, None) if config.even else (None, out)
    kernel = _kernels.of(config, q, partial(_compiled, config))
    kernel.launch(q.detach(), k.detach(), *to, chunk, scale)
    return out


_kernels = KeptKernels()


def _compiled(config: pooling.Config | scoring.Config, arch: str) -> Kernel:
    return compile_kernel(_source(config), Problem(64, 64), arch=arch)


def _source(config: pooling.Config | scoring.Config) -> Source:
    pools = isinstance(config, pooling.Config)
    folder, name = ("pool", "Pool") if pools else ("scores", "Products")
    what = "Pools blocks of tokens." if pools else "Multiplies queries and keys."
    text = (
        f'"""{what}"""\n\n'
        f"from fa4flex.kernels.{folder}.config import Config\n"
        f"from fa4flex.kernels.{folder}.kernel import {name}\n\n"
        f"kernel = {name}({config!r})\n"
    )
    return Source(folder, text)
