"""Appending keys and values, or latent rows, to a paged KV cache."""

from __future__ import annotations

from typing import Any, NamedTuple, overload

import torch
from torch import Tensor

from fa4flex.errors import InputError, UnsupportedError
from fa4flex.primitives.base import kind_of
from fa4flex.primitives.kv_scales import KVScales
from fa4flex.primitives.latent import Latent, refuse_latent
from fa4flex.primitives.paging import Paging
from fa4flex.primitives.qk_norm import QKNorm
from fa4flex.primitives.rotary import Rotary
from fa4flex.primitives.varlen import Varlen
from fa4flex.runtime.append_checks import (
    check_heads,
    check_latent,
    check_latent_heads,
    check_positions,
    check_scales,
    check_tokens,
    refuse_gradients,
)
from fa4flex.runtime.checks import check_descriptions, check_strided
from fa4flex.runtime.compute import on_gpu
from fa4flex.runtime.cuda.append import New
from fa4flex.runtime.latent_append import by_operator


class Appended(NamedTuple):
    """seqused_k: sequence lengths afterwards, of the same dtype and shape. q: normalised and rotated queries;
    gate: what stood behind them in q, a view of it. None without any."""

    seqused_k: Tensor
    q: Tensor | None
    gate: Tensor | None = None


@overload
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
    norm: QKNorm | None = None,
    positions: Tensor | None = None,
    kv_scales: KVScales | None = None,
) -> Appended: ...


@overload
def append(
    k: Tensor,
    v: Latent,
    k_pool: Paging | None = None,
    v_pool: None = None,
    paging: Paging | None = None,
    *,
    varlen: Varlen | None = None,
    rotary: Rotary | None = None,
    q: Tensor | None = None,
    in_place: bool = False,
    norm: QKNorm | None = None,
    positions: Tensor | None = None,
    kv_scales: KVScales | None = None,
) -> Appended: ...


def append(
    k: Tensor,
    v: Tensor | Latent,
    k_pool: Tensor | Paging | None = None,
    v_pool: Tensor | None = None,
    paging: Paging | None = None,
    *,
    varlen: Varlen | None = None,
    rotary: Rotary | None = None,
    q: Tensor | None = None,
    in_place: bool = False,
    norm: QKNorm | None = None,
    positions: Tensor | None = None,
    kv_scales: KVScales | None = None,
) -> Appended:
    """Append keys and values to a paged KV cache, on a GPU in one launch; or latent rows:
    append(rows, latent, paging).

    k, v       [B, Hkv, S, D] and [B, Hkv, S, Dv], or packed [T, Hkv, D] with varlen=Varlen(cu_seqlens); of
               any strides. Varlen's seqused_q says how many tokens of each sequence are appended
    pools      [pages, page_size, Hkv, D] and [..., Dv], which are written to
    paging     the page table, and the sequence lengths before: token i of sequence b becomes its key
               seqused_k[b] + i
    rotary     rotary embeddings, applied to keys and queries at these positions
    q          queries of the same tokens [B, Hq, S, D], or packed: normalised and rotated ones are returned.
               [..., 2 * D]: a gate follows the query of each head, as fused projections have it
    in_place   also writes the new lengths to paging.seqused_k
    norm       norms of the heads of queries and keys, applied before they are rotated
    positions  integers [B, S], or packed [T]: positions for rotary other than those of the keys in their
               sequences; [axes, B, S] or [axes, T] where rotary has axes
    kv_scales  for pools of torch.float8_e4m3fn: what is stored times its scale is the key or value. Scales of
               single tokens [pages, page_size, Hkv] are written, from each head's largest element; those of
               heads and pages are read, and what is larger than 448 of them is stored as 448

    Rows [B, 1, S, width], or packed [T, 1, width], are written to the pages of a `fa4flex.Latent`, as bytes
    where it has a format (`LatentFormat.encoded`). `rotary` rotates the last rope_dim columns of rows and
    queries, which may have any width; `norm` has weights for the first value_dim columns of rows and for all
    of queries. On a GPU these are 50 to 125 PyTorch operations; dtypes are those of the cache, or with
    a format any of 16 bits or more.

    All is computed in float32 and rounded once. Nothing is written for a token past the end of the table or
    in a page that does not exist. That is an InputError: at once on a CPU, on a GPU at the next call or
    `fa4flex.synchronize()`; FA4FLEX_VALIDATE=1 checks before each launch. No gradients pass; sequences that
    share a page share what is written to it.

        new = fa4flex.append(k, v, k_pool, v_pool, paging)
        out = attn(q, k_pool, v_pool, paging=Paging(paging.page_table, new.seqused_k))

        new = fa4flex.append(kv_a_proj(x)[:, None], latent, paging, norm=QKNorm(k=weight), rotary=rotary, q=q)
    """
    if isinstance(v, Latent):
        pages = _paging_of_rows(k_pool, v_pool, paging, kv_scales)
        return _append_latent(New(k, k, q, rotary, None, None, norm, positions), v, pages, varlen, in_place)
    new = New(k, v, q, rotary, None, None, norm, positions)
    return _append_keys(new, (k_pool, v_pool), paging, varlen, in_place, kv_scales)


def _append_keys(
    new: New,
    pools: tuple[Any, Any],
    paging: Paging | None,
    varlen: Varlen | None,
    in_place: bool,
    kv_scales: KVScales | None,
) -> Appended:
    """Append keys and values to pools."""
    k, v, rotary, norm = new.k, new.v, new.rotary, new.norm
    check_strided(new.q if new.q is not None else k, k, v)
    refuse_latent("k_pool", pools[0])
    check_descriptions(varlen, paging, pages=True)
    _check_pools(*pools)
    assert paging is not None
    paging.fits(*pools)
    q, gate = _split(new.q, k)
    check_tokens(k, v, pools, paging, varlen)
    check_heads(k, q, rotary, norm)
    check_positions(k, rotary, new.positions)
    scales = check_scales(k, pools, kv_scales)
    _refuse_gradients(new, *pools)
    _check_dtype(k)
    new = _described(new, varlen)
    cos, sin, turns_pairs, axes = _of_rotary(rotary)
    of_norm = (None, None, 0.0, False) if norm is None else (norm.q, norm.k, norm.eps, norm.unit_offset)
    lengths, rotated = torch.ops.fa4flex.append(
        k, v, *pools, paging.page_table, paging.seqused_k, new.cu_seqlens, new.seqused, cos, sin,
        turns_pairs, q, axes, new.positions, *of_norm, scales.k, scales.v,
    )  # fmt: skip
    return _appended(paging, in_place, lengths, None if q is None else rotated, gate)


def _append_latent(new: New, latent: Latent, paging: Any, varlen: Varlen | None, in_place: bool) -> Appended:
    """Append new.k, which are rows, to latent rows."""
    rows, q, rotary = new.k, new.q, new.rotary
    check_strided(rows if q is None else q, rows, rows)
    check_descriptions(varlen, paging, pages=True)
    check_latent(rows, latent, varlen, paging)
    check_latent_heads(rows, latent, q, rotary, new.norm)
    check_positions(rows, rotary, new.positions)
    _refuse_gradients(new, latent.cache, latent.scale)
    lengths, rotated = by_operator(_described(new, varlen), latent, paging)
    return _appended(paging, in_place, lengths, None if q is None else rotated)


def _refuse_gradients(new: New, *stored: Tensor | None) -> None:
    weights = (None, None) if new.norm is None else (new.norm.q, new.norm.k)
    refuse_gradients(new.k, new.v, *stored, new.q, *weights)


def _described(new: New, varlen: Varlen | None) -> New:
    """The tokens with their lengths, and positions by axes: of a rotary without axes there is one."""
    if varlen is not None:
        new = new._replace(cu_seqlens=varlen.cu_seqlens_q, seqused=varlen.seqused_q)
    if new.positions is not None and (new.rotary is None or new.rotary.axes is None):
        new = new._replace(positions=new.positions[None])
    return new


def _appended(
    paging: Paging, in_place: bool, lengths: Tensor, q: Tensor | None, gate: Tensor | None = None
) -> Appended:
    if in_place:
        paging.seqused_k.copy_(lengths)
    return Appended(lengths, q, gate)


def _paging_of_rows(k_pool: object, v_pool: object, paging: object, kv_scales: object) -> object:
    """The paging of a call with latent rows, given third or by name."""
    given = [x for x in (k_pool, v_pool, paging) if x is not None]
    if len(given) > 1 or any(isinstance(x, (Tensor, Latent)) for x in given):
        raise UnsupportedError(
            "pools beside a fa4flex.Latent, which holds the pool of its rows",
            "append(rows, latent, paging): a row is key and value",
            "leave them out",
        )
    if kv_scales is not None:
        raise UnsupportedError(
            "kv_scales= beside a fa4flex.Latent",
            "scales in the bytes of its format, or its one scale",
            "e.g. Latent(cache, format=LatentFormat.DEEPSEEK_V3_2)",
        )
    return given[0] if given else None


def _check_pools(*pools: object) -> None:
    for name, pool in zip(("k_pool", "v_pool"), pools, strict=True):
        if not isinstance(pool, Tensor):
            refuse_latent(name, pool)
            raise InputError(
                f"{name} is a {kind_of(pool)}",
                "a tensor [pages, page_size, Hkv, D]",
                "append(k, v, k_pool, v_pool, paging), or append(rows, latent, paging)",
            )


def _of_rotary(rotary: Rotary | None) -> tuple[Tensor | None, Tensor | None, bool, Tensor | None]:
    """Tables of cosines and sines, whether pairs lie next to each other, and the axes of angles."""
    return (
        (None, None, False, None)
        if rotary is None
        else (rotary.cos, rotary.sin, rotary.interleaved, rotary.axes)
    )


def _split(q: Tensor | None, k: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Queries and gates of a fused projection."""
    if q is None or q.ndim != k.ndim or q.shape[-1] != 2 * k.shape[-1]:
        return q, None
    return q[..., : k.shape[-1]], q[..., k.shape[-1] :]


def _check_dtype(x: Tensor) -> None:
    if on_gpu(x) and x.dtype not in (torch.bfloat16, torch.float16):
        raise UnsupportedError(
            f"{x.dtype} tensors on {x.device}",
            "bfloat16 or float16, as attention on a GPU has them",
            "cast with .to(torch.bfloat16)",
        )
