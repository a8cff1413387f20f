"""What vLLM's configuration and its layers ask for: read, and refused where this package cannot do it."""

from __future__ import annotations

import os
from typing import Any

from torch import Tensor
from vllm.v1.attention.backend import AttentionType

from fa4flex.errors import UnsupportedError
from fa4flex.integrations.assignments import Assignment, check_all_fit, of_engine

EIGHT_BIT = ("fp8", "fp8_e4m3")
KV_CACHE_DTYPES = ["auto", "float16", "bfloat16", *EIGHT_BIT]
ENCODERS = (AttentionType.ENCODER_ONLY,)

_read: tuple[Any, list[Assignment]] = (None, [])
"""The last engine's configuration, and what it assigns to layers: all of them share its functions."""


def current_config() -> Any:
    """Configuration of the engine whose layers are being made; None outside of engines."""
    try:
        from vllm.config import get_current_vllm_config_or_none
    except ImportError:  # a release without it
        return None
    return get_current_vllm_config_or_none()


def own_layers(config: Any) -> list[Assignment]:
    """Mods of layers that --additional-config assigns: {"fa4flex": {"layers": ...}}."""
    global _read
    if config is None:
        return []
    if _read[0] is not config:
        _read = config, of_engine(getattr(config, "additional_config", None), "additional_config")
    return _read[1]


def check_layers(config: Any) -> None:
    """Raise for mods that --additional-config assigns to layers which the model does not have."""
    own = own_layers(config)
    if own and config.parallel_config.pipeline_parallel_size == 1:
        check_all_fit(own, config.compilation_config.static_forward_context)


def batch_invariant() -> bool:
    """True if results of a sequence must not depend on what else is in a batch: what vLLM reads, too."""
    return bool(int(os.environ.get("VLLM_BATCH_INVARIANT", "0")))


def check_chunks(config: Any) -> None:
    """Raise where results must not depend on the batch, and other requests decide where a prompt is cut, what
    of it is in the cache, or how many drafted tokens are verified."""
    settings = {
        "--no-enable-chunked-prefill": ("scheduler_config", "enable_chunked_prefill"),
        "--no-enable-prefix-caching": ("cache_config", "enable_prefix_caching"),
        "no --speculative-config": ("", "speculative_config"),
    }
    asked = {
        option: name
        for option, (part, name) in settings.items()
        if getattr(getattr(config, part, None) if part else config, name, None)
    }
    if asked:
        raise UnsupportedError(
            f"VLLM_BATCH_INVARIANT with {' and '.join(asked.values())}: how many tokens of a sequence are"
            " computed together then depends on other requests, and bits of results on that",
            "prompts in one piece, and one token at a time",
            f"serve with {' '.join(asked)}, or with another attention backend",
        )


def check_heads(heads: int, kv_heads: int, slopes: list[float] | None, sinks: Tensor | None) -> None:
    if heads % kv_heads:
        raise UnsupportedError(
            f"{heads} query heads over {kv_heads} KV heads",
            "whole groups of query heads",
            "choose a tensor parallel size that divides both",
        )
    for name, value in (("ALiBi slopes", slopes), ("sinks", sinks)):
        if value is not None and (len(value) != heads or getattr(value, "ndim", 1) != 1):
            shape = list(value.shape) if isinstance(value, Tensor) else [len(value)]
            raise UnsupportedError(
                f"{name} of shape {shape} for {heads} heads",
                f"[{heads}], one of each query head",
                "pass those of the heads of this rank",
            )


def check_options(attn_type: str, kv_cache_dtype: str, head_size: int, options: dict[str, Any]) -> None:
    """Raise for a layer that this package cannot compute."""
    if attn_type != AttentionType.DECODER and attn_type not in ENCODERS:
        raise UnsupportedError(
            f"{attn_type} attention", "decoders, and encoders alone", "choose another backend for this model"
        )
    if kv_cache_dtype not in KV_CACHE_DTYPES:
        raise UnsupportedError(
            f"a cache of {kv_cache_dtype}",
            f"a cache of the query's dtype, or of {EIGHT_BIT[1]}",
            'set kv_cache_dtype="auto"',
        )
    if kv_cache_dtype in EIGHT_BIT and head_size % 16:
        raise UnsupportedError(
            f"heads of {head_size} in a cache of {kv_cache_dtype}",
            "widths that are multiples of 16, so that values begin where a kernel can read them",
            'set kv_cache_dtype="auto"',
        )
    unknown = {name for name, value in options.items() if value is not None and value is not False}
    if options.get("chunk_lookback") == -1:  # the layer has no chunks
        unknown.discard("chunk_lookback")
    if unknown:
        raise UnsupportedError(
            f"a layer that asks for {', '.join(sorted(unknown))}",
            "scale, windows, soft caps, ALiBi slopes and sinks",
            "choose another backend for this model",
        )


def check_ranks(layer: Any, slopes: Any) -> None:
    """Raise for what a layer cannot do whose keys are spread over ranks, which do not know where they
    stood."""
    asked = {
        "sliding windows": layer.settings.window is not None,
        "ALiBi": slopes is not None,
        "sinks": layer.sinks is not None,
        "mods of layers": bool(layer.own),
        f"a cache of {layer.kv_cache_dtype}": layer.kv_cache_dtype in EIGHT_BIT,
        f"{layer.num_kv_heads} KV heads on each rank": layer.num_kv_heads > 1,
        "VLLM_BATCH_INVARIANT": batch_invariant(),
    }
    if any(asked.values()):
        raise UnsupportedError(
            f"decode_context_parallel_size with {', '.join(x for x, here in asked.items() if here)}",
            "causal layers of one KV head on each rank, without these",
            "set decode_context_parallel_size to 1, or choose another attention backend",
        )
