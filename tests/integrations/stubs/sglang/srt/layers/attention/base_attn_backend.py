"""Interface of SGLang's attention backends, as far as fa4flex's adapter meets it: names and signatures."""

from __future__ import annotations

from abc import ABC
from typing import Any

import torch


class AttentionBackend(ABC):
    token_to_kv_pool: Any
    req_to_token_pool: Any

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self.init_forward_metadata_out_graph(forward_batch)
        self.init_forward_metadata_in_graph(forward_batch)

    def init_forward_metadata_out_graph(  # noqa: B027
        self, forward_batch: Any, in_capture: bool = False
    ) -> None:
        pass

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:  # noqa: B027
        pass

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        raise NotImplementedError

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        raise NotImplementedError

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
        if mode.is_idle():
            return q.new_empty(len(q), layer.tp_q_head_num * layer.v_head_dim)
        run = self.forward_decode if mode.is_decode() else self.forward_extend  # type: ignore[attr-defined]
        return run(q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **options)
