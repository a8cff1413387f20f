"""Probabilities of attention after it: those of chosen queries, and their sums per key."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from fa4flex.calls import in_pairs
from fa4flex.errors import InputError, UnsupportedError
from fa4flex.primitives.base import kind_of
from fa4flex.primitives.varlen import Varlen
from fa4flex.runtime import second_pass
from fa4flex.runtime.launch import Caller
from fa4flex.variant import Variant, compose

Reduce = Literal["kv_heads", "heads"] | None
"""Heads over which probabilities are added up."""
Rows = Tensor | slice | None
"""Queries whose probabilities are wanted."""

MOST = 1 << 27
"""Probabilities of all queries at most, 512 MiB of float32: who wants more names the rows."""


def key_mass(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    *,
    varlen: Varlen | None = None,
    reduce: Reduce = None,
    **composition: Any,
) -> Tensor:
    """Sum of attention's probabilities over the queries, per key: how much each key was attended to.

        mass[b, h, k] = sum over q of exp(score[b, h, q, k] - lse[b, h, q])

    q, k       [B, Hq, Sq, D] and [B, Hkv, Skv, D], or in another layout, or packed with `varlen`, as in
               `attention`
    lse        [B, Hq, Sq], or packed [Hq, Tq]: as attention returns it for these queries and keys. Sinks are
               inside; a query whose lse is -inf adds nothing
    reduce     None: per query head; "kv_heads": added up over the query heads that share a head of keys;
               "heads": over all
    composition   score_mod, mask, blocks, scale, layout, ... of the attention, as `compile` takes them

    Returns [B, Hq, Skv], [B, Hkv, Skv] or [B, Skv]; packed [Hq, Tk], [Hkv, Tk] or [Tk]; in float32, float64
    for float64. Keys that no query sees have 0. Gradients reach q, k, lse and captured tensors, in O(S)
    memory, one block of queries after another. Raises InputError for shapes that do not fit, and
    UnsupportedError for what a probability is not of.

    The heavy hitters of H2O (Zhang et al. 2023) and the votes of SnapKV (Li et al. 2024) are its largest.
    """
    variant = compose(**refuse_sources(composition))
    return key_mass_of(variant, None, (q, k, lse), varlen, reduce)


def probabilities(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    rows: Rows = None,
    *,
    varlen: Varlen | None = None,
    reduce: Reduce = None,
    **composition: Any,
) -> Tensor:
    """Probabilities of chosen queries: exp(score - lse), exactly 0 of pairs that the mask hides.

    q, k, lse, reduce, composition   as in `key_mass`
    rows   which queries: integers [R], of which negative ones count from the end, or a slice; among packed
           tokens, from the first of all. None: all, of at most 2**27 probabilities

    Returns [B, Hq, R, Skv], [B, Hkv, R, Skv] or [B, R, Skv]; packed [Hq, R, Tk], [Hkv, R, Tk] or [R, Tk],
    where keys of other sequences have 0; in float32, float64 for float64. Gradients reach q, k, lse and
    captured tensors: with the lse's, they are those of softmax. Raises as `key_mass` does, InputError for
    rows that do not exist, and UnsupportedError for more than that many of all.
    """
    variant = compose(**refuse_sources(composition))
    return probabilities_of(variant, None, (q, k, lse), varlen, (rows, reduce))


def refuse_sources(options: dict[str, Any]) -> dict[str, Any]:
    """The options. Raises UnsupportedError for keys that are not contiguous."""
    for name in ("paging", "kv_scales"):
        if options.get(name) is not None:
            raise UnsupportedError(
                f"{name}= with probabilities",
                "contiguous keys of q's dtype, padded or packed",
                "gather the pages, k_pool[page_table], and dequantise them; pass their lengths as varlen=",
            )
    return {name: x for name, x in options.items() if name not in ("paging", "kv_scales")}


def key_mass_of(
    variant: Variant,
    caller: Caller | None,
    tensors: second_pass.Tensors,
    varlen: Varlen | None,
    reduce: Reduce,
) -> Tensor:
    """`key_mass` of a variant."""
    _check_reduce(reduce)
    made = _run(variant, caller, tensors, varlen, None)
    return _reduced(made, tensors[1], variant, reduce, made.ndim - 2)


def probabilities_of(
    variant: Variant,
    caller: Caller | None,
    tensors: second_pass.Tensors,
    varlen: Varlen | None,
    chosen: tuple[Rows, Reduce],
) -> Tensor:
    """`probabilities` of a variant."""
    rows, reduce = chosen
    _check_reduce(reduce)
    places = _places(rows, tensors, variant)
    made = _run(variant, caller, tensors, varlen, places)
    return _reduced(made, tensors[1], variant, reduce, made.ndim - 3)


def _run(
    variant: Variant,
    caller: Caller | None,
    tensors: second_pass.Tensors,
    varlen: Varlen | None,
    places: Tensor | None,
) -> Tensor:
    """The second pass, eager or traced."""
    if variant.blocks is not None and isinstance(tensors[0], Tensor):
        variant = in_pairs(variant, tensors[0], varlen, None)
    bare = second_pass.checked(variant, tensors, varlen)
    if torch.compiler.is_dynamo_compiling():
        from fa4flex.runtime import graphs

        return graphs.second_pass(*second_pass.heads_first(bare, tensors), varlen, places)
    return second_pass.eager(bare, caller, tensors, varlen, places)


def _reduced(made: Tensor, k: Tensor, variant: Variant, reduce: Reduce, dim: int) -> Tensor:
    """The result added up over heads, its dimension `dim`."""
    if reduce is None:
        return made
    if reduce == "heads":
        return made.sum(dim)
    kv_heads = k.shape[2 if variant.layout == "bshd" and k.ndim == 4 else 1]
    return made.unflatten(dim, (kv_heads, made.shape[dim] // kv_heads)).sum(dim + 1)


def _check_reduce(reduce: Any) -> None:
    if reduce not in (None, "kv_heads", "heads"):
        raise InputError(
            f"reduce={reduce!r}",
            'None (per query head), "kv_heads" or "heads"',
            'pass reduce="heads" for sums over all heads',
        )


def _places(rows: Any, tensors: second_pass.Tensors, variant: Variant) -> Tensor:
    """Numbers of the chosen rows."""
    q, k, _ = tensors
    second_pass.check_types(tensors)
    at = 0 if q.ndim == 3 else 1 if variant.layout == "bshd" else 2
    if isinstance(rows, Tensor):
        whole = not (rows.is_floating_point() or rows.is_complex() or rows.dtype == torch.bool)
        if rows.ndim != 1 or not whole or rows.device != q.device:
            raise InputError(
                f"rows {rows.dtype}{list(rows.shape)} on {rows.device}",
                f"integers [R] on {q.device}, or a slice",
                "pass mask.nonzero()[:, 0] of a bool mask, and reshape(-1) of others",
            )
        return rows
    if rows is None:
        _check_size(q, k, at)
        rows = slice(None)
    if not isinstance(rows, slice):
        raise InputError(
            f"rows is a {kind_of(rows)}",
            "a tensor of integers, a slice, or None for all rows",
            f"pass torch.tensor(rows, device={str(q.device)!r}), or slice(-64, None) for the last 64",
        )
    return torch.arange(*rows.indices(q.shape[at]), device=q.device)


def _check_size(q: Tensor, k: Tensor, at: int) -> None:
    """Raise UnsupportedError for the probabilities of all rows, if they are more than MOST."""
    channels = q.shape[-1]
    count = q.numel() // max(channels, 1) * k.shape[at]
    if count > MOST:
        raise UnsupportedError(
            f"all probabilities of {list(q.shape)} queries and {list(k.shape)} keys: {count} numbers",
            f"at most {MOST}",
            "name rows=, e.g. slice(-64, None); or add them up with key_mass, which keeps none",
        )
