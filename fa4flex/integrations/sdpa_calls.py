"""Calls of scaled_dot_product_attention: which of them mean the same to fa4flex, and their output.

A call is brought to tensors of rank 4, or nested ones. What does not fit is told as a reason in words, in
eager code and in code that torch.compile traces.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.attention.bias import CausalBias, CausalVariant

from fa4flex import variants
from fa4flex.api import Attention, attention, compile
from fa4flex.errors import UnsupportedError
from fa4flex.jagged import is_jagged
from fa4flex.runtime import launch
from fa4flex.runtime.checks import DTYPES
from fa4flex.runtime.key_sources import MOST_WIDTH
from fa4flex.torch_internals import constant_in_graphs, function_modes, no_default_device, transform_level

QKV = tuple[Tensor, Tensor, Tensor]

NOT_PLAIN = "no plain tensors, or something that traces, transforms or intercepts"


class Asked(NamedTuple):
    """The arguments of a call that are no tensors. `unknown`: whether there are others than torch has."""

    dropout_p: Any
    is_causal: bool
    scale: Any
    enable_gqa: bool
    unknown: bool

    @classmethod
    def of(cls, dropout_p: Any, is_causal: Any, options: dict[str, Any]) -> Asked:
        unknown = any(name not in ("scale", "enable_gqa") for name in options)
        scale, enable_gqa = options.get("scale"), options.get("enable_gqa", False)
        return cls(dropout_p, bool(is_causal), scale, bool(enable_gqa), unknown)

    def reason(self) -> str | None:
        """The reason for which such arguments are torch's; None for those that are served."""
        scale, p = self.scale, self.dropout_p
        if self.unknown:
            return "an unknown option"
        if scale is not None and not (isinstance(scale, (int, float)) and math.isfinite(scale)):
            return "a scale that is no finite number"
        if not isinstance(p, (int, float)) or not 0 <= p <= 1:
            return "dropout that is no probability"
        return None


def serve(qkv: tuple[Any, Any, Any], mask: Any, asked: Asked, cpu: bool) -> Tensor | str:
    """The output of a call, or the reason for which it is torch's own. cpu: whether a CPU is served."""
    reason = asked.reason() or _surroundings(qkv)
    if reason is not None:
        return reason
    inputs = _nested(qkv, mask, asked.is_causal) if any(map(is_jagged, qkv)) else _strided(qkv, mask)
    if isinstance(inputs, str):
        return inputs
    table = Mask(asked.is_causal)
    reason = _fit(inputs.dense, asked, cpu) or table.take(inputs.mask, inputs.dense)
    if reason is not None:
        return reason
    try:
        out = _attend(inputs.qkv, table, asked)
    except UnsupportedError as error:
        return error.given
    return out if inputs.shape is None else out.view(*inputs.shape, out.shape[-1])


# --- where a call is made -----------------------------------------------------------------------------------


def _surroundings(qkv: tuple[Any, Any, Any]) -> str | None:
    """The reason for which calls are torch's where this one is made, or that it has no tensors."""
    if torch.compiler.is_compiling() and not torch.compiler.is_dynamo_compiling():
        return "a function that a graph has whole, as it has torch.nn.MultiheadAttention's"
    if not all(isinstance(x, Tensor) for x in qkv) or _transformed():
        return NOT_PLAIN
    if function_modes() and _other_modes():
        return "a mode of torch's functions"
    return None if _flash_is_enabled() else "flash attention ruled out by sdpa_kernel"


@constant_in_graphs
def _transformed() -> bool:
    return transform_level() is not None


@constant_in_graphs
def _flash_is_enabled() -> bool:
    return torch.backends.cuda.flash_sdp_enabled()


def _other_modes() -> bool:
    """True if something other than a default device intercepts torch's functions. In graphs any mode counts:
    the tensors of a mod would be made on that device."""
    if torch.compiler.is_dynamo_compiling():
        return True
    with no_default_device():
        return function_modes() > 0


# --- its tensors --------------------------------------------------------------------------------------------


class Inputs(NamedTuple):
    """Tensors of a call as attention takes them.

    qkv    of rank 4, or nested
    dense  the same of rank 4: of nested tensors all tokens, as one sequence
    mask   of rank 4 at most, or None
    shape  sizes of the output but for its channels, where it is not of rank 4
    """

    qkv: QKV
    dense: QKV
    mask: Any
    shape: tuple[int, ...] | None = None


def _strided(qkv: QKV, mask: Any) -> Inputs | str:
    """Tensors with any number of leading dimensions, or the reason for which they are torch's."""
    q, k, v = qkv
    if any(x.layout is not torch.strided or x.is_quantized for x in qkv):
        return "tensors that are not strided"
    rank = q.dim()
    if rank < 2 or k.dim() != rank or v.dim() != rank:
        return "tensors of several ranks, or of one below 2"
    if isinstance(mask, Tensor) and mask.dim() > rank and not isinstance(mask, CausalBias):
        return "a mask of higher rank than queries"
    if rank > 4:
        return _flattened(qkv, mask)
    if rank < 4:
        added = (None,) * (4 - rank)
        turned = q[added], k[added], v[added]
        return Inputs(turned, turned, mask, tuple(q.shape[:-1]))
    if not q.shape[0] == k.shape[0] == v.shape[0]:
        qkv = _of_one_batch(q, k, v)
    return Inputs(qkv, qkv, mask)


def _of_one_batch(*qkv: Tensor) -> Any:
    """Tensors of batch 1 repeated as often as others are long, without copies."""
    batch = max([x.shape[0] for x in qkv])
    return tuple([x.expand(batch, -1, -1, -1) if x.shape[0] == 1 else x for x in qkv])


def _flattened(qkv: QKV, mask: Any) -> Inputs | str:
    """Tensors of more than four dimensions, the first ones as one batch."""
    q, k, v = qkv
    lead = q.shape[:-3]
    if k.shape[:-3] != lead or v.shape[:-3] != lead or 0 in lead:
        return "tensors that are broadcast over several dimensions"
    if isinstance(mask, Tensor) and mask.dim() > 3 and not isinstance(mask, CausalBias):
        if mask.shape[:-3] != lead:
            return "a mask that is broadcast over several dimensions"
        mask = mask.flatten(0, -4)
    flat = q.flatten(0, -4), k.flatten(0, -4), v.flatten(0, -4)
    return Inputs(flat, flat, mask, tuple(q.shape[:-1]))


def _nested(qkv: tuple[Any, Any, Any], mask: Any, is_causal: bool) -> Inputs | str:
    """Nested tensors [B, heads, ragged, channels], or the reason for which they are torch's."""
    q, k, v = qkv
    if mask is not None:
        return "a mask of nested tensors"
    if not all(is_jagged(x) and x.dim() == 4 for x in qkv):
        return "nested tensors of another rank than 4, or beside others"
    values = q.values(), k.values(), v.values()
    for x, packed in zip(qkv, values, strict=True):
        if packed.dim() != 3 or x.shape[1] != packed.shape[0] or x.shape[3] != packed.shape[2]:
            return "nested tensors that are not [B, heads, ragged, channels]"
        if x.lengths() is not None:
            return "nested tensors with holes"
    if k.offsets() is not v.offsets() or q.offsets().shape != k.offsets().shape:
        return "nested tensors of several batches, or keys and values by several offsets"
    if is_causal and q.offsets() is not k.offsets():
        return "is_causal of queries and keys that are nested by several offsets"
    return Inputs(qkv, (values[0][None], values[1][None], values[2][None]), None)


def _fit(dense: QKV, asked: Asked, cpu: bool) -> str | None:
    """The reason for which tensors of rank 4 are torch's; None for those that mean the same here."""
    if not _are_plain(*dense):
        return NOT_PLAIN
    q, k, v = dense
    if not q.device == k.device == v.device or not q.dtype == k.dtype == v.dtype or q.dtype not in DTYPES:
        return "several devices or dtypes, or none that is computed with"
    kernels = launch.by_kernels(_attention(None).variant, q)
    if not kernels and not (cpu and q.device.type == "cpu"):
        advice = ", which patch_sdpa(cpu=True) serves" if q.device.type == "cpu" else ""
        return f"no kernels for tensors on {q.device.type}{advice}"
    reason = _shapes(dense, asked.enable_gqa)
    if reason is not None:
        return reason
    width = max(q.shape[3], v.shape[3])
    if asked.dropout_p and kernels and width > WIDEST_DROPPED:
        return "dropout in wide heads"
    if kernels and width > MOST_WIDTH and torch.is_grad_enabled() and any(x.requires_grad for x in dense):
        return "gradients of wide heads"
    # Code that is compiled cannot hand on what a kernel refuses once it runs.
    if not kernels or not torch.compiler.is_dynamo_compiling():
        return None
    return _refused(str(q.dtype), int(q.shape[3]), int(v.shape[3]))


WIDEST_DROPPED = 128
"""Widest heads in which kernels of all chips drop weights in both passes."""


def _shapes(qkv: QKV, enable_gqa: bool) -> str | None:
    q, k, v = qkv
    if 0 in (*q.shape, *k.shape, *v.shape):
        return "tensors without elements"
    if not q.shape[0] == k.shape[0] == v.shape[0] or k.shape[1] != v.shape[1] or k.shape[2] != v.shape[2]:
        return "batches, or keys and values, that do not fit"
    if q.shape[3] != k.shape[3]:
        return "head widths that do not fit"
    heads, kv_heads = q.shape[1], k.shape[1]
    if heads != kv_heads and kv_heads != 1 and (not enable_gqa or heads % kv_heads):
        return "numbers of heads that do not fit"
    return None


@constant_in_graphs
def _refused(dtype: str, width: int, width_v: int) -> str | None:
    """The reason for which there is no kernel of both passes for such heads on this machine's GPU; None where
    there is."""
    heads = {"dtype": dtype.removeprefix("torch."), "head_dim": width, "head_dim_v": width_v}
    try:
        for direction in ("forward", "backward"):
            _attention(None).source("plan", direction=direction, **heads)
    except UnsupportedError as error:
        return error.given
    return None


class Mask:
    """An attn_mask: what of it attention computes with.

    causal  a causal mask's alignment, None of others
    table   of rank 4, of size 1 where it does not vary; None without a mask, and of causal ones
    varies  whether it varies with the entry, the head, the query, the key
    """

    __slots__ = ("causal", "table", "varies")

    def __init__(self, is_causal: bool) -> None:
        self.causal: Alignment | None = "top_left" if is_causal else None
        self.table: Tensor | None = None
        self.varies: tuple[bool, ...] = (False,) * 4

    def take(self, x: Any, qkv: QKV) -> str | None:
        """Take an attn_mask for the scores of q and k, or give the reason for which it is torch's."""
        if x is None:
            return None
        if self.causal is not None:
            return "a mask and is_causal"
        q_len, kv_len = qkv[0].shape[2], qkv[1].shape[2]
        if isinstance(x, CausalBias) and (x.seq_len_q, x.seq_len_kv) == (q_len, kv_len):
            self.causal = "top_left" if x.variant == CausalVariant.UPPER_LEFT else "bottom_right"
            return None
        if not isinstance(x, Tensor) or x.layout is not torch.strided or not _are_plain(x):
            return "a mask that is no plain tensor"
        return self._take_table(x, qkv[0], (*qkv[0].shape[:3], kv_len))

    def _take_table(self, x: Tensor, q: Tensor, shape: tuple[int, ...]) -> str | None:
        if x.device != q.device or x.dtype not in (torch.bool, q.dtype, torch.float32):
            return "a mask of another device or dtype"
        if not 2 <= x.dim() <= 4:
            return f"a mask of rank {x.dim()}"
        table = x[(None,) * (4 - x.dim())]
        if any(size not in (1, extent) for size, extent in zip(table.shape, shape, strict=True)):
            return "a mask of another shape"
        for dim in range(4):  # the gradient of one that has some is of its whole shape
            if table.shape[dim] > 1 and table.stride(dim) == 0 and not x.requires_grad:
                table = table.narrow(dim, 0, 1)
        self.varies = tuple([size > 1 for size in table.shape])
        self.table = table
        return None if any(self.varies) else "a mask of one element"


def _are_plain(*tensors: Tensor) -> bool:
    """True if nothing but Dynamo sees what is done with tensors."""
    if torch.compiler.is_dynamo_compiling():
        return all(type(x) in (Tensor, Parameter) for x in tensors)
    return not launch.observed(*tensors)


# --- its output ---------------------------------------------------------------------------------------------


def _attend(qkv: QKV, mask: Mask, asked: Asked) -> Tensor:
    options = {"scale": asked.scale, "dropout": asked.dropout_p or None}
    table, (batch, head, row, key) = mask.table, mask.varies
    out: Tensor
    if table is None:
        out = _attention(mask.causal)(*qkv, **options)
        return out

    def at(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return table[b if batch else 0, h if head else 0, q_idx if row else 0, kv_idx if key else 0]

    def biased(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + at(b, h, q_idx, kv_idx)

    composed: dict[str, Any] = {"mask": at} if table.dtype == torch.bool else {"score_mod": biased}
    q, k, v = qkv
    out = attention(q, k, v, **options, **composed)
    return out


Alignment = Literal["top_left", "bottom_right"]


def _attention(causal: Alignment | None) -> Attention:
    return _made(causal) if torch.compiler.is_dynamo_compiling() else _kept(causal)


def _made(causal: Alignment | None) -> Attention:
    return compile(mask=None if causal is None else _CAUSAL[causal])


_kept = cache(_made)


def _top_left(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


_CAUSAL: dict[Alignment, Any] = {"top_left": _top_left, "bottom_right": variants.causal}
