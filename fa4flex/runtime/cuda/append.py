"""Appending to pages on a GPU: one launch, for which the host reads no contents."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fa4flex.codegen.emit.source import Source
from fa4flex.compiler.compile import Kernel, compile_kernel
from fa4flex.compiler.signature import Signature
from fa4flex.contents import validating
from fa4flex.kernels.plan.problem import Problem
from fa4flex.primitives.rotary import Rotary
from fa4flex.runtime.call import name_of
from fa4flex.runtime.cuda.calls.conversions import tma_able
from fa4flex.runtime.cuda.device import faults
from fa4flex.runtime.cuda.device.device import require_not_capturing, target_of
from ptxsim.active import target

TOGETHER = 8
"""Elements of 16 bits that a thread moves at once."""

WIDTH = 64
"""Any width of heads: the kernel serves all."""


class New(NamedTuple):
    """Tokens to append: k, v and q [B, H, S, D], or packed [T, H, D] with cu_seqlens; `seqused` says how many
    tokens of each sequence take part."""

    k: Tensor
    v: Tensor
    q: Tensor | None
    rotary: Rotary | None
    cu_seqlens: Tensor | None
    seqused: Tensor | None


class Pool(NamedTuple):
    """Destination of the tokens: pools [pages, page_size, H, D], pages and lengths of the sequences."""

    k: Tensor
    v: Tensor
    page_table: Tensor
    seqused_k: Tensor


def append(new: New, pool: Pool, check: Callable[[], None]) -> tuple[Tensor, Tensor | None]:
    """(lengths afterwards, rotated queries). Raises InputError for what an earlier call was wrong in; what is
    wrong in this one, the next call tells, or with FA4FLEX_VALIDATE=1 `check`."""
    faults.check()
    if validating():
        check()
    lengths = torch.empty_like(pool.seqused_k)
    rotated = None if new.q is None else new.q.new_empty(new.q.shape)
    if not new.k.numel():
        return lengths.copy_(pool.seqused_k), rotated
    cos, sin = (None, None) if new.rotary is None else (new.rotary.cos, new.rotary.sin)
    tables = [None if x is None else _unit(x) for x in (cos, sin)]
    rows = [_rows(x, new.cu_seqlens is not None) for x in (new.k, new.v)]
    queries = [None if x is None else _rows(x, new.cu_seqlens is not None) for x in (new.q, rotated)]
    _kernel(new, pool).launch(
        *rows, *pool, new.cu_seqlens, new.seqused, *tables, *queries, lengths, faults.table()
    )
    return lengths, rotated


def _rows(x: Tensor, packed: bool) -> Tensor:
    """[B, S, H, D], or packed [T, H, D]."""
    x = x.detach()
    return x if packed else x.transpose(1, 2)


def _unit(x: Tensor) -> Tensor:
    """A table whose rows lie together."""
    return x if x.stride(-1) == 1 else x.contiguous()


_kernels: dict[tuple[object, ...], Kernel] = {}
"""Kernels by all that they are compiled from. What calls look like decides which; no extent does."""


def _kernel(new: New, pool: Pool) -> Kernel:
    """The kernel for calls that look like this one."""
    rotary = new.rotary
    angles = "float32" if rotary is None else name_of(rotary.cos.dtype)
    interleaved = rotary is not None and rotary.interleaved
    dtype, packed, together = name_of(new.k.dtype), new.cu_seqlens is not None, _together(new, pool)
    optional = ("seqused_q", new.seqused), ("cos", rotary), ("sin", rotary), ("q", new.q), ("rotated", new.q)
    arguments = tuple(name for name, x in optional if x is not None)
    lengths = (
        ("page_table", pool.page_table),
        ("paged_keys", pool.seqused_k),
        ("cu_seqlens_q", new.cu_seqlens),
        ("seqused_q", new.seqused),
    )
    wide = tuple(name for name, x in lengths if x is not None and x.dtype == torch.int64)
    look = dtype, angles, packed, together, interleaved, arguments, wide, new.k.get_device(), target()
    result = _kernels.get(look)
    if result is None:
        require_not_capturing()
        config = (
            f"Config(dtype={dtype!r}, angles={angles!r}, packed={packed}, together={together},"
            f" interleaved={interleaved})"
        )
        problem = Problem(WIDTH, WIDTH, lengths="packed" if packed else "dense")
        arch = target_of(new.k.device).name
        result = compile_kernel(_source(config), problem, Signature(given=arguments, wide=wide), arch)
        _kernels[look] = result
    return result


def _source(config: str) -> Source:
    text = (
        '"""Appends keys and values to pages."""\n\n'
        "from fa4flex.kernels.append.config import Config\n"
        "from fa4flex.kernels.append.kernel import Append\n\n"
        f"kernel = Append({config})\n"
    )
    return Source("append", text)


def _together(new: New, pool: Pool) -> int:
    """Elements that threads move at once: those of 16 bytes where all tensors lie so, else single ones."""
    tensors = [x for x in (new.k, new.v, new.q, pool.k, pool.v) if x is not None]
    even = all(x.shape[-1] % TOGETHER == 0 and tma_able(x) for x in tensors)
    turning = 0
    if new.rotary is not None:
        half = new.rotary.cos.shape[1]
        turning = 2 * half if new.rotary.interleaved else half
    return TOGETHER if even and turning % TOGETHER == 0 else 1
