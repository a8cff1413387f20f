"""Base class of layers that dispatch."""

from __future__ import annotations

from typing import Any

from diffusers.models.attention_dispatch import AttentionBackendName


class AttentionModuleMixin:
    processor: Any

    def set_attention_backend(self, backend: str) -> None:
        self.processor._attention_backend = AttentionBackendName(backend)
