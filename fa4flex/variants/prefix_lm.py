"""Prefix language model: every query attends the whole prefix, and is causal behind it.

    allowed(q, kv) = kv < prefix or kv <= q + (kv_len - q_len)

Source: Raffel et al., T5, arXiv:1910.10683, section 3.2.1 (figure 4, right).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fa4flex.primitives.mask import MaskMod, mask_family
from fa4flex.variants._cases import Case, Drawn, Picture, Sizes, masked_by_batch, member, show
from fa4flex.variants._common import INTEGERS, aligned, table, whole


@mask_family
def prefix_lm(prefix: int | Tensor) -> MaskMod:
    """`prefix` keys are visible to all: an int >= 0, or an integer tensor [B], one length per batch entry.

    The prefix counts keys from 0; the causal part is aligned bottom-right. Raises InputError.
    """
    if isinstance(prefix, Tensor):
        lengths = table("prefix_lm", "prefix", prefix, INTEGERS, (1,), "[B]")

        def mod_per_batch(b: Any, h: Any, q_idx: Any, kv_idx: Any, q_len: Any, kv_len: Any) -> Any:
            return (kv_idx < lengths[b]) | (kv_idx <= aligned(q_idx, q_len, kv_len))

        return mod_per_batch
    length = whole("prefix_lm", "prefix", prefix, least=0)

    def mod(b: Any, h: Any, q_idx: Any, kv_idx: Any, q_len: Any, kv_len: Any) -> Any:
        return (kv_idx < length) | (kv_idx <= aligned(q_idx, q_len, kv_len))

    return mod


def definition(q: int, kv: int, prefix: int, q_len: int, kv_len: int) -> bool:
    return kv in range(prefix) or kv <= kv_len - q_len + q


def _per_batch(s: Sizes) -> Drawn:
    lengths = torch.randint(0, s.kv_len + 1, (s.batch,))
    return masked_by_batch(
        s, prefix_lm(lengths), lambda b, q, kv: definition(q, kv, int(lengths[b]), s.q_len, s.kv_len)
    )


CASES = (Case(lambda s: member(s, prefix_lm, definition, s.of(90, least=0))), Case(_per_batch))
PICTURE = Picture("prefix_lm(40)")


if __name__ == "__main__":
    show(CASES)
