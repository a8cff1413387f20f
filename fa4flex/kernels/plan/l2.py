"""Heads that run beside each other, so that the L2 cache holds what they share: kernels go by these numbers,
and the model of their time (model.py) does. Data only."""

from __future__ import annotations

L2_BYTES = 32 << 20
"""Keys and values of the heads that run at the same time should stay within this; of backward passes,
queries and sums."""

SHORT_KEYS, SHORT_BYTES = 512, 8 << 20
MIDDLE_KEYS, MIDDLE_BYTES = 4096, 16 << 20
"""Keys of short heads at most, and what heads that run at the same time should stay within where all are
short: all tiles of one then run at about the same time, and its keys are read from memory once. Likewise of
heads that are not long: a tile follows another of its head sooner, while the cache still holds the keys."""


def sections_of_keys(pairs: int, kv_len: int, row_bytes: int, tiles: int, least: int) -> int:
    """Sections of a forward pass whose tiles differ in work: of `pairs` (batch entry, KV head), of so
    many bytes per key; `tiles` of queries of a pair, of which a section of few keys has `least`."""
    of_pair = max(kv_len * row_bytes, 1)
    most = L2_BYTES // of_pair
    if kv_len <= MIDDLE_KEYS:
        room = SHORT_BYTES if kv_len <= SHORT_KEYS else MIDDLE_BYTES
        most = min(most, max(room // of_pair, least // max(tiles, 1)))
    width = pairs
    while width > max(most, 1):
        width = (width + 1) // 2
    return -(-pairs // max(width, 1))


def sections_of_queries(pairs: int, of_pair: int) -> int:
    """Sections of a backward pass under a mask: of `pairs` (batch entry, head of dK), of so many bytes for
    the queries of all heads that meet one."""
    width = max(min(L2_BYTES // max(of_pair, 1), pairs), 1)
    return max((pairs + width // 2) // width, 1)
