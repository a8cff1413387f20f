"""Checks of a call, made once at the door. Each message says what to change.

Where programs and tests look for the words of torch's flex_attention, a message begins with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual
from torch.fx import Proxy

from fa4flex.errors import InputError, UnsupportedError
from fa4flex.primitives.base import Mod, functions_of, kind_of
from fa4flex.primitives.heads import ratio
from fa4flex.primitives.latent import refuse_latent
from fa4flex.primitives.paging import Paging
from fa4flex.primitives.varlen import Varlen
from fa4flex.runtime.flex.choice import FLEX_DEVICES, by_flex, no_backend
from fa4flex.torch_internals import forward_ad, is_wrapped, transform_level
from fa4flex.variant import Variant
from ptxsim.active import simulating

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def _shape(**tensors: Tensor) -> str:
    return ", ".join(
        f"{name} {str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for name, t in tensors.items()
    )


@dataclass(frozen=True)
class Sizes:
    """Extents of one call. Packed calls have `batch` sequences and `q_len`, `kv_len` tokens in all."""

    batch: int
    q_heads: int
    kv_heads: int
    q_len: int
    kv_len: int


def check_strided(q: Tensor, k: Tensor, v: Tensor) -> None:
    """q, k, v are strided tensors of one device."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if isinstance(tensor, Proxy):
            raise UnsupportedError(
                f"{name} is a torch.fx.Proxy, which has no shape, inside torch.fx.symbolic_trace",
                "tensors",
                "use torch.export.export, which traces with tensors; or keep a function that calls attention "
                "whole: torch.fx.wrap('its name') at module level",
            )
        if not isinstance(tensor, Tensor):
            refuse_latent(name, tensor)
            raise InputError(
                f"{name} is a {kind_of(tensor)}", "a torch.Tensor", f"convert it: torch.as_tensor({name})"
            )
        if tensor.is_nested:
            raise UnsupportedError(
                f"flex_attention does not support NestedTensor inputs: {name} is one",
                "strided tensors",
                f"pass {name}.values() of a jagged (batch, ragged, heads, head_dim) tensor, and"
                f" varlen=fa4flex.Varlen({name}.offsets())",
            )
        if tensor.layout is not torch.strided:
            raise InputError(
                f"{name} has layout {tensor.layout}", "a strided tensor", f"convert it with {name}.to_dense()"
            )
    if not q.device == k.device == v.device:
        raise InputError(
            "Expected query, key, and value to have the same device type, but got "
            f"query.device: {q.device}, key.device: {k.device}, and value.device: {v.device} instead.",
            "one device",
            "move them with .to(q.device)",
        )


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Types, dtypes, devices: requirements of every layout."""
    check_strided(q, k, v)
    if not q.dtype == k.dtype == v.dtype:
        raise InputError(
            f"mixed dtypes: {_shape(q=q, k=k, v=v)}",
            "one dtype for q, k and v",
            "cast them to the same dtype",
        )
    if q.dtype not in DTYPES:
        raise UnsupportedError(
            f"dtype {q.dtype}",
            "bfloat16, float16, float32 or float64",
            "cast q, k and v to bfloat16; scores are computed in float32 either way",
        )


def check_descriptions(varlen: object, paging: object, pages: bool = False) -> None:
    """`varlen` and `paging` are the objects that describe ragged and paged inputs, or None; not so the second
    where there are `pages`."""
    for name, value, wanted, example in (
        ("varlen", varlen, Varlen, "Varlen(cu_seqlens)"),
        ("paging", paging, Paging, "Paging(page_table, seqused_k)"),
    ):
        if not isinstance(value, wanted) and (value is not None or (pages and wanted is Paging)):
            raise InputError(
                f"{name} is a {type(value).__name__}",
                f"a fa4flex.{wanted.__name__}",
                f"pass fa4flex.{example}",
            )


def in_transforms(*tensors: Tensor | None) -> bool:
    """True if one of the tensors has a forward-mode tangent, or is one of a transform of torch.func."""
    if transform_level() is None and forward_ad._current_level < 0:
        return False
    return any(x is not None and (is_wrapped(x) or unpack_dual(x).tangent is not None) for x in tensors)


def check_transforms(*tensors: Tensor | None) -> None:
    """Raise UnsupportedError inside torch.func transforms and forward-mode automatic differentiation.

    Exchanges would drop tangents without a word; grad and vmap fail deep inside torch.
    """
    if in_transforms(*tensors):
        raise UnsupportedError(
            "attention over ranks of a tensor inside torch.func.grad, vmap or jvp, or with a tangent",
            "reverse-mode derivatives of batches: x.requires_grad_() and torch.autograd.grad",
            "use torch.autograd.grad for torch.func.grad, and a batch dimension for vmap",
        )


def check_dense(q: Tensor, k: Tensor, v: Tensor, layout: str = "bhsd") -> Sizes:
    """q [B, Hq, Sq, D], k [B, Hkv, Skv, D], v [B, Hkv, Skv, Dv], already in bhsd."""
    if not q.ndim == k.ndim == v.ndim == 4:
        raise InputError(
            f"ranks do not fit: {_shape(q=q, k=k, v=v)}",
            f"4-D tensors in layout {layout}",
            "unsqueeze the missing dimension, or pass varlen= for packed (tokens, heads, dim) tensors, with"
            " cu_seqlens_q",
        )
    # Each reading of a size takes 0.1 us.
    batch, heads, q_len, width = q.shape
    k_batch, kv_heads, kv_len, k_width = k.shape
    v_batch, v_heads, v_len, v_width = v.shape
    if 0 in (heads, kv_heads, v_heads, width, k_width, v_width):
        raise InputError(
            f"an empty tensor: {_shape(q=q, k=k, v=v)}",
            "at least one head and one channel",
            "check the shapes; batches and sequences may be empty",
        )
    if not batch == k_batch == v_batch:
        raise InputError(
            f"batch sizes differ: {_shape(q=q, k=k, v=v)}",
            "one batch size",
            "expand those of batch 1, e.g. k.expand(q.shape[0], -1, -1, -1), or slice to one batch",
        )
    if kv_len != v_len:
        raise InputError(
            f"k and v differ in length: {_shape(q=q, k=k, v=v)}", "one key length", "slice both alike"
        )
    _check_heads(q, k, v)
    return Sizes(batch, heads, kv_heads, q_len, kv_len)


def check_packed(q: Tensor, k: Tensor, v: Tensor, varlen: Varlen | None, sequences: int = 0) -> Sizes:
    """q [Tq, Hq, D], k [Tk, Hkv, D], v [Tk, Hkv, Dv] with cumulative sequence lengths.

    While compiling there are no lengths to check: `varlen` is None, and `sequences` says how many there are.
    """
    if not q.ndim == k.ndim == v.ndim == 3:
        raise InputError(
            f"ranks do not fit: {_shape(q=q, k=k, v=v)}",
            "packed 3-D tensors (tokens, heads, head_dim), as cu_seqlens was given",
            "drop the batch dimension: q.transpose(1, 2).flatten(0, 1) of bhsd, q.flatten(0, 1) of bshd",
        )
    if k.shape[0] != v.shape[0]:
        raise InputError(
            f"k and v differ in tokens: {_shape(q=q, k=k, v=v)}",
            "one number of key tokens",
            "slice both alike",
        )
    _check_heads(q, k, v)
    if varlen is not None and not torch.compiler.is_compiling():
        varlen.check(q.shape[0], k.shape[0])
    return Sizes(
        sequences if varlen is None else varlen.sequences, q.shape[1], k.shape[1], q.shape[0], k.shape[0]
    )


def _check_heads(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Heads are dimension 1 of dense and of packed tensors alike."""
    if q.shape[-1] != k.shape[-1]:
        raise InputError(
            f"q and k differ in head_dim: {_shape(q=q, k=k, v=v)}", "one head_dim for both", "pad the shorter"
        )
    heads, k_heads, v_heads = q.shape[1], k.shape[1], v.shape[1]
    if k_heads == v_heads:
        ratio(heads, k_heads)
    else:
        ratio(heads, k_heads, of="heads of keys")
        ratio(heads, v_heads, of="heads of values")


def check_variant(sizes: Sizes, q: Tensor, variant: Variant) -> None:
    """Requirements of a variant's own tensors on a call."""
    if q.device.type not in ("cpu", *FLEX_DEVICES):
        raise no_backend(q.device)
    if (q.device.type == "cuda" or simulating()) and not by_flex(variant.backend, q):
        _check_cuda(q, variant)
    if q.ndim == 3:
        refuse_map(variant, "packed sequences")
    check_tables((variant.scored, variant.mask), sizes.q_heads)
    if variant.sinks is not None:
        variant.sinks.check(sizes.q_heads, q.device)
    if variant.blocks is not None:
        variant.blocks.fits(sizes.q_len, sizes.kv_len, sizes.batch, sizes.q_heads)


def refuse_map(variant: Variant, what: str) -> None:
    """Raise UnsupportedError if the variant has a block map."""
    if variant.blocks is not None:
        raise UnsupportedError(
            f"a block map with {what}: a map is made for one q_len and kv_len",
            "contiguous keys, in a dense or padded batch",
            "express the blocks as a mask_mod over each sequence's own indices:"
            " listed[q_idx // 128, kv_idx // 128], of a captured bool tensor",
        )


def check_tables(mods: Sequence[Mod | None], q_heads: int) -> None:
    """Tables of named variants have a row per query head; a longer one is most likely another model's."""
    for part in chain(*map(functions_of, mods)):
        if part.query_heads not in (None, q_heads):
            raise InputError(
                f"{part!r} holds a table of {part.query_heads} heads, q has {q_heads} query heads",
                "one entry per query head (not per KV head)",
                f"give it a table of {q_heads} heads",
            )


def _check_cuda(q: Tensor, variant: Variant) -> None:
    if q.dtype not in (torch.bfloat16, torch.float16):
        raise UnsupportedError(
            f"{q.dtype} tensors on {q.device}",
            "bfloat16 or float16: the tensor cores multiply these, and sum in float32",
            "cast with .to(torch.bfloat16), or move the tensors with .cpu() for exact arithmetic",
        )
    if variant.precision.compute_dtype(q.dtype) != torch.float32:
        raise UnsupportedError(
            f"Precision(compute={variant.precision.compute!r}) on {q.device}",
            "float32, in which GPUs compute scores, softmax and sums",
            'leave compute="auto", or move the tensors with .cpu()',
        )


def check_paged(q: Tensor, k: Tensor, v: Tensor, paging: Paging, varlen: Varlen | None) -> None:
    """q [B, Hq, Sq, D], or [Tq, Hq, D] with varlen; caches k [pages, page_size, Hkv, D], v [..., Dv]. What
    the table and the lengths hold is looked at."""
    check_pages(q, k, v, paging, varlen)
    paging.check_contents(k)


def check_pages(q: Tensor, k: Tensor, v: Tensor, paging: Paging, varlen: Varlen | None = None) -> None:
    """The same, whatever the table and the lengths hold."""
    rank = 4 if varlen is None else 3
    if q.ndim != rank:
        raise InputError(
            f"q of rank {q.ndim} with paging: {_shape(q=q)}",
            "[B, Hq, Sq, D], or [tokens, Hq, D] together with varlen=Varlen(cu_seqlens_q)",
            "add the missing dimension, or pass cu_seqlens_q",
        )
    if varlen is not None and (varlen.cu_seqlens_k is not None or varlen.seqused_k is not None):
        raise InputError(
            "paging= together with varlen's cu_seqlens_k or seqused_k",
            "key lengths from Paging(page_table, seqused_k) alone",
            "pass varlen=Varlen(cu_seqlens_q) for the queries only",
        )
    queries = q.shape[0] if varlen is None else varlen.sequences
    if queries != paging.sequences:
        raise InputError(
            f"{queries} sequences of queries, {paging.sequences} in the page table",
            "one row of the page table per sequence",
            "slice the page table and seqused_k to this batch",
        )
    paging.fits(k, v)


def check_operand_devices(tensors: tuple[Tensor, ...], names: tuple[str, ...], q: Tensor) -> None:
    for tensor, name in zip(tensors, names, strict=True):
        if tensor.layout is not torch.strided or tensor.is_nested:
            layout = "nested" if tensor.is_nested else f"of layout {tensor.layout}"
            raise InputError(
                f"captured tensor {name!r} is {layout}",
                "strided captured tensors",
                f"convert {name!r} before it is captured: .to_dense(), or to_padded_tensor() where nested",
            )
        if tensor.device != q.device:
            raise InputError(
                f"captured tensor {name!r} is on {tensor.device}, q on {q.device}",
                "captured tensors on the device of q, k and v",
                f"move {name!r} with .to({str(q.device)!r}) before it is captured",
            )
