"""Shared prefix: prompts and their continuations packed in one row, each prompt stored once.

    allowed(q, kv) = kv <= q within q's document, or kv is in the prompt that q's document continues

Source: prefix sharing as in Juravsky et al., Hydragen, arXiv:2402.05099, section 3, for packed training rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fa4flex.errors import InputError
from fa4flex.primitives.mask import MaskMod, mask_family
from fa4flex.variants._alone import show_mask
from fa4flex.variants._check import INTEGERS, offsets_to_ids, table


@mask_family
def shared_prefix(offsets: Tensor, prefix_of: Tensor) -> MaskMod:
    """offsets [N + 1]: cumulative document lengths. prefix_of [N]: the prompt that each document continues.

    A prompt is its own prefix. Documents are causal; continuations see their whole prompt and not each
    other. Indices are absolute. Raises InputError.
    """
    ids = offsets_to_ids("shared_prefix", "offsets", offsets).long()
    prefix_of = table("shared_prefix", "prefix_of", prefix_of, INTEGERS, (1,), "[N]").long()
    count = offsets.numel() - 1
    in_range = prefix_of.numel() == count and bool(((prefix_of >= 0) & (prefix_of < count)).all())
    if not in_range or not torch.equal(prefix_of[prefix_of], prefix_of):
        raise InputError(
            f"shared_prefix(prefix_of={prefix_of.tolist()[:8]}) for {count} documents",
            f"{count} document numbers, each of a document that is its own prefix",
            "e.g. [0, 0, 0]: document 0 is the prompt of documents 1 and 2",
        )
    start = offsets[:-1][ids]
    continues = prefix_of[ids] != ids
    # Prompts get an empty interval, so that one formula serves prompts and continuations.
    prompt_start = torch.where(continues, offsets[:-1][prefix_of[ids]], 0)
    prompt_stop = torch.where(continues, offsets[1:][prefix_of[ids]], 0)

    def mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        own = (kv_idx >= start[q_idx]) & (kv_idx <= q_idx)
        return own | ((kv_idx >= prompt_start[q_idx]) & (kv_idx < prompt_stop[q_idx]))

    return mod


def definition(q: int, kv: int, lengths: list[int], prefix_of: list[int]) -> bool:
    tokens = [number for number, length in enumerate(lengths) for _ in range(length)]
    if tokens[q] == tokens[kv]:
        return kv <= q
    return tokens[kv] == prefix_of[tokens[q]]


def main() -> None:
    offsets, prefix_of = torch.tensor([0, 4, 7, 9, 11, 14]), torch.tensor([0, 0, 0, 3, 3])
    show_mask(
        shared_prefix(offsets, prefix_of),
        lambda q, kv: definition(q, kv, [4, 3, 2, 2, 3], [0, 0, 0, 3, 3]),
        14,
    )


if __name__ == "__main__":
    main()
