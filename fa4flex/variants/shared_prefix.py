"""Shared prefix: prompts and their continuations packed in one row, each prompt stored once.

    allowed(q, kv) = kv <= q within q's document, or kv is in the prompt that q's document continues

Source: prefix sharing as in Juravsky et al., Hydragen, arXiv:2402.05099, section 3, for packed training rows.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from fa4flex.errors import InputError
from fa4flex.primitives.mask import MaskMod, mask_family
from fa4flex.variants._cases import Case, Drawn, Picture, Sizes, masked, show
from fa4flex.variants._common import INTEGERS, offsets_to_ids, table


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


def _of(s: Sizes, *prefix_of: int) -> Drawn:
    ends = s.offsets()
    lengths = [stop - start for start, stop in pairwise(ends)]
    mask = shared_prefix(torch.tensor(ends, dtype=torch.int32), torch.tensor(prefix_of))
    return masked(s.square(ends[-1]), mask, definition, lengths, list(prefix_of))


CASES = (Case(lambda s: _of(s, 0, 0, 0, 3, 3)), Case(lambda s: _of(s, 1, 1, 1, 1, 1), compiled=False))
PICTURE = Picture("shared_prefix(torch.tensor([0, 48, 80, 128]), torch.tensor([0, 0, 0]))")


if __name__ == "__main__":
    show(CASES)
