"""Interface of SGLang's attention backends, as far as fa4flex's adapter meets it: names and signatures."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch


class AttentionBackend(ABC):
    @abstractmethod
    def init_forward_metadata(self, forward_batch: Any) -> None: ...

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **options: Any,
    ) -> torch.Tensor:
        mode = forward_batch.forward_mode
        run = self.forward_decode if mode.is_decode() else self.forward_extend  # type: ignore[attr-defined]
        return run(q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **options)
