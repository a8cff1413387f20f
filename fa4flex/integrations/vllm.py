"""vLLM: an attention backend for its V1 engine, by the name CUSTOM.

`register()` is this package's entry point for vLLM's plugins: vLLM calls it in each of its processes. Mods of
layers are given with fa4flex.integrations.layers. Importing this module imports vLLM.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)

from fa4flex.errors import UnsupportedError
from fa4flex.integrations.assignments import Assignment, check_all_fit, of_engine
from fa4flex.integrations.layers import LayerAttention, LayerSettings
from fa4flex.integrations.paged_cache import (
    INVARIANT,
    Batch,
    Caches,
    attend,
    check_widths,
    serves_width,
    views,
    write,
)
from fa4flex.primitives.schedule import Schedule


def register() -> None:
    """Make fa4flex vLLM's CUSTOM attention backend, unless there is another: `--attention-backend CUSTOM`."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if not AttentionBackendEnum.CUSTOM.is_overridden():
        register_backend(AttentionBackendEnum.CUSTOM, f"{__name__}.Backend")


class Backend(AttentionBackend):
    """Decoders with caches of 16 or 32 bits: windows, soft caps, ALiBi, sinks, and mods that are assigned."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16"]
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[Impl]:
        return Impl

    @staticmethod
    def get_builder_cls() -> type[MetadataBuilder]:
        return MetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(8)]  # kernels read such pages in place

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """Shape of a cache up to vLLM 0.28; later releases lay caches out themselves."""
        return num_blocks, 2, block_size, num_kv_heads, head_size

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """Blocks outermost, also around the layers."""
        return (1, 0, 2, 3, 4, 5) if include_num_layers_dimension else (0, 1, 2, 3, 4)

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return serves_width(head_size)

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        return False  # launches are chosen from the lengths on the host


@dataclass
class Metadata(AttentionMetadata):
    """One step's batch, and the slot of each new token."""

    batch: Batch
    slot_mapping: Tensor


class MetadataBuilder(AttentionMetadataBuilder[Metadata]):
    """Sequences that decode stand first in a batch: their pages are read in place."""

    _cudagraph_support = AttentionCGSupport.NEVER
    reorder_batch_threshold = 1
    supports_update_block_table = True

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        _check_layers(vllm_config)
        self.invariant = _batch_invariant()
        if self.invariant:
            _check_chunks(vllm_config)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Metadata:
        """common_prefix_len is a hint that is not taken: shared pages are read for each sequence."""
        common = common_attn_metadata
        if common.causal is not True:
            raise UnsupportedError(
                "a batch that is not causal", "causal decoders", "choose another attention backend for it"
            )
        ends = common.num_reqs + 1
        batch = Batch.of_starts(
            common.block_table_tensor[: ends - 1],
            common.seq_lens[: ends - 1],
            common.query_start_loc[:ends],
            common.query_start_loc_cpu[:ends],
            invariant=self.invariant,
        )
        return Metadata(batch, common.slot_mapping)

    def update_block_table(self, metadata: Metadata, blk_table: Tensor, slot_mapping: Tensor) -> Metadata:
        table = blk_table[: len(metadata.batch.lengths)]
        return replace(metadata, batch=metadata.batch.with_table(table), slot_mapping=slot_mapping)


class Impl(AttentionImpl[Metadata]):
    """One layer."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
        **options: Any,
    ) -> None:
        _check_options(attn_type, kv_cache_dtype, options)
        check_widths(head_size)
        _check_heads(num_heads, num_kv_heads or num_heads, alibi_slopes, sinks)
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads, self.kv_cache_dtype = num_kv_heads or num_heads, kv_cache_dtype
        self.shares_cache = kv_sharing_target_layer_name is not None
        self.sinks = sinks
        self._slopes = alibi_slopes
        window = sliding_window if sliding_window and sliding_window > 0 else None
        schedule = INVARIANT if _batch_invariant() else Schedule()
        self._settings = LayerSettings(self.scale, window, logits_soft_cap or None, schedule=schedule)
        self._own = _own_layers(_current_config())
        self._layer: LayerAttention | None = None

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write new keys and values [T, Hkv, D]; tokens past the end of slot_mapping are padding."""
        if not self.shares_cache:
            count = len(slot_mapping)
            write(self._caches(kv_cache), (key[:count], value[:count]), slot_mapping)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Metadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """query [T, Hq, D], whose new keys are in the cache already; `output` is written and returned. Rows
        of padding, and all of them in runs without metadata, which only measure memory, become zeros."""
        if output_scale is not None or output_block_scale is not None:
            raise UnsupportedError(
                "a quantised output", "an output of the query's dtype", "disable its fusion"
            )
        rows = output.view(len(output), self.num_heads, output.shape[1:].numel() // self.num_heads)
        if attn_metadata is None:
            rows.zero_()
            return output
        attn, q = self._attention(layer, query.device), query.view(len(query), self.num_heads, self.head_size)
        rows.copy_(attend(attn, q, self._caches(kv_cache), attn_metadata.batch, sinks=self.sinks))
        return output

    def _attention(self, layer: Any, device: torch.device) -> Any:
        if self._layer is None:
            slopes = self._slopes
            table = None if slopes is None else torch.tensor(slopes, dtype=torch.float32, device=device)
            self._layer = LayerAttention(replace(self._settings, slopes=table), self._own)
        return self._layer.named(getattr(layer, "layer_name", ""))

    def _caches(self, kv_cache: Tensor) -> Caches:
        """Keys and values of a cache of any layout, as views. Values may be narrower or wider than keys."""
        return views(kv_cache, self.num_kv_heads, self.head_size)


_read: tuple[Any, list[Assignment]] = (None, [])
"""The last engine's configuration, and what it assigns to layers: all of them share its functions."""


def _current_config() -> Any:
    """Configuration of the engine whose layers are being made; None outside of engines."""
    try:
        from vllm.config import get_current_vllm_config_or_none
    except ImportError:  # a release without it
        return None
    return get_current_vllm_config_or_none()


def _own_layers(config: Any) -> list[Assignment]:
    """Mods of layers that --additional-config assigns: {"fa4flex": {"layers": ...}}."""
    global _read
    if config is None:
        return []
    if _read[0] is not config:
        _read = config, of_engine(getattr(config, "additional_config", None), "additional_config")
    return _read[1]


def _check_layers(config: Any) -> None:
    """Raise for mods that --additional-config assigns to layers which the model does not have."""
    own = _own_layers(config)
    if own and config.parallel_config.pipeline_parallel_size == 1:
        check_all_fit(own, config.compilation_config.static_forward_context)


def _batch_invariant() -> bool:
    """True if results of a sequence must not depend on what else is in a batch: what vLLM reads, too."""
    return bool(int(os.environ.get("VLLM_BATCH_INVARIANT", "0")))


def _check_chunks(config: Any) -> None:
    """Raise where results must not depend on the batch, and other requests decide where a prompt is cut, or
    what of it is in the cache."""
    settings = {
        "enable_chunked_prefill": getattr(config, "scheduler_config", None),
        "enable_prefix_caching": getattr(config, "cache_config", None),
    }
    asked = [name for name, part in settings.items() if getattr(part, name, False)]
    if asked:
        fix = " ".join(f"--no-{name.replace('_', '-')}" for name in asked)
        raise UnsupportedError(
            f"VLLM_BATCH_INVARIANT with {' and '.join(asked)}: where a prompt is cut then depends on other"
            " requests, and bits of results on where it is cut",
            "prompts in one piece",
            f"serve with {fix}, or with another attention backend",
        )


def _check_heads(heads: int, kv_heads: int, slopes: list[float] | None, sinks: Tensor | None) -> None:
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


def _check_options(attn_type: str, kv_cache_dtype: str, options: dict[str, Any]) -> None:
    if attn_type != AttentionType.DECODER:
        raise UnsupportedError(f"{attn_type} attention", "decoders", "choose another backend for this model")
    if kv_cache_dtype not in Backend.supported_kv_cache_dtypes:
        raise UnsupportedError(
            f"a cache of {kv_cache_dtype}", "a cache of the query's dtype", 'set kv_cache_dtype="auto"'
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
