"""Appending keys and values to a paged KV cache."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fa4flex.errors import InputError, UnsupportedError
from fa4flex.primitives.paging import Paging
from fa4flex.primitives.rotary import Rotary
from fa4flex.primitives.varlen import Varlen
from fa4flex.runtime.checks import check_descriptions, check_strided
from fa4flex.runtime.compute import on_gpu


class Appended(NamedTuple):
    """seqused_k: sequence lengths afterwards, of the same dtype and shape. q: rotated queries,
    None without any."""

    seqused_k: Tensor
    q: Tensor | None


def append(
    k: Tensor,
    v: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    paging: Paging,
    *,
    varlen: Varlen | None = None,
    rotary: Rotary | None = None,
    q: Tensor | None = None,
    in_place: bool = False,
) -> Appended:
    """Append keys and values to a paged KV cache, on a GPU in one launch.

    k, v      [B, Hkv, S, D] and [B, Hkv, S, Dv], or packed [T, Hkv, D] with varlen=Varlen(cu_seqlens); of any
              strides. Varlen's seqused_q says how many tokens of each sequence are appended
    pools     [pages, page_size, Hkv, D] and [..., Dv], which are written to
    paging    the page table, and the sequence lengths before: token i of sequence b becomes its key
              seqused_k[b] + i
    rotary    rotary embeddings, applied to keys and queries at these positions
    q         queries of the same tokens [B, Hq, S, D], or packed: rotated ones are returned
    in_place  also writes the new lengths to paging.seqused_k

    Nothing is written for a token past the end of the table or in a page that does not exist. That is an
    InputError: at once on a CPU, on a GPU at the next call or `fa4flex.synchronize()`; FA4FLEX_VALIDATE=1
    checks before each launch. No gradients pass; sequences that share a page share what is written to it.

        new = fa4flex.append(k, v, k_pool, v_pool, paging)
        out = attn(q, k_pool, v_pool, paging=Paging(paging.page_table, new.seqused_k))
    """
    check_strided(q if q is not None else k, k, v)
    check_descriptions(varlen, paging, pages=True)
    paging.fits(k_pool, v_pool)
    _check_tokens(k, v, (k_pool, v_pool), paging, varlen)
    _check_turning(k, q, rotary)
    _check_use(k, v, k_pool, v_pool, q)
    cos, sin = (None, None) if rotary is None else (rotary.cos, rotary.sin)
    cu, part = (None, None) if varlen is None else (varlen.cu_seqlens_q, varlen.seqused_q)
    lengths, rotated = torch.ops.fa4flex.append(
        k, v, k_pool, v_pool, paging.page_table, paging.seqused_k, cu, part, cos, sin,
        rotary is not None and rotary.interleaved, q,
    )  # fmt: skip
    if in_place:
        paging.seqused_k.copy_(lengths)
    return Appended(lengths, None if q is None else rotated)


def _shapes(**tensors: Tensor) -> str:
    return ", ".join(f"{name} {x.dtype} {list(x.shape)} on {x.device}" for name, x in tensors.items())


def _check_tokens(
    k: Tensor, v: Tensor, pools: tuple[Tensor, Tensor], paging: Paging, varlen: Varlen | None
) -> None:
    """Raise InputError unless shapes, dtypes and devices of tokens and pools agree."""
    k_pool, v_pool = pools
    packed = varlen is not None and varlen.packed
    value = _shapes(k=k, v=v, k_pool=k_pool, v_pool=v_pool)
    if not k.ndim == v.ndim == (3 if packed else 4):
        raise InputError(
            value,
            "k and v [B, Hkv, S, D], or [tokens, Hkv, D] together with varlen=Varlen(cu_seqlens)",
            "add the missing dimension, or pass cu_seqlens",
        )
    heads_fit = k.shape[1] == v.shape[1] == k_pool.shape[2]
    widths_fit = k.shape[-1] == k_pool.shape[3] and v.shape[-1] == v_pool.shape[3]
    alike = k.shape[:-1] == v.shape[:-1] and k.dtype == v.dtype == k_pool.dtype
    if not (heads_fit and widths_fit and alike and k.device == k_pool.device):
        raise InputError(
            value,
            "k and v of as many tokens, with heads, widths, dtype and device of their pools",
            "cast or expand k and v as the pools were allocated",
        )
    if varlen is not None and (varlen.cu_seqlens_k is not None or varlen.seqused_k is not None):
        raise InputError(
            "varlen with cu_seqlens_k or seqused_k",
            "lengths of new tokens in cu_seqlens_q and seqused_q; those of keys before are Paging's",
            "pass varlen=Varlen(cu_seqlens), or Varlen(seqused_q=...)",
        )
    sequences = k.shape[0] if varlen is None or not packed else varlen.sequences
    counted = varlen is not None and varlen.sequences != sequences
    if sequences != paging.sequences or counted:
        raise InputError(
            f"{sequences} sequences of new keys, {paging.sequences} in the page table",
            "one row of the page table, and one length, per sequence",
            "slice the page table and the lengths to this batch",
        )


def _check_turning(k: Tensor, q: Tensor | None, rotary: Rotary | None) -> None:
    if rotary is not None and not isinstance(rotary, Rotary):
        raise InputError(
            f"rotary is a {type(rotary).__name__}", "a fa4flex.Rotary", "pass fa4flex.Rotary(cos, sin)"
        )
    if q is not None and rotary is None:
        raise InputError("q without rotary", "queries that are rotated", "leave q out")
    if rotary is not None and (2 * rotary.cos.shape[1] > k.shape[-1] or rotary.cos.device != k.device):
        raise InputError(
            f"cos and sin of {rotary.cos.shape[1]} angles on {rotary.cos.device} for "
            f"heads of {k.shape[-1]} on {k.device}",
            "at most half as many angles as elements of a head, on one device",
            "pass each angle once, and move the tables with .to(k.device)",
        )
    if q is not None:
        tokens = 0 if k.ndim == 3 else 2
        fits = q.ndim == k.ndim and q.shape[-1] == k.shape[-1] and q.shape[tokens] == k.shape[tokens]
        if not fits or q.dtype != k.dtype or (k.ndim == 4 and q.shape[0] != k.shape[0]):
            raise InputError(
                _shapes(q=q, k=k), "queries of the tokens of k, with its width and dtype", "slice both alike"
            )


def _check_use(*tensors: Tensor | None) -> None:
    arguments = [x for x in tensors if x is not None]
    if torch.is_grad_enabled() and any(x.requires_grad for x in arguments):
        raise UnsupportedError(
            "append of tensors that require gradients: a cache has none",
            "tensors without gradients",
            "call it under torch.no_grad(), or detach k, v and q",
        )
    if on_gpu(arguments[0]) and arguments[0].dtype not in (torch.bfloat16, torch.float16):
        raise UnsupportedError(
            f"{arguments[0].dtype} tensors on {arguments[0].device}",
            "bfloat16 or float16, as attention on a GPU has them",
            "cast with .to(torch.bfloat16)",
        )
