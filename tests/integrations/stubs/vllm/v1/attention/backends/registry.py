"""Registry of backends by name, of which CUSTOM is for others than vLLM's own."""

from __future__ import annotations

from enum import Enum

OVERRIDES: dict[AttentionBackendEnum, str] = {}


class AttentionBackendEnum(Enum):
    FLASH_ATTN = "vllm.v1.attention.backends.flash_attn.FlashAttentionBackend"
    CUSTOM = None

    def is_overridden(self) -> bool:
        return self in OVERRIDES


def register_backend(backend: AttentionBackendEnum, class_path: str) -> None:
    OVERRIDES[backend] = class_path
