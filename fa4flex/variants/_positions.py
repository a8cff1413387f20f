"""Position of a query among the keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def aligned(q_idx: Any, q_len: Any, kv_len: Any) -> Any:
    """The key position of query `q_idx` when the last query stands at the last key (bottom-right alignment).

    This is FlashAttention's convention: with a cache, the q_len new queries are the last of kv_len tokens.
    """
    return q_idx + (kv_len - q_len)


def coordinate(stride: int, size: int, outermost: bool) -> Callable[[Any], Any]:
    """Index -> coordinate along one axis of a row-major grid, by the fewest divisions."""
    if outermost:
        return (lambda idx: idx) if stride == 1 else (lambda idx: idx // stride)
    if stride == 1:
        return lambda idx: idx % size
    return lambda idx: idx // stride % size


def strides(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a row-major grid."""
    result = [1]
    for size in reversed(sizes[1:]):
        result.append(result[-1] * size)
    return tuple(reversed(result))
