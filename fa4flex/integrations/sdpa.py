"""torch's scaled_dot_product_attention on fa4flex's kernels where these mean the same, else torch's own.

    with fa4flex.patch_sdpa():
        loss = model(batch)

A call is either served whole, with its gradients, or handed on to torch's function as it came: nothing is
ignored, and no result differs by more than rounding.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fa4flex.api import Attention, attention, compile
from fa4flex.errors import UnsupportedError
from fa4flex.runtime import launch
from fa4flex.runtime.checks import DTYPES
from fa4flex.torch_internals import function_modes, no_default_device

__all__ = ["Patch", "patch_sdpa"]

SERVED = "fa4flex"
"""Key of `Patch.calls` for calls that were served."""

_torch_sdpa = F.scaled_dot_product_attention
_active: tuple[Patch, ...] = ()
_wrapped = False
"""True once others put a function of theirs around ours, which they still call."""

_changing = threading.Lock()


def patch_sdpa(*, cpu: bool = False) -> Patch:
    """Have torch.nn.functional.scaled_dot_product_attention run fa4flex's kernels on GPUs that have some.

    Takes effect at once, for all threads, until the returned Patch is left as a context or removed:

        patch = fa4flex.patch_sdpa()
        ...
        patch.remove()

    cpu  serve float calls on a CPU as well; without it torch's own function does

    Served are q [B, Hq, L, E], k [B, Hkv, S, E], v [B, Hkv, S, Ev] of one dtype, with `is_causal` (aligned
    top-left, as torch has it), boolean masks, float masks with their gradients, `dropout_p` (other pairs than
    torch's, drawn from the same generator), `scale` and `enable_gqa`. All
    else goes to torch's function: other shapes and devices, what torch.compile and torch.export trace,
    transforms, subclasses of tensors, and calls where `sdpa_kernel` rules out flash attention.
    `Patch.calls` counts both, with reasons.

    Code that imported the function by its name before, and torch's C++ modules, keep torch's.
    """
    patch = Patch(cpu)
    global _torch_sdpa, _active
    with _changing:
        there = F.scaled_dot_product_attention
        reached = _active or there is scaled_dot_product_attention or (_wrapped and there is not _torch_sdpa)
        if not reached:
            _torch_sdpa = there
            F.scaled_dot_product_attention = scaled_dot_product_attention  # type: ignore[assignment]
        _active = (*_active, patch)
    return patch


class Patch:
    """A patch of scaled_dot_product_attention; the last one made decides.

    cpu    whether calls on a CPU are served
    calls  numbers of calls: those that were "fa4flex"'s, and by reason those that went to torch's function
    """

    def __init__(self, cpu: bool) -> None:
        self.cpu = cpu
        self.calls: Counter[str] = Counter()

    def remove(self) -> None:
        """Undo this patch. torch's function is back once none is left."""
        global _active, _wrapped
        with _changing:
            _active = tuple([other for other in _active if other is not self])
            if not _active:
                _wrapped = F.scaled_dot_product_attention is not scaled_dot_product_attention
                if not _wrapped:
                    F.scaled_dot_product_attention = _torch_sdpa

    def __enter__(self) -> Patch:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        return f"<patch_sdpa(cpu={self.cpu}): {dict(self.calls)}>"


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    """torch.nn.functional.scaled_dot_product_attention, with its arguments and results.

    options: `scale` and `enable_gqa`
    """
    if not torch.compiler.is_compiling() and (active := _active):
        patch, mask = active[-1], _Mask(attn_mask)
        reason = _reason((query, key, value), mask, patch.cpu, dropout_p, is_causal, options)
        if reason is None:
            try:
                more = {"scale": options.get("scale"), "dropout": dropout_p or None}
                out = _attend((query, key, value), mask, is_causal, more)
            except UnsupportedError as error:
                reason = error.given
            else:
                patch.calls[SERVED] += 1
                return out
        patch.calls[reason] += 1
    result: Tensor = _torch_sdpa(query, key, value, attn_mask, dropout_p, is_causal, **options)
    return result


# --- which calls are served ---------------------------------------------------------------------------------


class _Mask:
    """An attn_mask, and along which dimensions it varies.

    table   of rank 4, of size 1 where it does not vary; None without a mask
    varies  whether it varies with the entry, the head, the query, the key
    """

    __slots__ = ("given", "table", "varies")

    def __init__(self, given: Any) -> None:
        self.given = given
        self.table: Tensor | None = None
        self.varies: tuple[bool, ...] = (False,) * 4

    def reason(self, q: Tensor, shape: tuple[int, ...]) -> str | None:
        """The reason for which the mask is torch's; None for a map, or a bias, of scores of this shape."""
        x = self.given
        if x is None:
            return None
        if not isinstance(x, Tensor) or x.layout is not torch.strided or launch.observed(x):
            return "a mask that is no plain tensor"
        if x.device != q.device or x.dtype not in (torch.bool, q.dtype, torch.float32):
            return "a mask of another device or dtype"
        if not 2 <= x.dim() <= 4:
            return f"a mask of rank {x.dim()}"
        table = x[(None,) * (4 - x.dim())]
        sizes = zip(table.shape, shape, strict=True)
        if any(size not in (1, extent) for size, extent in sizes):
            return "a mask of another shape"
        for dim in range(4):  # the gradient of one that has some is of its whole shape
            if table.shape[dim] > 1 and table.stride(dim) == 0 and not x.requires_grad:
                table = table.narrow(dim, 0, 1)
        self.varies = tuple([size > 1 for size in table.shape])
        self.table = table
        return None if any(self.varies) else "a mask of one element"


_Qkv = tuple[Tensor, Tensor, Tensor]


def _reason(
    qkv: _Qkv, mask: _Mask, cpu: bool, dropout_p: float, is_causal: bool, options: dict[str, Any]
) -> str | None:
    """The reason for which a call is torch's own; None for one that means the same here."""
    q = qkv[0]
    if not options.keys() <= {"scale", "enable_gqa"}:
        return "an unknown option"
    if not _is_finite(options.get("scale")):
        return "a scale that is no finite number"
    if not all(isinstance(x, Tensor) for x in qkv) or launch.observed(*qkv):
        return "no plain tensors, or something that traces, transforms or intercepts"
    if function_modes() and _other_modes():
        return "a mode of torch's functions"
    if not isinstance(dropout_p, (int, float)) or not 0 <= dropout_p <= 1:
        return "dropout that is no probability"
    if not _by_kernels(q) and not (cpu and q.device.type == "cpu"):
        return f"no kernels for tensors on {q.device.type}"
    if not torch.backends.cuda.flash_sdp_enabled():
        return "flash attention ruled out by sdpa_kernel"
    reason = _shapes(qkv, bool(options.get("enable_gqa", False)))
    if reason is not None:
        return reason
    if dropout_p and q.device.type != "cpu" and max(q.shape[3], qkv[2].shape[3]) > WIDEST_DROPPED:
        return "dropout in wide heads"
    if is_causal and mask.given is not None:
        return "a mask and is_causal"
    return mask.reason(q, (*q.shape[:3], qkv[1].shape[2]))


WIDEST_DROPPED = 128
"""Widest heads in which kernels of all chips drop weights in both passes."""


def _is_finite(scale: Any) -> bool:
    return scale is None or (isinstance(scale, (int, float)) and math.isfinite(scale))


def _by_kernels(q: Tensor) -> bool:
    return launch.by_kernels(_attention(False).variant, q)


def _other_modes() -> bool:
    """True if something other than a default device intercepts torch's functions."""
    with no_default_device():
        return function_modes() > 0


def _shapes(qkv: _Qkv, enable_gqa: bool) -> str | None:
    """The reason for which such tensors are torch's; None for those that mean the same here."""
    q, k, v = qkv
    if any(x.layout is not torch.strided or x.is_quantized for x in qkv):
        return "tensors that are not strided"
    if not q.device == k.device == v.device or not q.dtype == k.dtype == v.dtype or q.dtype not in DTYPES:
        return "several devices or dtypes, or none that is computed with"
    if not q.dim() == k.dim() == v.dim() == 4 or 0 in (*q.shape, *k.shape, *v.shape):
        return "tensors of another rank than 4, or without elements"
    if not q.shape[0] == k.shape[0] == v.shape[0] or k.shape[1:3] != v.shape[1:3]:
        return "tensors that are broadcast"
    if q.shape[3] != k.shape[3]:
        return "head widths that do not fit"
    heads, kv_heads = q.shape[1], k.shape[1]
    if heads != kv_heads and (not enable_gqa or heads % kv_heads):
        return "numbers of heads that do not fit"
    return None


# --- calls that are served ----------------------------------------------------------------------------------


def _attend(qkv: _Qkv, mask: _Mask, is_causal: bool, options: dict[str, Any]) -> Tensor:
    table, (batch, head, row, key) = mask.table, mask.varies
    if table is None:
        out: Tensor = _attention(bool(is_causal))(*qkv, **options)
        return out

    def at(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return table[b if batch else 0, h if head else 0, q_idx if row else 0, kv_idx if key else 0]

    def biased(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + at(b, h, q_idx, kv_idx)

    composed: dict[str, Any] = {"mask": at} if table.dtype == torch.bool else {"score_mod": biased}
    q, k, v = qkv
    out = attention(q, k, v, **options, **composed)
    return out


@cache
def _attention(is_causal: bool) -> Attention:
    return compile(mask=_top_left if is_causal else None)


def _top_left(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx
