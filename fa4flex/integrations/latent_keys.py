"""Latent rows of a cache as a layer of a Hugging Face model is handed them, and attention that is absorbed.

A head's key is w_uk @ latent with the rotated part behind it, its value w_uv @ latent. Absorbed, the query is
(q_nope @ w_uk, q_rope), which meets the row itself, and w_uv is applied to the output (DeepSeek-V2,
arXiv:2405.04434, section 2.1.2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fa4flex.errors import UnsupportedError
from fa4flex.integrations.paged_cache import Batch
from fa4flex.primitives.latent import Latent

MOST_ABSORBED = 64
"""Queries of a sequence that kernels for latent rows take. More have keys and values made for each head."""


@dataclass(frozen=True, eq=False)
class LatentKeys:
    """Rows of a layer in place of keys and values: those of all tokens so far, [B, length, 1, width], or
    pages of the sequences of a batch. new: tokens that this call added to each sequence, or to a batch."""

    latent: Latent
    new: int
    length: int
    dtype: torch.dtype
    batch: Batch | None = None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape of keys with heads first; all query heads share one."""
        return self.latent.cache.shape[0], 1, self.length, self.latent.width

    @property
    def device(self) -> torch.device:
        return self.latent.cache.device

    def parts(self) -> tuple[Tensor, Tensor]:
        """Latents [B, 1, length, value_dim] and rotated columns [B, 1, length, rope_dim]."""
        cache, form = self.latent.cache, self.latent.format
        rows = cache if form is None else form.decoded(cache, self.dtype, self.latent.scale)
        first, last = rows.transpose(1, 2).split([self.latent.value_dim, self.latent.rope_dim], -1)
        return first, last


@dataclass(frozen=True)
class Absorption:
    """Weights of a layer per head: w_uk [H, nope, latent] and w_uv [H, v, latent]."""

    w_uk: Tensor
    w_uv: Tensor

    @staticmethod
    def of(module: Any) -> Absorption:
        projection, nope = module.kv_b_proj, module.qk_nope_head_dim
        each = projection.weight.view(-1, nope + module.v_head_dim, module.kv_lora_rank)
        return Absorption(each[:, :nope], each[:, nope:])

    def queries(self, query: Tensor) -> Tensor:
        """[B, H, S, latent + rope] of queries [B, H, S, nope + rope]."""
        nope = self.w_uk.shape[1]
        return torch.cat((query[..., :nope] @ self.w_uk, query[..., nope:]), -1)

    def output(self, out: Tensor) -> Tensor:
        """[B, S, H, v] of outputs [B, S, H, latent]."""
        made: Tensor = torch.einsum("bshl,hvl->bshv", out, self.w_uv)
        return made


def absorbs(module: Any, keys: LatentKeys) -> bool:
    """True if absorbed attention costs no more products than making keys and values of each head from all
    rows does."""
    if keys.batch is not None:
        return True
    latent, heads = module.kv_lora_rank, module.qk_nope_head_dim + module.v_head_dim
    more = 2 * latent - heads  # elements of products per query, key and head
    return keys.new <= MOST_ABSORBED and keys.new * more <= latent * heads


def refuse_weights(shown: bool) -> None:
    if shown:
        raise UnsupportedError(
            "output_attentions=True over latent rows",
            "calls without it, or a cache of transformers' own",
            "leave past_key_values out, or pass transformers.DynamicCache()",
        )
