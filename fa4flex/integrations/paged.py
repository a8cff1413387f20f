"""Continuous batching of Hugging Face transformers: packed queries against keys gathered from pages.

transformers packs the new tokens of all requests into one sequence, and its cache, asked by the attention
function, stores their keys and values and gives back those of all tokens so far, packed alike. Every request
is causal from its last token, within the layer's window if it has one; there is no mask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers.masking_utils import (
    packed_sequence_compatibility_function,
    sliding_window_causal_mask_function,
)

from fa4flex.api import attention
from fa4flex.errors import UnsupportedError
from fa4flex.integrations.model_mask import ModelMask
from fa4flex.primitives.varlen import Varlen


@dataclass(frozen=True)
class PagedLayer:
    """What a layer asks for, besides its mask."""

    index: int
    scale: float | None
    score_mod: Callable[..., Any] | None
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
    if options.get("block_table") is not None:
        raise UnsupportedError(
            "continuous batching with block tables",
            "keys and values that the cache gathers",
            "set max_blocks_per_request=0 in the ContinuousBatchingConfig",
        )
    query, *new = qkv
    key, value = cache.update(key_states=new[0], value_states=new[1], layer_idx=layer.index, kwargs=options)
    packed = (x[0].transpose(0, 1) for x in (query, key, value))
    out = attention(
        *packed,
        varlen=Varlen(options["cu_seq_lens_q"], options["cu_seq_lens_k"]),
        score_mod=layer.score_mod,
        mask=_from_the_end(options.get("sliding_window")),
        scale=layer.scale,
        sinks=layer.sinks,
    )
    return out.unsqueeze(0)


def _from_the_end(window: int | None) -> Callable[..., Any]:
    """Causal with the last query at the last key, within `window` keys if there is one."""

    def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any, q_len: Any, kv_len: Any) -> Any:
        return kv_idx - kv_len <= q_idx - q_len

    def sliding(b: Any, h: Any, q_idx: Any, kv_idx: Any, q_len: Any, kv_len: Any) -> Any:
        distance = (q_idx - q_len) - (kv_idx - kv_len)
        return (distance >= 0) & (distance < window)

    return causal if window is None else sliding


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
"""What causal masks, with a window or without, of packed sequences are made of."""
