"""Continuous batching of Hugging Face transformers: the new tokens of all requests, packed in one sequence.

The cache is asked by the attention function, once per layer. Where requests are prefilled, or a layer has a
window, it stores the new keys and values and gives back those of all tokens so far, gathered and packed
alike. Where all requests decode, it gives a block table and its pages: the new token is written and pages are
read here. Every request is causal from its last token, within the layer's window if it has one; there is no
mask.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import (
    packed_sequence_compatibility_function,
    sliding_window_causal_mask_function,
)

from fa4flex import variants
from fa4flex.api import Attention, compile
from fa4flex.errors import UnsupportedError
from fa4flex.integrations.model_mask import ModelMask
from fa4flex.integrations.paged_cache import Batch, attend, write
from fa4flex.primitives.varlen import Varlen


@dataclass(frozen=True)
class PagedLayer:
    """Parameters of a layer, besides its mask."""

    index: int
    scale: float | None
    softcap: float | None
    sinks: Tensor | None


def paged_attention(
    cache: Any,
    layer: PagedLayer,
    qkv: tuple[Tensor, Tensor, Tensor],
    mask: ModelMask | Tensor | None,
    options: dict[str, Any],
) -> Tensor:
    """One layer of a batch of requests.

    query [1, Hq, T, D] packed; key and value [1, Hkv, T, D] those of the new tokens. `options` are the call's
    other arguments, which the cache reads and changes. Returns out [1, T, Hq, Dv].
    """
    _check_mask(mask)
    query, *new = qkv
    key, value = cache.update(key_states=new[0], value_states=new[1], layer_idx=layer.index, kwargs=options)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    attn = _composed(layer.softcap, options.get("sliding_window"), layer.scale)
    if options.get("block_table") is not None:
        return _in_pages(attn, (q, k, v), layer.sinks, options).unsqueeze(0)
    cu_q, cu_k = options["cu_seq_lens_q"], options["cu_seq_lens_k"]
    on_cpu = cu_q.device.type == "cpu"  # transformers pads for graphs alone
    lengths = Varlen(cu_q, cu_k) if on_cpu else _padded((q, k), cu_q, cu_k)
    return attn(q, k, v, varlen=lengths, sinks=layer.sinks).unsqueeze(0)


@functools.lru_cache(maxsize=64)
def _composed(softcap: float | None, window: int | None, scale: float | None) -> Attention:
    """A layer's attention. It follows from these numbers alone, and is kept by them."""
    score = None if softcap is None else variants.softcap(softcap)
    return compile(score, variants.causal if window is None else variants.sliding_window(window), scale=scale)


def _padded(qk: tuple[Tensor, Tensor], cu_q: Tensor, cu_k: Tensor) -> Varlen:
    """Lengths of requests that end before the packed tensors may: what follows them becomes a sequence of
    which no query takes part."""
    q_ends, k_ends = (torch.cat([cu, torch.full_like(cu[:1], len(x))]) for cu, x in zip((cu_q, cu_k), qk))
    return Varlen(q_ends, k_ends, seqused_q=torch.nn.functional.pad(cu_q.diff(), (0, 1)))


def _in_pages(
    attn: Attention, new: tuple[Tensor, Tensor, Tensor], sinks: Tensor | None, options: dict[str, Any]
) -> Tensor:
    """One decoded token of each request: written to the cache, then attention over its pages.

    new  query [T, Hq, D], key and value [T, Hkv, D]; rows past the N requests, and of requests of length 0,
         are padding
    """
    query, *tokens = new
    caches, table = (options["k_cache"], options["v_cache"]), options["block_table"]
    count, page_size = len(table), caches[0].shape[1]
    lengths = options["cu_seq_lens_k"].diff()
    last = lengths - 1
    page = table.gather(1, (last.clamp(min=0) // page_size).long().unsqueeze(1)).squeeze(1)
    slots = torch.where(last < 0, -1, page * page_size + last % page_size)
    write(caches, (tokens[0][:count], tokens[1][:count]), slots)
    return attend(attn, query, caches, Batch.decoding(table, lengths), sinks=sinks)


def _check_mask(mask: ModelMask | Tensor | None) -> None:
    """Raise where a model's mask is more than causal with a window: it is not kept for each request."""
    if mask is None:
        return
    unknown = isinstance(mask, Tensor) or any(
        part.__code__ not in _KNOWN for part in _parts(mask.source["mask_function"])
    )
    if unknown:
        raise UnsupportedError(
            "continuous batching of a model with a mask of its own",
            "causal attention, with or without a sliding window",
            "call generate(), which keeps the model's mask",
        )


def _parts(function: Any) -> Iterator[Any]:
    """A mask function and those that it calls, as far as transformers composes them: by closures."""
    yield function
    for cell in function.__closure__ or ():
        held = cell.cell_contents
        for inner in held if isinstance(held, tuple) else (held,):
            if hasattr(inner, "__code__"):
                yield from _parts(inner)


_KNOWN = {
    part.__code__
    for part in _parts(
        packed_sequence_compatibility_function(sliding_window_causal_mask_function(1), None, None)
    )
}
"""Parts of the causal masks of packed sequences, with a window or without."""
