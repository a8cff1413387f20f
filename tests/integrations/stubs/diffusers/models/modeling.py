"""Models, as far as they hand a backend to their layers."""

from __future__ import annotations

from torch import nn

from diffusers.models.attention import AttentionModuleMixin
from diffusers.models.attention_dispatch import AttentionBackendName
from diffusers.models.attention_processor import Attention


class ModelMixin(nn.Module):
    def set_attention_backend(self, backend: str) -> None:
        if backend not in {x.value for x in AttentionBackendName.__members__.values()}:
            raise ValueError(f"{backend=}")
        for module in self.modules():
            if isinstance(module, (Attention, AttentionModuleMixin)) and hasattr(
                module.processor, "_attention_backend"
            ):
                module.processor._attention_backend = AttentionBackendName(backend)
