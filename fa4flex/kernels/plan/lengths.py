"""Kinds of sequence lengths in a batch, where rows' numbers of packed ones lie, and what scales of an 8-bit
cache belong to, as data."""

from __future__ import annotations

from typing import Literal

Lengths = Literal["dense", "packed", "used"]
"""All tokens of a padded tensor; tokens of all sequences one after the other; the first of each sequence of a
padded tensor."""

Scaling = Literal["", "head", "page", "token"]
"""Granularity of scales, for each KV head: one for all keys of a sequence, for a page, or for each key;
"": keys and values have no scales."""

ROW_BLOCK = 128
"""Rows that the statistics and the accumulated dQ of a sequence are padded to a multiple of."""


def row_block(tile_m: int) -> int:
    """Rows that a sequence is padded to a multiple of where a step takes tile_m queries: a whole number of
    steps. Packed sequences need ROW_BLOCK."""
    return tile_m if ROW_BLOCK % tile_m else ROW_BLOCK
