"""Calls whose keys and values are an e4m3 cache: read as it is where a kernel does that, else dequantised
first.

A CPU dequantises to the dtype that it computes in, which is exact. A GPU dequantises to the dtype of the
queries, which rounds as a cache of that dtype does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fa4flex.primitives.kv_scales import (
    NO_SCALES,
    Arrangement,
    KVScales,
    check_caches,
    dequantised,
    is_eight_bit,
    per,
)
from fa4flex.primitives.paging import Paging
from fa4flex.primitives.varlen import Varlen
from fa4flex.runtime import launch
from fa4flex.runtime.checks import check_descriptions, check_strided
from fa4flex.runtime.cuda.calls.call import Call, Scales
from fa4flex.variant import Variant

QKV = tuple[Tensor, Tensor, Tensor]

__all__ = ["attend", "concerns", "read_as"]


def concerns(k: object, v: object, scales: object) -> bool:
    """True if a call with these has an 8-bit cache."""
    return scales is not None or is_eight_bit(k, v)


def read_as(
    variant: Variant,
    qkv: QKV,
    varlen: Varlen | None,
    paging: Paging | None,
    scales: KVScales | None,
) -> tuple[QKV, torch.dtype]:
    """Inputs of a call with keys and values dequantised, and the dtype of its output."""
    q, k, v = qkv
    arrangement = _checked(variant, qkv, varlen, paging, scales)
    given = scales or NO_SCALES
    on_cpu = q.device.type == "cpu" and not launch.on_gpu(q)
    dtype = variant.precision.compute_dtype(q.dtype) if on_cpu else q.dtype
    k = dequantised(k, given.k, arrangement, dtype)
    v = dequantised(v, given.v, arrangement, dtype)
    return (q.to(dtype), k, v), variant.precision.output_dtype(q.dtype)


def attend(
    now: launch.Calling,
    qkv: QKV,
    varlen: Varlen | None,
    paging: Paging | None,
    scales: KVScales | None,
    statistics: launch.Statistics,
) -> launch.Results:
    """The results of a call. Raises InputError and UnsupportedError for caches and scales that do not fit."""
    found = _in_place(now, qkv, varlen, paging, scales, statistics)
    if found is not None:
        return found
    wide, dtype = read_as(now.variant, qkv, varlen, paging, scales)
    out, lse, largest = launch.run(now, *wide, varlen, paging, statistics)
    return out.to(dtype), lse, largest


def _checked(
    variant: Variant, qkv: QKV, varlen: Varlen | None, paging: Paging | None, scales: KVScales | None
) -> Arrangement:
    """Arrangement of the caches' dimensions."""
    q, k, v = qkv
    check_strided(q, k, v)
    check_descriptions(varlen, paging)
    check_caches(q, k, v, scales)
    arrangement = _arrangement(variant, varlen, paging)
    if scales is not None and k.ndim == v.ndim == (3 if arrangement == "packed" else 4):
        scales.check(k, v, arrangement)  # other ranks are refused with the rest of the call
    return arrangement


def _arrangement(variant: Variant, varlen: Varlen | None, paging: Paging | None) -> Arrangement:
    if paging is not None:
        return "paged"
    return "packed" if varlen is not None and varlen.packed else variant.layout


# --- on a GPU, as it is -----------------------------------------------------------------------------------


def _in_place(
    now: launch.Calling,
    qkv: QKV,
    varlen: Varlen | None,
    paging: Paging | None,
    scales: KVScales | None,
    statistics: launch.Statistics,
) -> launch.Results | None:
    """The results of a call whose cache a kernel reads as it is; None where none does."""
    q = qkv[0]
    if not isinstance(q, Tensor) or not launch.on_gpu(q) or launch.observed(*qkv):
        return None
    given = NO_SCALES if scales is None else scales
    arrangement = _checked(now.variant, qkv, varlen, paging, scales)
    if arrangement == "packed" or any(x.ndim != 4 for x in qkv) or not all(x.numel() for x in qkv):
        return None
    if given.differentiable and torch.is_grad_enabled():
        return None
    if paging is not None:
        return launch.in_pages(now, qkv, varlen, paging, statistics, _scales_of(given, "paged", q.shape[0]))
    call, trains = launch.direct_call(now, qkv, varlen, statistics)
    if call is None or trains or now.variant.blocks is not None:
        return None
    call = call._replace(scales=_scales_of(given, arrangement, q.shape[0]))
    return launch.launched_in_place(now, call, qkv, lambda: _check(now, call, qkv, varlen))


def _check(now: launch.Calling, call: Call, qkv: QKV, varlen: Varlen | None) -> None:
    """Raise InputError or UnsupportedError unless the tensors fit, as if keys and values were like q."""
    q, k, v = qkv
    k, v = (q.new_empty((1,)).expand(x.shape) for x in (k, v))
    whole = (q, k, v) if call.heads_first else (q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    launch.check_direct(now, call, whole, varlen)


def _scales_of(given: KVScales, arrangement: Arrangement, batch: int) -> Scales:
    """The scales as kernels index them, without a copy: [sequences or pages, heads], or [sequences or pages,
    heads, tokens]."""

    def turned(scale: Tensor | None) -> Tensor | None:
        if scale is None:
            return None
        if scale.ndim == 1:
            return scale.expand(batch, -1)
        return scale.transpose(1, 2) if scale.ndim == 3 and arrangement != "bhsd" else scale

    return Scales(turned(given.k), turned(given.v), per(given.k, arrangement), per(given.v, arrangement))
