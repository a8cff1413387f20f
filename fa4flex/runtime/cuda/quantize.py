"""Rounding q, k and v to codes on a GPU: a few launches, for which the host reads no contents.

What no kernel takes, PyTorch operations round (fa4flex/quantization/quantize.py): ragged batches, float32,
widths above 256, block scales, and other GPUs. Both mean the same.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from fa4flex.codegen.emit.source import Source
from fa4flex.compiler.compile import Kernel, compile_kernel
from fa4flex.kernels.plan.problem import Problem
from fa4flex.kernels.quantize.config import LANE, LARGEST, TILE, WIDEST, Config
from fa4flex.primitives.kv_scales import E4M3
from fa4flex.runtime.call import name_of
from fa4flex.runtime.cuda.calls.conversions import compact, tma_able
from fa4flex.runtime.cuda.device.kept_kernels import KeptKernels
from fa4flex.torch_internals import dispatch_modes

CHUNK, CHUNKS = 256, 128
"""Least number of tokens that a block sums, and most chunks of a sequence that another one sums up."""

MOST = 65535
"""Largest extents of a grid, but for the first."""

QKV = tuple[Tensor, Tensor, Tensor]


class Form(NamedTuple):
    """Form of codes. qk: "int8" or "float8_e4m3"; values: v is rounded, to e4m3; signs [D]: those
    of the rotation, None without one."""

    qk: str
    values: bool
    center_k: bool
    center_v: bool
    signs: Tensor | None


def takes(qkv: QKV, qk: str, values: bool, layout: str) -> bool:
    """True if kernels round such dense tensors."""
    q, k, v = qkv
    if qk not in LARGEST or dispatch_modes():  # others see operations, and no launches
        return False
    plain = all(type(x) in (Tensor, Parameter) and x.numel() for x in qkv)
    alike = q.dtype == k.dtype == v.dtype and q.dtype in (torch.bfloat16, torch.float16)
    fits = q.shape[-1] <= WIDEST and (not values or (v.shape[-1] <= WIDEST and v.shape[-1] % LANE == 0))
    heads = sum(x.shape[1 if layout == "bhsd" else 2] for x in qkv)
    return plain and alike and fits and max(heads, q.shape[0]) <= MOST


def quantize(qkv: QKV, form: Form, layout: str) -> dict[str, Tensor | None] | None:
    """Codes and scales of tensors that `takes` takes, by their names in Quantized; None while a CUDA graph is
    captured, before the first call of its kind."""
    q, k, v = qkv
    config = _config(qkv, form)
    if _kernels.must_wait(config, q):
        return None
    kernel = _kernels.of(config, q, partial(_compiled, config))
    heads = (lambda x: x.transpose(1, 2)) if layout == "bhsd" else (lambda x: x)
    rows = [heads(x.detach() if tma_able(x) else compact(x)) for x in qkv]
    (batch, q_len, q_heads, _), (_, kv_len, k_heads, d), (_, _, v_heads, dv) = (x.shape for x in rows)
    tiles, chunk = -(-kv_len // TILE), _chunk(kv_len)
    chunks = -(-kv_len // chunk)

    def floats(*shape: int, when: bool = True) -> Tensor | None:
        return torch.empty(shape, dtype=torch.float32, device=q.device) if when else None

    kind = torch.int8 if form.qk == "int8" else E4M3
    q_codes, k_codes = (torch.empty(x.shape, dtype=kind, device=x.device) for x in (q, k))
    values, offset = form.values, form.values and form.center_v
    v_codes = None
    if values:
        v_codes = torch.empty(batch, v_heads, dv, tiles * TILE, dtype=E4M3, device=v.device)
    q_scale, k_scale = floats(batch, q_heads, q_len), floats(batch, k_heads, tiles)
    q_bias = floats(batch, q_heads, q_len, when=form.center_k)
    v_scale = floats(batch, v_heads, dv, when=values)
    v_offset = floats(batch, v_heads, dv, when=offset)
    kernel.launch(
        *rows[:2], rows[2] if values else None, form.signs,
        *(heads(x.view(torch.uint8)) for x in (q_codes, k_codes)),
        None if v_codes is None else v_codes.view(torch.uint8),
        q_scale, k_scale, q_bias,
        floats(batch, k_heads, d, when=form.center_k), floats(batch, v_heads, dv, when=offset),
        v_scale, v_offset,
        floats(batch, k_heads, chunks, 1, d, when=form.center_k),
        floats(batch, v_heads, chunks, 3, dv, when=values),
        floats(batch, v_heads, tiles, 1, dv, when=offset),
        chunk, kv_len,
    )  # fmt: skip
    return {
        "q": q_codes, "k": k_codes, "v": v if v_codes is None else v_codes, "q_scale": q_scale,
        "k_scale": k_scale, "v_scale": v_scale, "q_bias": q_bias, "v_offset": v_offset,
    }  # fmt: skip


def _chunk(tokens: int) -> int:
    """Tokens of a chunk: whole tiles."""
    return max(CHUNK, -(-tokens // (CHUNKS * TILE)) * TILE)


def _config(qkv: QKV, form: Form) -> Config:
    q, _, v = qkv
    return Config(
        dtype=name_of(q.dtype),
        width=q.shape[-1],
        width_v=v.shape[-1] if form.values else 0,
        qk=form.qk,
        rotate=form.signs is not None,
        center_k=form.center_k,
        center_v=form.center_v,
    )


_kernels = KeptKernels()


def _compiled(config: Config, arch: str) -> Kernel:
    problem = Problem(config.width, config.width_v or config.width)
    return compile_kernel(_source(repr(config)), problem, arch=arch)


def _source(config: str) -> Source:
    text = (
        '"""Rounds queries, keys and values to codes."""\n\n'
        "from fa4flex.kernels.quantize.config import Config\n"
        "from fa4flex.kernels.quantize.kernel import Quantize\n\n"
        f"kernel = Quantize({config})\n"
    )
    return Source("quantize", text)
