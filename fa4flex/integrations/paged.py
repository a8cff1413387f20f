"""Continuous batching of Hugging Face transformers: the new tokens of all requests, packed in one sequence.

The cache is asked once per layer: here, or, from transformers 5.24 on, by the model. Where requests are
prefilled, or a layer has a window, it stores the new keys and values and gives back those of all tokens so
far, gathered and packed alike. Where all requests decode, it gives a block table and its pages: the new token
is written and pages are read here. Every request is causal from its last token, within the layer's window if
it has one; there is no mask.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import masking_utils

from fa4flex.api import Attention
from fa4flex.appending import append
from fa4flex.errors import UnsupportedError
from fa4flex.exact import exactly
from fa4flex.integrations.latent_keys import LatentKeys
from fa4flex.integrations.layers import LayerSettings
from fa4flex.integrations.model_mask import ModelMask
from fa4flex.integrations.paged_cache import Batch, attend
from fa4flex.primitives.paging import Paging
from fa4flex.primitives.varlen import Varlen


@dataclass(frozen=True)
class PagedLayer:
    """Parameters of a layer, besides its mask."""

    index: int
    scale: float | None
    softcap: float | None
    sinks: Tensor | None


def in_batch(cache: Any, options: dict[str, Any]) -> bool:
    """True where a layer is called for a batch of requests. The model's calls have indices of the cache then,
    and before transformers 5.24 the cache itself."""
    return cache is not None or "read_index" in options


def paged_attention(
    cache: Any,
    layer: PagedLayer,
    qkv: tuple[Tensor, Tensor, Tensor],
    mask: ModelMask | Tensor | None,
    options: dict[str, Any],
) -> Tensor:
    """One layer of a batch of requests.

    query [1, Hq, T, D] packed; key and value [1, Hkv, T, D] those of the new tokens, or what the cache gave
    the model for them, where `cache` is None. `options` are the call's other arguments, which the cache reads
    and changes. Returns out [1, T, Hq, Dv].
    """
    _check_mask(mask)
    query, key, value = qkv
    if cache is not None:
        _check_protocol(type(cache).update)
        key, value = cache.update(key_states=key, value_states=value, layer_idx=layer.index, kwargs=options)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    numbers = layer.softcap, options.get("sliding_window"), layer.scale
    attn = _composed(*numbers, exactly(*numbers))
    if options.get("block_table") is not None:
        return _in_pages(attn, (q, k, v), layer.sinks, options).unsqueeze(0)
    cu_q, cu_k = options["cu_seq_lens_q"], options["cu_seq_lens_k"]
    on_cpu = cu_q.device.type == "cpu"  # transformers pads for graphs alone
    lengths = Varlen(cu_q, cu_k) if on_cpu else _padded((q, k), cu_q, cu_k)
    return attn(q, k, v, varlen=lengths, sinks=layer.sinks).unsqueeze(0)


def latent_pages(
    layer: PagedLayer,
    query: Tensor,
    keys: LatentKeys,
    mask: ModelMask | Tensor | None,
    options: dict[str, Any],
) -> Tensor:
    """Output [1, T, Hq, latent] of absorbed queries [1, Hq, T, width] over pages of latent rows."""
    _check_mask(mask)
    numbers = layer.softcap, options.get("sliding_window"), layer.scale
    attn, batch = _composed(*numbers, exactly(*numbers)), keys.batch
    assert batch is not None
    return attend(attn, query[0].transpose(0, 1), keys.latent, batch, sinks=layer.sinks).unsqueeze(0)


@functools.lru_cache(maxsize=64)
def _composed(softcap: float | None, window: int | None, scale: float | None, exact: str) -> Attention:
    """A layer's attention. It follows from these numbers alone, and is kept by them; `exact` tells those
    apart that compare equal."""
    return LayerSettings(scale, window, softcap).attention({})


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
    lengths = options["cu_seq_lens_k"].diff()
    count = lengths.clamp(max=1)
    k, v = (x[: len(table)].unsqueeze(2).to(caches[0].dtype) for x in tokens)
    append(k, v, *caches, Paging(table, lengths - count), varlen=Varlen(seqused_q=count))
    return attend(attn, query, caches, Batch.decoding(table, lengths), sinks=sinks)


@functools.cache
def _check_protocol(update: Callable[..., Any]) -> None:
    """Raise where a cache's update takes other arguments, as before transformers 5.19."""
    if "kwargs" not in inspect.signature(update).parameters:
        raise UnsupportedError(
            f"continuous batching of transformers {transformers.__version__}",
            "transformers 5.19 or later, where the cache's update takes kwargs=",
            "install a later version, or call generate()",
        )


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


def _codes(code: CodeType) -> Iterator[CodeType]:
    """The code of a function and of those defined in it."""
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _codes(inner)


_CAUSAL = (
    "add_offsets_to_mask_function",
    "and_masks",
    "causal_mask_function",
    "packed_sequence_compatibility_function",
    "packed_sequence_mask_function",
    "remap_positions_for_packed_sequence",
    "sliding_window_overlay",
)
"""Names of what transformers composes causal masks of packed sequences from, with a window or without. No
version has all of them."""

_KNOWN = {
    code
    for name in _CAUSAL
    if hasattr(masking_utils, name)
    for code in _codes(getattr(masking_utils, name).__code__)
}
