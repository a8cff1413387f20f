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
from fa4flex.kernels.append.config import Config
from fa4flex.kernels.plan.problem import Problem
from fa4flex.primitives.kv_scales import E4M3, NO_SCALES, KVScales
from fa4flex.primitives.qk_norm import QKNorm
from fa4flex.primitives.rotary import Rotary
from fa4flex.runtime.call import name_of
from fa4flex.runtime.cuda.calls.conversions import tma_able
from fa4flex.runtime.cuda.device import faults
from fa4flex.runtime.cuda.device.kept_kernels import KeptKernels

TOGETHER = 8
"""Elements of 16 bits that a thread moves at once."""

WIDTH = 64
"""Any width of heads: the kernel serves all."""


class New(NamedTuple):
    """Tokens to append: k, v and q [B, H, S, D], or packed [T, H, D] with cu_seqlens; `seqused` says how many
    tokens of each sequence take part. positions [axes, B, S], or [axes, T]: by which they are rotated, else
    by their places among the keys."""

    k: Tensor
    v: Tensor
    q: Tensor | None = None
    rotary: Rotary | None = None
    cu_seqlens: Tensor | None = None
    seqused: Tensor | None = None
    norm: QKNorm | None = None
    positions: Tensor | None = None


class Pool(NamedTuple):
    """Destination of the tokens: pools [pages, page_size, H, D], pages and lengths of the sequences, and
    scales of pools of e4m3: those of single tokens are written, too."""

    k: Tensor
    v: Tensor
    page_table: Tensor
    seqused_k: Tensor
    scales: KVScales = NO_SCALES

    @property
    def eight_bit(self) -> bool:
        return self.k.dtype == E4M3

    @property
    def own_scales(self) -> bool:
        """True if each token has scales of its own."""
        return any(x is not None and x.ndim == 3 for x in (self.scales.k, self.scales.v))


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
    _kernel(new, pool).launch(*_arguments(new, pool, rotated, lengths))
    return lengths, rotated


def _arguments(new: New, pool: Pool, rotated: Tensor | None, lengths: Tensor) -> tuple[object, ...]:
    """Arguments of a launch, in the order of their rows (kernels/plan/arguments.py)."""
    packed, rotary, norm = new.cu_seqlens is not None, new.rotary, new.norm
    of_rotary = (None,) * 3 if rotary is None else (_unit(rotary.cos), _unit(rotary.sin), rotary.axes)
    of_norm = (None,) * 3 if norm is None else (_weights(norm.q), _weights(norm.k), norm.eps)
    pools = [x.view(torch.uint8) if pool.eight_bit else x for x in (pool.k, pool.v)]
    rows = [None if x is None else _rows(x, packed) for x in (new.k, new.v, new.q, rotated)]
    scales = [_scales(x, pool) for x in (pool.scales.k, pool.scales.v)] if pool.eight_bit else [None, None]
    return (
        *rows[:2], *pools, pool.page_table, pool.seqused_k, new.cu_seqlens, new.seqused, *of_rotary,
        new.positions, *of_norm, *scales, *rows[2:], lengths, faults.table(),
    )  # fmt: skip


def _weights(x: Tensor | None) -> Tensor | None:
    return None if x is None else _unit(x.detach())


def _scales(scale: Tensor | None, pool: Pool) -> Tensor:
    """Scales [pages, page_size, H], of which equal ones are one number."""
    shape = pool.k.shape[:3]
    if scale is None:
        return torch.ones((), device=pool.k.device).expand(shape)
    scale = scale.detach()
    return scale if scale.ndim == 3 else (scale if scale.ndim == 1 else scale[:, None]).expand(shape)


def _rows(x: Tensor, packed: bool) -> Tensor:
    """[B, S, H, D], or packed [T, H, D]."""
    x = x.detach()
    return x if packed else x.transpose(1, 2)


def _unit(x: Tensor) -> Tensor:
    """A table whose rows lie together."""
    return x if x.stride(-1) == 1 else x.contiguous()


_kernels = KeptKernels()


def _kernel(new: New, pool: Pool) -> Kernel:
    """The kernel for calls that look like this one."""
    config = _config(new, pool)
    norm, rotary, scaled = new.norm, new.rotary, pool.eight_bit or None
    optional = (
        ("seqused_q", new.seqused),
        ("cos", rotary),
        ("sin", rotary),
        ("axes", rotary and rotary.axes),
        ("positions", new.positions),
        ("q_weight", norm and norm.q),
        ("k_weight", norm and norm.k),
        ("eps", norm),
        ("k_scales", scaled),
        ("v_scales", scaled),
        ("q", new.q),
        ("rotated", new.q),
    )
    arguments = tuple(name for name, x in optional if x is not None)
    integers = (
        ("page_table", pool.page_table),
        ("paged_keys", pool.seqused_k),
        ("cu_seqlens_q", new.cu_seqlens),
        ("seqused_q", new.seqused),
        ("positions", new.positions),
    )
    wide = tuple(name for name, x in integers if x is not None and x.dtype == torch.int64)

    def compiled(arch: str) -> Kernel:
        problem = Problem(WIDTH, WIDTH, lengths="packed" if config.packed else "dense")
        return compile_kernel(_source(repr(config)), problem, Signature(given=arguments, wide=wide), arch)

    return _kernels.of((config, arguments, wide), new.k, compiled)


def _config(new: New, pool: Pool) -> Config:
    rotary, norm, dtype = new.rotary, new.norm, name_of(new.k.dtype)
    weight = None if norm is None else norm.q if norm.q is not None else norm.k
    return Config(
        dtype=dtype,
        pool="uint8" if pool.eight_bit else dtype,
        angles="float32" if rotary is None else name_of(rotary.cos.dtype),
        weights="float32" if weight is None else name_of(weight.dtype),
        packed=new.cu_seqlens is not None,
        together=_together(new, pool),
        interleaved=rotary is not None and rotary.interleaved,
        unit_offset=norm is not None and norm.unit_offset,
        own_scales=pool.eight_bit and pool.own_scales,
    )


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
