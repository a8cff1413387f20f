"""Interface of vLLM's V1 attention backends, as far as fa4flex's adapter meets it: names and signatures."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, TypeVar

import torch

M = TypeVar("M")


class AttentionType(str, Enum):  # noqa: UP042
    DECODER = "decoder"
    ENCODER_ONLY = "encoder_only"


class MultipleOf:
    def __init__(self, base: int) -> None:
        self.base = base


class AttentionBackend(ABC):
    forward_includes_kv_cache_update = True

    @staticmethod
    @abstractmethod
    def get_name() -> str: ...

    @staticmethod
    @abstractmethod
    def get_impl_cls() -> type: ...

    @staticmethod
    @abstractmethod
    def get_builder_cls() -> type: ...

    @staticmethod
    @abstractmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]: ...

    @classmethod
    def supports_sink(cls) -> bool:
        return False


class AttentionMetadata:
    pass


@dataclass
class CommonAttentionMetadata:
    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: torch.Tensor
    slot_mapping: torch.Tensor
    causal: Any = True


class AttentionCGSupport(Enum):
    ALWAYS = 3
    NEVER = 0


class AttentionMetadataBuilder(ABC, Generic[M]):
    reorder_batch_threshold: int | None = None
    supports_update_block_table = False

    @abstractmethod
    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any) -> None:
        self.kv_cache_spec, self.layer_names = kv_cache_spec, layer_names

    @abstractmethod
    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> M: ...


class AttentionImpl(ABC, Generic[M]):
    @abstractmethod
    def __init__(self, num_heads: int, head_size: int, scale: float, **options: Any) -> None: ...

    @abstractmethod
    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: M,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor: ...
