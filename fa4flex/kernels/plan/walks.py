"""Walks: how many tiles a pass has of a head, and how many steps these take, in closed form. Data only.

Which pairs a mask allows is known here as far as shapes and the mask's form tell it: all pairs ("full"), or
those of keys up to one that rises with the query ("causal"). Of any other mask (windows, documents, maps)
numbers and contents of a call decide, of which a plan knows nothing. It is "other", and walked in full, which
compares tiles by rows past the end alone.
"""

from __future__ import annotations

from math import gcd
from typing import Literal, NamedTuple

Form = Literal["full", "causal", "other"]

LISTED = 16
"""Tiles of a head that are counted one by one; of more, in closed form."""


class Walk(NamedTuple):
    """tiles     of a head
    steps     of all of them together
    longest   steps of the longest
    masked    steps in which the mask is evaluated, of all tiles together
    """

    tiles: int
    steps: float
    longest: int
    masked: float


def by_queries(form: Form, q_len: int, kv_len: int, rows: int, keys: int) -> Walk:
    """Tiles of so many rows, steps of so many keys: a forward pass."""
    tiles, most = -(-q_len // rows), -(-kv_len // keys)
    if form != "causal":
        return Walk(tiles, tiles * most, most, 0)
    offset = kv_len - q_len  # the last query stands at the last key
    longest = min(most, max(-(-(offset + q_len) // keys), 0))
    if tiles <= LISTED:
        listed = sum(
            max(-(-(offset + min(first + rows, q_len)) // keys), 0) for first in range(0, q_len, rows)
        )
        return Walk(tiles, listed, longest, tiles * _crossed(rows, keys))
    seen = min(q_len, kv_len)  # queries before the last `seen` have no keys
    whole, rest = divmod(seen, rows)
    rounding = (keys - gcd(rows, keys)) / 2 + -offset % gcd(rows, keys)
    steps = (whole * (offset + q_len - seen) + rows * whole * (whole + 1) / 2 + whole * rounding) / keys
    return Walk(tiles, steps + (longest if rest else 0), longest, tiles * _crossed(rows, keys))


def by_keys(form: Form, q_len: int, kv_len: int, rows: int, keys: int) -> Walk:
    """Tiles of so many keys, steps of so many rows: a backward pass."""
    tiles, most = -(-kv_len // keys), -(-q_len // rows)
    if form != "causal":
        return Walk(tiles, tiles * most, most, 0)
    offset = kv_len - q_len  # tiles of keys before this one are seen by all queries
    if tiles <= LISTED:
        steps = sum(max(most - max(first - offset, 0) // rows, 0) for first in range(0, kv_len, keys))
        return Walk(tiles, steps, most - max(-offset, 0) // rows, tiles * _crossed(keys, rows))
    free = min(offset // keys + 1, tiles) if offset >= 0 else 0
    left, first = tiles - free, free * keys - offset  # of others, queries before the first one that sees them
    rounding = (rows - gcd(rows, keys)) / 2 + -offset % gcd(rows, keys)
    before = left * (first + keys * (left - 1) / 2 - rounding) / rows
    longest = most - max(-offset, 0) // rows
    return Walk(tiles, max(tiles * most - before, tiles), longest, tiles * _crossed(keys, rows))


def _crossed(length: int, step: int) -> float:
    """Steps of a tile that the diagonal crosses."""
    return (length + step - gcd(length, step)) / step
