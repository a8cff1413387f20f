"""Vertical and slash lines: chosen keys, and chosen distances, for each head.

    allowed(q, kv) = kv <= p and (columns[h, kv] or slashes[h, p - kv]),   p = q + (kv_len - q_len)

Source: Jiang et al., MInference 1.0, arXiv:2407.02490, section 3.2 and algorithm 1 (its choice of lines).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fa4flex.primitives.mask import MaskMod, mask_family
from fa4flex.variants._cases import Case, Drawn, Picture, Sizes, masked, show
from fa4flex.variants._common import BOOL, aligned, table


@mask_family
def vertical_slash(columns: Tensor, slashes: Tensor) -> MaskMod:
    """columns: bool [H, kv_len], keys that all later queries see; slashes: bool [H, kv_len], distances at
    which all queries see a key; H may be 1. Aligned bottom-right. `fa4flex.select.lines` chooses both.

    Raises InputError.
    """
    columns = table("vertical_slash", "columns", columns, BOOL, (2,), "[H, kv_len]")
    slashes = table("vertical_slash", "slashes", slashes, BOOL, (2,), "[H, kv_len]")
    shared = columns.shape[0] == 1, slashes.shape[0] == 1

    def mod(b: Any, h: Any, q_idx: Any, kv_idx: Any, q_len: Any, kv_len: Any) -> Any:
        away = aligned(q_idx, q_len, kv_len) - kv_idx
        on_column = columns[0 if shared[0] else h, kv_idx]
        on_slash = slashes[0 if shared[1] else h, torch.clamp(away, min=0)]
        return (away >= 0) & (on_column | on_slash)

    return mod


def definition(q: int, kv: int, columns: list[int], slashes: list[int], q_len: int, kv_len: int) -> bool:
    position = q + kv_len - q_len
    return kv <= position and (kv in columns or position - kv in slashes)


def _lines(s: Sizes) -> Drawn:
    columns, slashes = (torch.rand(1, s.kv_len) < 0.2 for _ in range(2))
    listed = [x[0].nonzero().flatten().tolist() for x in (columns, slashes)]
    return masked(s, vertical_slash(columns, slashes), definition, *listed, s.q_len, s.kv_len)


CASES = (Case(_lines),)
PICTURE = Picture("vertical_slash(torch.arange(128)[None] % 40 < 2, torch.arange(128)[None] % 48 < 6)")


if __name__ == "__main__":
    show(CASES)
