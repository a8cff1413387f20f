"""torch's operators of flash attention by fa4flex's kernels, with the signatures of these operators: what
scaled_dot_product_attention and varlen_attn call on a GPU.

Calls that no kernel is for raise UnsupportedError here, and go to the kernel that torch had before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fa4flex.api import Attention
from fa4flex.errors import UnsupportedError
from fa4flex.integrations.sdpa_calls import WIDEST_DROPPED
from fa4flex.integrations.varlen import described, windowed
from fa4flex.primitives.dropout import Dropout
from fa4flex.primitives.varlen import Varlen
from fa4flex.runtime import autocast, compute, launch
from fa4flex.runtime.key_sources import Contiguous
from fa4flex.variant import at_call

HALVES = torch.bfloat16, torch.float16
Qkv = tuple[Tensor, Tensor, Tensor]


def sdpa_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """aten::_scaled_dot_product_flash_attention of [B, H, S, D]."""
    attend = windowed(-1, 0 if is_causal else -1, layout="bhsd")
    _check(attend, (query, key, value), dropout_p, return_debug_mask)
    state = _random_state(query, dropout_p)
    out, lse = _forward(attend, (query, key, value), scale, dropout=_dropout(dropout_p, state[0]))
    return out, lse, None, None, query.shape[2], key.shape[2], *state


def sdpa_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, *rest: Any,
    scale: float | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """aten::_scaled_dot_product_flash_attention_backward; rest: cumulative lengths of q and k, max_q, max_k,
    dropout_p, is_causal, and two of a random state."""
    dropout_p, is_causal = rest[4:6]
    attend = windowed(-1, 0 if is_causal else -1, layout="bhsd")
    _check(attend, (query, key, value), dropout_p)
    dropout = _dropout(dropout_p, rest[6])
    return _backward(attend, (query, key, value), (grad_out, out, logsumexp), scale, dropout)


def forward(
    query: Tensor, key: Tensor, value: Tensor, cum_seq_q: Tensor | None, cum_seq_k: Tensor | None, max_q: int,
    max_k: int, dropout_p: float, is_causal: bool, return_debug_mask: bool, **options: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """aten::_flash_attention_forward of [B, S, H, D], or packed [T, H, D] with cumulative lengths. options:
    scale, window_size_left, window_size_right, seqused_k, alibi_slopes, block_table, num_splits."""
    if options.get("alibi_slopes") is not None:
        raise _unsupported("alibi_slopes", "a score_mod of fa4flex, such as variants.alibi(slopes)")
    attend = _windowed(is_causal, options)
    _check(attend, (query, key, value), dropout_p, return_debug_mask)
    used, table = options.get("seqused_k"), options.get("block_table")
    varlen, paging = described(cum_seq_q, cum_seq_k, max_q, max_k, used, table)
    state = _random_state(query, dropout_p)
    more = {"varlen": varlen, "paging": paging, "dropout": _dropout(dropout_p, state[0])}
    out, lse = _forward(attend, (query, key, value), options.get("scale"), **more)
    return out, lse, *state


def forward_into(out: Tensor, *arguments: Any, **options: Any) -> Tensor:
    """aten::_flash_attention_forward_no_dropout_inplace: `forward` into `out`; returns the lse."""
    result, lse, *_ = forward(*arguments, **options)
    out.copy_(result)
    logsumexp: Tensor = lse
    return logsumexp


def backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, *rest: Any,
    **options: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """aten::_flash_attention_backward; rest as of `sdpa_backward`, options: scale and the window."""
    cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, state, *_ = rest
    attend = _windowed(is_causal, options)
    _check(attend, (query, key, value), dropout_p)
    varlen, _ = described(cum_seq_q, cum_seq_k, max_q, max_k, None, None)
    results, dropout = (grad_out, out, logsumexp), _dropout(dropout_p, state)
    return _backward(attend, (query, key, value), results, options.get("scale"), dropout, varlen)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "_scaled_dot_product_flash_attention": sdpa_forward,
    "_scaled_dot_product_flash_attention_backward": sdpa_backward,
    "_flash_attention_forward": forward,
    "_flash_attention_forward_no_dropout_inplace": forward_into,
    "_flash_attention_backward": backward,
}
"""Functions by names of operators of torch; a version may lack some of these."""


# --- calls --------------------------------------------------------------------------------------------------


def _windowed(is_causal: bool, options: dict[str, Any]) -> Attention:
    left, right = (options.get(f"window_size_{side}") for side in ("left", "right"))
    left, right = (-1 if x is None else x for x in (left, right))
    return windowed(left, 0 if is_causal else right, options.get("num_splits") == 1)


def _check(attend: Attention, qkv: Qkv, dropout_p: float, return_debug_mask: bool = False) -> None:
    """Raise UnsupportedError for what no kernel is for."""
    q, k, v = qkv
    if return_debug_mask:
        raise _unsupported("dropout's mask", "return_debug_mask=False")
    if dropout_p and max(q.shape[-1], v.shape[-1]) > WIDEST_DROPPED:
        raise _unsupported("dropout in wide heads", f"heads of at most {WIDEST_DROPPED}")
    if not launch.by_kernels(attend.variant, q):
        raise _unsupported(f"tensors on {q.device}", "a GPU that kernels are generated for")
    if q.dtype not in HALVES or not q.dtype == k.dtype == v.dtype:
        raise _unsupported(f"dtypes {q.dtype}, {k.dtype}, {v.dtype}", "bfloat16 or float16")
    if not q.shape[-1] == k.shape[-1] == v.shape[-1]:
        raise _unsupported("values of another width than queries", "one width")


def _unsupported(given: str, expected: str) -> UnsupportedError:
    return UnsupportedError(
        f"flash attention by fa4flex with {given}",
        expected,
        "torch.nn.attention.restore_flash_attention_impl() puts torch's own kernels back",
    )


def _forward(attend: Attention, qkv: Qkv, scale: float | None, **described: Any) -> tuple[Tensor, Tensor]:
    """Output in the order of dimensions that torch's operator gives it, and the log-sum-exp."""
    with torch.no_grad(), autocast.off(qkv[0]):
        out, lse = attend(*qkv, scale=scale, return_lse=True, **described)
    return _ordered_like(qkv[0], out), lse


def _backward(
    attend: Attention,
    qkv: Qkv,
    results: tuple[Tensor, Tensor, Tensor],
    scale: float | None,
    dropout: Dropout | None,
    varlen: Varlen | None = None,
) -> tuple[Tensor, ...]:
    """Gradients of q, k, v. results: gradient of the output, the output, the log-sum-exp."""
    (q, k, v), (dout, out, lse) = qkv, results
    variant = at_call(attend.variant, scale=scale, dropout=dropout)
    with torch.no_grad(), autocast.off(q):
        now = launch.calling(variant, None)
        call = launch.call_of(now, q, Contiguous(k, v), varlen, ("lse",))
        made = compute.backward(now.prepared.program, call, ([dout], (out, lse)), [])
        return tuple([_ordered_like(like, x) for like, x in zip(qkv, made[:3], strict=True)])


def _ordered_like(like: Tensor, x: Tensor) -> Tensor:
    """`x` with the strides that torch says its operators' results have."""
    wanted = torch.empty_like(like, device="meta").stride()
    return x if x.stride() == wanted else torch.empty_like(like, dtype=x.dtype).copy_(x)


def _random_state(q: Tensor, dropout_p: float) -> tuple[Tensor, Tensor, Tensor]:
    """State and offset of dropout, whose seed is the state's first number; and no mask of it."""
    state, offset = (torch.empty(shape, dtype=torch.uint64, device=q.device) for shape in ((2,), ()))
    if dropout_p:  # nothing else reads them, and clearing them would be two more kernels
        state.view(torch.int64).random_(-(1 << 63), (1 << 63) - 1)
        offset.zero_()
    return state, offset, q.new_empty(0)


def _dropout(p: float, state: Tensor) -> Dropout | None:
    """The dropout of a call with this random state."""
    return Dropout(p, state.view(torch.int64)[0]) if p else None
