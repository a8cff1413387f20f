"""Parts of a sequence as tensors, found by their places in the whole."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fa4flex.parallel.placement import Range, Ranges

SEQUENCE = 2
"""Dimension of [B, H, S, D] that is the sequence."""


class Pieces:
    """Tokens of a [B, H, S, D] tensor whose rows are those of `ranges`, one after another."""

    def __init__(self, x: Tensor, ranges: Sequence[Range]) -> None:
        self.x = x
        self.places: list[tuple[int, int, Tensor]] = []
        self.extend(x, ranges)

    def extend(self, x: Tensor, ranges: Sequence[Range]) -> None:
        """Further tokens, of another tensor, at places where there are none yet."""
        at = 0
        for lo, hi in in_a_row(ranges):
            self.places.append((lo, hi, x.narrow(SEQUENCE, at, hi - lo)))
            at += hi - lo

    def slices(self, wanted: Range) -> list[Tensor]:
        """Views of the tokens of a range, in order; together they are all of it, if they are here."""
        lo, hi = wanted
        results = [
            (
                max(first, lo),
                x.narrow(SEQUENCE, max(first, lo) - first, min(last, hi) - max(first, lo)),
            )
            for first, last, x in self.places
            if first < hi and lo < last
        ]
        return [x for _, x in sorted(results, key=lambda item: item[0])]

    def take(self, wanted: Range) -> Tensor:
        """The tokens of a range: a view where they lie together, else a copy."""
        result = self.slices(wanted)
        return result[0] if len(result) == 1 else torch.cat(result, SEQUENCE)


def in_a_row(ranges: Sequence[Range]) -> list[Range]:
    """The same ranges in their order, each with those that begin where it ends."""
    results: list[Range] = []
    for lo, hi in ranges:
        if results and results[-1][1] == lo:
            results[-1] = results[-1][0], hi
        else:
            results.append((lo, hi))
    return results


def order_of(places: Sequence[Range]) -> tuple[Range, ...]:
    """Order in which rows of these places are kept: of the places themselves where more of them are next to
    each other then, else as they are. What lies together is a view, and not put together for each rectangle
    in both passes."""
    ordered = tuple(sorted(places))
    return ordered if len(in_a_row(ordered)) < len(in_a_row(places)) else tuple(places)


def in_order(rows: Tensor, places: Sequence[Range]) -> Tensor:
    """Rows [tokens, ...] of these places, one after another, in the order in which they are kept."""
    order = order_of(places)
    if order == tuple(places):
        return rows
    parts = dict(zip(places, rows.split([hi - lo for lo, hi in places]), strict=True))
    return torch.cat([parts[x] for x in order])


def copy_into(into: Tensor, x: Tensor) -> None:
    """Copy x there, 16 bytes at a time where both lie so: PyTorch counts the place of each number of tensors
    with gaps, which takes longer than memory does."""
    sixteen = [y.view(torch.complex128) for y in (into, x) if _in_sixteens(y)]
    if len(sixteen) == 2 and into.dtype == x.dtype:
        into, x = sixteen
    into.copy_(x)


def _in_sixteens(x: Tensor) -> bool:
    """True if rows of the last dimension are whole units of 16 bytes, at places that are multiples of it."""
    per = 16 // x.element_size()
    *steps, last = x.stride()
    return last == 1 and x.data_ptr() % 16 == 0 and not any(y % per for y in (x.shape[-1], *steps))


def rows_of(tensors: Sequence[Tensor], own: Sequence[Range], wanted: Sequence[Ranges]) -> Tensor:
    """Rows [tokens, ...] of what goes to each rank in order, several tensors side by side."""
    columns = []
    for x in tensors:
        pieces = Pieces(x, own)
        parts = [part for ranges in wanted for lo_hi in ranges for part in pieces.slices(lo_hi)]
        whole = torch.cat(parts, SEQUENCE) if parts else x.narrow(SEQUENCE, 0, 0)
        columns.append(whole.permute(2, 0, 1, 3).flatten(1))
    return torch.cat(columns, 1)


def tensors_of(rows: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The [B, H, tokens, D] tensors that `rows_of` put side by side; `like` gives their other dimensions."""
    sizes = [x.shape[0] * x.shape[1] * x.shape[3] for x in like]
    results = []
    for part, x in zip(rows.split(sizes, 1), like, strict=True):
        results.append(part.unflatten(1, (x.shape[0], x.shape[1], x.shape[3])).permute(1, 2, 0, 3))
    return results
