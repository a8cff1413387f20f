"""Checks of what is appended to a cache, by shapes, dtypes and devices alone."""

from __future__ import annotations

import torch
from torch import Tensor

from fa4flex.errors import InputError, UnsupportedError
from fa4flex.primitives.base import kind_of
from fa4flex.primitives.kv_scales import E4M3, NO_SCALES, KVScales, check_kind
from fa4flex.primitives.latent import Latent
from fa4flex.primitives.paging import Paging
from fa4flex.primitives.qk_norm import QKNorm
from fa4flex.primitives.rotary import Rotary
from fa4flex.primitives.varlen import Varlen


def shapes(**tensors: Tensor) -> str:
    return ", ".join(f"{name} {x.dtype} {list(x.shape)} on {x.device}" for name, x in tensors.items())


def check_tokens(
    k: Tensor, v: Tensor, pools: tuple[Tensor, Tensor], paging: Paging, varlen: Varlen | None
) -> None:
    """Raise InputError unless shapes, dtypes and devices of tokens and pools agree."""
    k_pool, v_pool = pools
    packed = varlen is not None and varlen.packed
    value = shapes(k=k, v=v, k_pool=k_pool, v_pool=v_pool)
    if not k.ndim == v.ndim == (3 if packed else 4):
        raise InputError(
            value,
            "k and v [B, Hkv, S, D], or [tokens, Hkv, D] together with varlen=Varlen(cu_seqlens)",
            "add the missing dimension, or pass cu_seqlens",
        )
    if k_pool.shape[2] != v_pool.shape[2] and k.shape[1] == k_pool.shape[2]:
        raise UnsupportedError(
            f"append to pools that differ in heads: {value}",
            "one number of heads of keys and of values: one launch writes both",
            "write them by index: k_pool[page, slot] = k, and v_pool[page, slot] = v",
        )
    heads_fit = k.shape[1] == v.shape[1] == k_pool.shape[2]
    widths_fit = k.shape[-1] == k_pool.shape[3] and v.shape[-1] == v_pool.shape[3]
    stored = E4M3 if k_pool.dtype == E4M3 and k.dtype.is_floating_point and k.dtype.itemsize > 1 else k.dtype
    alike = k.shape[:-1] == v.shape[:-1] and k.dtype == v.dtype and k_pool.dtype == v_pool.dtype == stored
    if not (heads_fit and widths_fit and alike and k.device == k_pool.device):
        raise InputError(
            value,
            "k and v of as many tokens, with heads, widths, dtype and device of their pools, or pools of "
            "torch.float8_e4m3fn",
            "cast or expand k and v as the pools were allocated",
        )
    check_sequences(k, varlen, paging)


def check_sequences(k: Tensor, varlen: Varlen | None, paging: Paging) -> None:
    """Raise InputError unless tokens, lengths and the page table are of the same sequences."""
    if varlen is not None and (varlen.cu_seqlens_k is not None or varlen.seqused_k is not None):
        raise InputError(
            "varlen with cu_seqlens_k or seqused_k",
            "lengths of new tokens in cu_seqlens_q and seqused_q; those of keys before are Paging's",
            "pass varlen=Varlen(cu_seqlens), or Varlen(seqused_q=...)",
        )
    sequences = k.shape[0] if varlen is None or not varlen.packed else varlen.sequences
    counted = varlen is not None and varlen.sequences != sequences
    if sequences != paging.sequences or counted:
        raise InputError(
            f"{sequences} sequences of new keys, {paging.sequences} in the page table",
            "one row of the page table, and one length, per sequence",
            "slice the page table and the lengths to this batch",
        )


def check_heads(k: Tensor, q: Tensor | None, rotary: Rotary | None, norm: QKNorm | None) -> None:
    """Raise InputError unless angles, norms and queries fit the keys."""
    check_queries(q, rotary, norm)
    check_angles(k, q, rotary)
    if norm is not None:
        for name, weight in (("q", norm.q), ("k", norm.k)):
            check_weights(name, weight, k, k.shape[-1])


def check_queries(q: Tensor | None, rotary: Rotary | None, norm: QKNorm | None) -> None:
    """Raise InputError for queries that nothing is done to, and for weights of none."""
    _check_kind("rotary", rotary, Rotary)
    _check_kind("norm", norm, QKNorm)
    if q is not None and rotary is None and (norm is None or norm.q is None):
        raise InputError(
            "q without rotary", "queries that are rotated, or normalised by norm=QKNorm(q=...)", "leave q out"
        )
    if norm is not None and norm.q is not None and q is None:
        raise InputError("weights of q without q", "queries that are normalised", "pass q, or QKNorm(k=...)")


def check_angles(k: Tensor, q: Tensor | None, rotary: Rotary | None) -> None:
    """Raise InputError unless angles and queries fit what is rotated of the keys."""
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
                shapes(q=q, k=k), "queries of the tokens of k, with its width and dtype", "slice both alike"
            )


def check_weights(name: str, weight: Tensor | None, x: Tensor, columns: int) -> None:
    """Raise InputError unless a norm has weights for so many columns of x."""
    if weight is not None and (weight.shape[0] != columns or weight.device != x.device):
        raise InputError(
            f"{name} weights of {weight.shape[0]} elements on {weight.device} for "
            f"heads of {columns} on {x.device}",
            "a weight for each element of a head, on one device",
            "a norm over all heads together is applied before they are split",
        )


def _check_kind(name: str, value: object, kind: type) -> None:
    if value is not None and not isinstance(value, kind):
        raise InputError(
            f"{name} is a {type(value).__name__}",
            f"a fa4flex.{kind.__name__}",
            f"pass fa4flex.{kind.__name__}(...)",
        )


def check_positions(k: Tensor, rotary: Rotary | None, positions: Tensor | None) -> None:
    """Raise InputError unless positions are of the tokens, and on as many axes as rotary needs."""
    axes = rotary is not None and rotary.axes is not None
    if positions is None:
        if axes:
            raise InputError(
                "rotary with axes and no positions",
                "positions of each axis, [axes, B, S] or packed [axes, T]",
                "pass positions=, or a Rotary without axes to rotate by places among the keys",
            )
        return
    if rotary is None:
        raise InputError("positions without rotary", "positions by which heads are rotated", "leave them out")
    tokens = list(k.shape[:1]) if k.ndim == 3 else [k.shape[0], k.shape[2]]
    integers = isinstance(positions, Tensor) and positions.dtype in (torch.int32, torch.int64)
    if not integers or list(positions.shape[axes:]) != tokens or positions.device != k.device:
        value = shapes(positions=positions) if isinstance(positions, Tensor) else kind_of(positions)
        raise InputError(
            f"positions {value} for tokens {tokens} on {k.device}",
            f"int32 or int64 {['axes', *tokens] if axes else tokens}, on one device",
            "expand them to all tokens: position_ids.expand(batch, -1)",
        )


def check_scales(k: Tensor, pools: tuple[Tensor, Tensor], scales: KVScales | None) -> KVScales:
    """The scales of pools of e4m3. Raises InputError for scales of others, or which do not fit."""
    scales = check_kind(scales)
    if scales is not None and k.dtype == E4M3:
        raise InputError(
            "scales of tokens that have 8 bits already", "keys and values to quantise", "leave kv_scales out"
        )
    if pools[0].dtype != E4M3:
        if scales is not None:
            raise InputError(
                f"kv_scales for pools of {pools[0].dtype}", "pools of torch.float8_e4m3fn", "leave them out"
            )
        return NO_SCALES
    if scales is None:
        return NO_SCALES
    scales.check(*pools, "paged")
    of_tokens = [x is not None and x.ndim == 3 for x in (scales.k, scales.v)]
    if len(set(of_tokens)) > 1:
        raise InputError(
            "scales of single tokens for one of k and v", "them for both, or for neither", "give both alike"
        )
    for name, scale in (("k", scales.k), ("v", scales.v)):
        if scale is not None and scale.ndim == 3 and 0 in scale.stride():
            raise InputError(
                f"{name} scales of strides {list(scale.stride())}, which are written",
                "a number of its own for each token and head",
                "allocate them: torch.ones(pages, page_size, kv_heads)",
            )
    return scales


def check_latent(rows: Tensor, latent: Latent, varlen: Varlen | None, paging: Paging) -> None:
    """Raise InputError or UnsupportedError unless rows can be written to pages of latent rows."""
    cache, form, rank = latent.cache, latent.format, 3 if varlen is not None and varlen.packed else 4
    if cache.ndim != 4:
        raise UnsupportedError(
            f"append to packed latent rows {list(cache.shape)}",
            "pages [pages, page_size, 1, width]",
            "a sequence of a padded cache [B, S, 1, width] is a page: Paging(torch.arange(B)[:, None], used)",
        )
    paging.fits(cache, cache)
    one_head = rows.ndim == rank and rows.shape[1] == 1 and rows.shape[-1] == latent.width
    floating = rows.is_floating_point() and rows.itemsize > 1
    if not one_head or not (rows.dtype == cache.dtype if form is None else floating):
        dtype = cache.dtype if form is None else "16 bits or more"
        raise InputError(
            shapes(rows=rows, cache=cache),
            f"rows [B, 1, S, {latent.width}], or [tokens, 1, {latent.width}] together with"
            f" varlen=Varlen(cu_seqlens), floats of {dtype}",
            "transpose rows of [B, S, 1, width]: rows.transpose(1, 2)",
        )
    if rows.device != cache.device:
        raise InputError(shapes(rows=rows, cache=cache), "one device", "move the rows to the cache")
    if form is not None and form.planes and cache.stride()[1::2] != (form.row_bytes, 1):
        raise UnsupportedError(
            f"append to pages of strides {list(cache.stride())}, with scales behind the rows of a page",
            f"the page_size * {form.row_bytes} bytes of a page one after the other; there may be gaps between"
            " pages",
            "allocate [pages, page_size, 1, bytes], or view such memory so",
        )
    check_sequences(rows, varlen, paging)


def check_latent_heads(
    rows: Tensor, latent: Latent, q: Tensor | None, rotary: Rotary | None, norm: QKNorm | None
) -> None:
    """Raise InputError unless angles, norms and queries fit latent rows: angles their rotated columns, norms
    their values, and queries any width."""
    check_queries(q, rotary, norm)
    rope = latent.rope_dim
    if q is not None and (q.ndim != rows.ndim or q.shape[-1] < rope):
        raise InputError(
            shapes(q=q, rows=rows),
            f"queries of the tokens of the rows, whose last {rope} columns are rotated",
            "torch.cat((q_nope @ w_uk, q_rope), -1), or queries before absorption",
        )
    check_angles(
        rows[..., latent.width - rope :], None if q is None else q[..., q.shape[-1] - rope :], rotary
    )
    if norm is not None:
        check_weights("k", norm.k, rows, latent.value_dim)
        if q is not None:
            check_weights("q", norm.q, q, q.shape[-1])


def refuse_gradients(*tensors: Tensor | None) -> None:
    """Raise UnsupportedError for tensors that gradients are wanted of."""
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        raise UnsupportedError(
            "append of tensors that require gradients: a cache has none",
            "tensors without gradients",
            "call it under torch.no_grad(), or detach what is appended, q and the weights of a norm",
        )
