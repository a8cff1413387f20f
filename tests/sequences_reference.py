"""Reference of the kernel of lengths, in plain Python: corrected lengths and the order of tiles, without its
faults."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from torch import Tensor

Keys = Callable[[int, int, int, int], int]
"""Keys of a tile: of its first and last row, and the lengths of its sequence."""


def every_key(first: int, last: int, q_len: int, kv_len: int) -> int:
    return kv_len


def corrected_starts(cu: Sequence[int], tokens: int) -> list[int]:
    """Cumulative lengths within the tokens, none below one before it."""
    found: list[int] = []
    for x in cu:
        found.append(max(min(max(x, 0), tokens), found[-1] if found else 0))
    return found


def corrected(
    cu: Sequence[int] | None, used: Sequence[int] | None, tokens: int
) -> tuple[list[int] | None, list[int] | None]:
    """Cumulative and used lengths of one side."""
    starts = None if cu is None else corrected_starts(cu, tokens)
    if used is None:
        return starts, None
    whole = [tokens] * len(used) if starts is None else [b - a for a, b in pairwise(starts)]
    return starts, [min(max(x, 0), n) for x, n in zip(used, whole, strict=True)]


def sequence_lengths(
    cu: Sequence[int] | None, used: Sequence[int] | None, tokens: int, count: int
) -> list[int]:
    """Tokens of each sequence that take part."""
    starts, limited = corrected(cu, used, tokens)
    if limited is not None:
        return limited
    return [tokens] * count if starts is None else [b - a for a, b in pairwise(starts)]


def classes(
    q_lens: list[int], kv_lens: list[int], tile: tuple[int, int], keys: Keys
) -> dict[tuple[int, int], int]:
    """Class of work of each (sequence, tile), in the order of their numbers; the greatest has most keys."""
    unit = max(-(-(max(kv_lens) + 1) // 1024), tile[1])
    most = min(max(kv_lens) // unit, 1023)
    found = {}
    for b, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=True)):
        for i in range(-(-q_len // tile[0])):
            last = min((i + 1) * tile[0], q_len) - 1
            found[b, i] = min(keys(i * tile[0], last, q_len, kv_len) // unit, most)
    return found


def sorted_tiles(work: dict[tuple[int, int], int], rows: int, sequences: int) -> list[list[int]]:
    """The order, `rows` of it: most work first, tiles of one class as they are numbered."""
    order = [list(tile) for tile in sorted(work, key=lambda tile: -work[tile])]
    return order + [[sequences, 0]] * (rows - len(order))


def compute(given: Sequence[Tensor | None], made: Sequence[Tensor | None], tokens: tuple[int, int]) -> None:
    """Write the corrected lengths, in the order of SequenceLengths, as the kernel does."""
    lists = [None if x is None else x.tolist() for x in given]
    for side in range(2):
        starts, used = corrected(lists[side], lists[side + 2], tokens[side])
        for x, values in ((made[side], starts), (made[side + 2], used)):
            if x is not None:
                x.copy_(x.new_tensor(values))
