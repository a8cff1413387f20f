"""torch's varlen_attn: packed sequences in the order of arguments that torch gives them."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fa4flex.api import Attention, compile
from fa4flex.errors import InputError
from fa4flex.primitives.heads import refuse_apart
from fa4flex.primitives.paging import Paging
from fa4flex.primitives.schedule import Schedule
from fa4flex.primitives.varlen import Varlen
from fa4flex.variants import causal

__all__ = ["varlen_attn"]


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    **options: Any,
) -> Any:
    """Drop-in for torch.nn.attention.varlen.varlen_attn of every version that has it, on a CPU as well.

    query [Tq, Hq, D], key [Tk, Hkv, D], value [Tk, Hkv, Dv], cu_seq_q and cu_seq_k [N + 1]; max_q and max_k
    bound the lengths. is_causal, of older versions, is a window of (-1, 0).

    options, all by keyword:
    return_aux   what has a true `lse` asks for the log-sum-exp as well
    scale        multiplies q.k; default 1 / sqrt(D)
    window_size  (left, right): keys before and after the query's own position, which is aligned bottom-right;
                 negative numbers for all of them
    enable_gqa   True permits fewer KV heads than of queries
    seqused_k    [N]: the keys of each sequence that take part
    block_table  [N, max_pages]: key and value are pools [pages, page_size, Hkv, D] then; needs seqused_k
    num_splits   1: a sequence's result is the same whatever else is in the batch. Others let kernels choose

    Returns out [Tq, Hq, Dv]; with `return_aux` also lse [Hq, Tq], as torch's function does. A query without
    keys has out 0 and lse -inf. Gradients reach query, key and value, with seqused_k, too.
    Raises InputError, a ValueError, for what does not fit.
    """
    given = _options(options)
    window = tuple(given["window_size"])
    if len(window) != 2:
        raise InputError(f"window_size={window}", "(left, right)", "e.g. (-1, 0) for causal attention")
    _check_heads(query, key, given)
    refuse_apart(key.shape[-2], value.shape[-2], "varlen_attn")
    table, used = given["block_table"], given["seqused_k"]
    if table is not None and used is None:
        raise InputError("block_table without seqused_k", "both", "pass the number of keys of each sequence")
    if table is None and cu_seq_k is None:
        raise InputError("cu_seq_k=None without block_table", "cu_seq_k [N + 1]", "pass cu_seq_q for it")
    varlen, paging = described(cu_seq_q, cu_seq_k, max_q, max_k, used, table)
    with_lse = given["return_aux"] is not None and bool(given["return_aux"].lse)
    left, right = (-1, 0) if is_causal and window == (-1, -1) else window
    attend = windowed(left, 0 if is_causal else right, given["num_splits"] == 1)
    return attend(query, key, value, varlen=varlen, paging=paging, scale=given["scale"], return_lse=with_lse)


_DEFAULTS: dict[str, Any] = {
    "return_aux": None, "scale": None, "window_size": (-1, -1), "enable_gqa": False, "seqused_k": None,
    "block_table": None, "num_splits": None,
}  # fmt: skip


def _options(options: dict[str, Any]) -> dict[str, Any]:
    unknown = [name for name in options if name not in _DEFAULTS]
    if unknown:
        raise TypeError(f"varlen_attn() got an unexpected keyword argument {unknown[0]!r}")
    return _DEFAULTS | options


def _check_heads(query: Tensor, key: Tensor, given: dict[str, Any]) -> None:
    heads, kv_heads = query.shape[1], key.shape[-2]
    if heads != kv_heads and not given["enable_gqa"]:
        raise InputError(
            f"Expect query and key/value to have the same number of heads but got Hq={heads} and "
            f"Hkv={kv_heads}",
            "one number of heads",
            "try setting enable_gqa=True for GQA",
        )


def described(
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    max_q: int,
    max_k: int,
    used: Tensor | None,
    table: Tensor | None,
) -> tuple[Varlen | None, Paging | None]:
    """Lengths and pages of a call. Without cumulative lengths the batch is a padded one."""
    most_q, most_k = max(max_q, 1), max(max_k, 1)  # batches of empty sequences have 0
    paging = None if table is None or used is None else Paging(table, used)
    if cu_q is None:
        return (None if paging is not None or used is None else Varlen(seqused_k=used)), paging
    if paging is not None:
        return Varlen(cu_q, max_seqlen_q=most_q), paging
    return Varlen(cu_q, cu_k, seqused_k=used, max_seqlen_q=most_q, max_seqlen_k=most_k), None


MOST_KEYS = 2**30
"""Keys of a part where one part has all keys of a sequence."""


def windowed(left: int, right: int, whole: bool = False, layout: Any = "bshd") -> Attention:
    """Attention in a window as FlashAttention has it: keys from `left` before to `right` after a query's
    position, which is aligned bottom-right; negative for all on that side. `whole`: keys are not split."""
    make = _made if torch.compiler.is_compiling() else _kept
    return make(max(left, -1), max(right, -1), whole, layout)


def _made(left: int, right: int, whole: bool, layout: Any) -> Attention:
    mask = None if left < 0 and right < 0 else _window(left, right)
    return compile(mask=mask, layout=layout, schedule=Schedule(split=MOST_KEYS) if whole else Schedule())


_kept = lru_cache(maxsize=256)(_made)


def _window(left: int, right: int) -> Any:
    if left < 0 and right == 0:
        return causal
    if left < 0:

        def until(b: Any, h: Any, q_idx: Any, kv_idx: Any, q_len: Any, kv_len: Any) -> Any:
            return kv_idx <= q_idx + (kv_len - q_len) + right

        return until
    if right < 0:

        def since(b: Any, h: Any, q_idx: Any, kv_idx: Any, q_len: Any, kv_len: Any) -> Any:
            return kv_idx >= q_idx + (kv_len - q_len) - left

        return since

    def within(b: Any, h: Any, q_idx: Any, kv_idx: Any, q_len: Any, kv_len: Any) -> Any:
        position = q_idx + (kv_len - q_len)
        return (kv_idx >= position - left) & (kv_idx <= position + right)

    return within
