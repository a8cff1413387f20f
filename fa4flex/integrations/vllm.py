"""vLLM: an attention backend for its V1 engine, by the name CUSTOM.

`register()` is this package's entry point for vLLM's plugins: vLLM calls it in each of its processes. Mods of
layers are given with fa4flex.integrations.layers. Importing this module imports vLLM.
"""

from __future__ import annotations

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
from fa4flex.integrations.layers import LayerAttention, LayerSettings
from fa4flex.integrations.paged_cache import (
    INVARIANT,
    Batch,
    Caches,
    attend,
    check_widths,
    decodes_in_place,
    serves_width,
    views,
    write,
)
from fa4flex.integrations.vllm_context import OverRanks
from fa4flex.integrations.vllm_settings import (
    EIGHT_BIT,
    ENCODERS,
    KV_CACHE_DTYPES,
    batch_invariant,
    check_chunks,
    check_heads,
    check_layers,
    check_options,
    check_ranks,
    current_config,
    own_layers,
)
from fa4flex.primitives.kv_scales import E4M3, KVScales
from fa4flex.primitives.schedule import Schedule
from fa4flex.primitives.varlen import Varlen


def register() -> None:
    """Make fa4flex vLLM's CUSTOM attention backend, unless there is another: `--attention-backend CUSTOM`."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if not AttentionBackendEnum.CUSTOM.is_overridden():
        register_backend(AttentionBackendEnum.CUSTOM, f"{__name__}.Backend")


class Backend(AttentionBackend):
    """Decoders and encoders: windows, soft caps, ALiBi, sinks, and mods that are assigned."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = KV_CACHE_DTYPES
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
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type == AttentionType.DECODER or attn_type in ENCODERS

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        return False  # launches are chosen from the lengths on the host


@dataclass
class Metadata(AttentionMetadata):
    """One step's batch, the slot of each new token, where each sequence starts in the queries [N + 1], and
    whether queries see no later keys."""

    batch: Batch
    slot_mapping: Tensor
    starts: Tensor
    causal: bool = True


class MetadataBuilder(AttentionMetadataBuilder[Metadata]):
    """Sequences that decode stand first in a batch: their pages are read in place.

    Graphs are captured of steps in which all sequences decode. Launches then follow from the number of
    requests and the width of the table alone; tables, lengths and slots are views of vLLM's own buffers,
    whose addresses stay, and kernels read their contents at each replay.
    """

    _cudagraph_support = AttentionCGSupport.NEVER
    reorder_batch_threshold = 1
    supports_update_block_table = True

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        check_layers(vllm_config)
        self.invariant = batch_invariant()
        if self.invariant:
            check_chunks(vllm_config)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """Of steps in which all sequences decode, where a kernel reads their pages in place. Encoders have no
        such steps."""
        if type(kv_cache_spec).__name__ == "EncoderOnlyAttentionSpec":
            return AttentionCGSupport.NEVER
        parallel, model = vllm_config.parallel_config, vllm_config.model_config
        widths = kv_cache_spec.head_size, getattr(kv_cache_spec, "head_size_v", kv_cache_spec.head_size)
        group = max(model.get_num_attention_heads(parallel) // kv_cache_spec.num_kv_heads, 1)
        scaled = kv_cache_spec.dtype.itemsize == 1
        one = getattr(parallel, "decode_context_parallel_size", 1) == 1
        if one and decodes_in_place(widths, model.dtype, kv_cache_spec.block_size, group, scaled):
            return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
        return AttentionCGSupport.NEVER

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Metadata:
        """common_prefix_len is a hint that is not taken: shared pages are read for each sequence."""
        common = common_attn_metadata
        if not isinstance(common.causal, bool):
            raise UnsupportedError(
                "a batch of which some sequences are causal",
                "all of them, or none",
                "choose another attention backend for it",
            )
        ends = common.num_reqs + 1
        starts = common.query_start_loc[:ends]
        batch = Batch.of_starts(
            common.block_table_tensor[: ends - 1],
            common.seq_lens[: ends - 1],
            starts,
            common.query_start_loc_cpu[:ends],
            invariant=self.invariant,
        )
        return Metadata(batch, common.slot_mapping, starts, common.causal)

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Metadata:
        """Metadata of a step that is captured. Raises UnsupportedError unless all sequences decode."""
        metadata = self.build(0, common_attn_metadata)
        queries, sequences = metadata.batch.tokens, len(metadata.batch.lengths)
        if not metadata.batch.singles == queries == sequences:
            raise UnsupportedError(
                f"a captured graph of {queries} queries of {sequences} sequences",
                "one query of each",
                "set cudagraph_mode to FULL_AND_PIECEWISE or PIECEWISE",
            )
        return metadata

    def update_block_table(self, metadata: Metadata, blk_table: Tensor, slot_mapping: Tensor) -> Metadata:
        table = blk_table[: len(metadata.batch.lengths)]
        return replace(metadata, batch=metadata.batch.with_table(table), slot_mapping=slot_mapping)


class Impl(AttentionImpl[Metadata]):
    """One layer. Log-sum-exps are natural logarithms, as vLLM's `lse_base_on_e` says."""

    can_return_lse_for_decode = True
    lse_base_on_e = True
    supports_dcp = True

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
        check_options(attn_type, kv_cache_dtype, head_size, options)
        check_widths(head_size)
        check_heads(num_heads, num_kv_heads or num_heads, alibi_slopes, sinks)
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads, self.kv_cache_dtype = num_kv_heads or num_heads, kv_cache_dtype
        self.shares_cache = kv_sharing_target_layer_name is not None
        self.sinks = sinks
        self.encoder = attn_type in ENCODERS
        ranks = getattr(self, "dcp_world_size", 1)
        self._slopes = alibi_slopes
        window = sliding_window if sliding_window and sliding_window > 0 else None
        schedule = INVARIANT if batch_invariant() else Schedule()
        self.settings = LayerSettings(self.scale, window, logits_soft_cap or None, schedule=schedule)
        config = current_config()
        self.own = own_layers(config)
        self._over_ranks: OverRanks | None = None
        if ranks > 1 and not self.encoder:
            check_ranks(self, alibi_slopes)
            self._over_ranks = OverRanks(self.settings, ranks, self.dcp_rank, config)
        self._layers: dict[bool, LayerAttention] = {}

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write new keys and values [T, Hkv, D]; tokens past the end of slot_mapping are padding."""
        if not self.shares_cache and not self.encoder:
            count = len(slot_mapping)
            new = key[:count], value[:count]
            write(self._caches(kv_cache), new, slot_mapping, self._scales(layer))

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
        metadata, q = attn_metadata, query.view(len(query), self.num_heads, self.head_size)
        if self.encoder:
            self._among_themselves(layer, (q, key, value), metadata, rows)
        elif self._over_ranks is not None:
            name = getattr(layer, "layer_name", "")
            self._over_ranks((q, key, value), self._caches(kv_cache), metadata, rows, name)
        else:
            attn = self._attention(layer, q.device, metadata.causal)
            options = {"sinks": self.sinks, "kv_scales": self._scales(layer)}
            rows.copy_(attend(attn, q, self._caches(kv_cache), metadata.batch, **options))
        return output

    def _among_themselves(
        self, layer: Any, qkv: tuple[Tensor, Tensor, Tensor], metadata: Metadata, rows: Tensor
    ) -> None:
        """Each sequence's queries over all of its new keys, of which no cache is kept."""
        tokens, attn = metadata.batch.tokens, self._attention(layer, rows.device, metadata.causal)
        out = attn(*(x[:tokens] for x in qkv), varlen=Varlen(metadata.starts), sinks=self.sinks)
        rows[:tokens].copy_(out)
        rows[tokens:].zero_()

    def _attention(self, layer: Any, device: torch.device, causal: bool = True) -> Any:
        if causal not in self._layers:
            slopes = self._slopes
            table = None if slopes is None else torch.tensor(slopes, dtype=torch.float32, device=device)
            settings = replace(self.settings, slopes=table, causal=causal)
            self._layers[causal] = LayerAttention(settings, self.own)
        return self._layers[causal].named(getattr(layer, "layer_name", ""))

    def _scales(self, layer: Any) -> KVScales | None:
        """Scales of a cache of 8 bits, of each KV head: the layer has one for all, or those."""
        if self.kv_cache_dtype not in EIGHT_BIT:
            return None
        k, v = (x.reshape(-1).expand(self.num_kv_heads).float() for x in (layer._k_scale, layer._v_scale))
        return KVScales(k, v)

    def _caches(self, kv_cache: Tensor) -> Caches:
        """Keys and values of a cache of any layout, as views. Values may be narrower or wider than keys."""
        if self.kv_cache_dtype in EIGHT_BIT:
            kv_cache = kv_cache.view(E4M3)
        return views(kv_cache, self.num_kv_heads, self.head_size)
