"""Tokens of all sequences in one row: which sequence and which tile of keys each belongs to.

Nothing here waits for the device: numbers of tiles are bounds by shapes alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fa4flex.quantization.formats import TILE


@dataclass(frozen=True, eq=False)
class Tokens:
    """T tokens of N sequences.

    sequence    int64 [T]: which sequence; N for padding, which takes no part
    place       int64 [T]: which token of its sequence
    first_tile  int64 [N + 1]: tiles of sequence n are first_tile[n] .. first_tile[n + 1]
    tiles       at least first_tile[N]
    """

    sequence: Tensor
    place: Tensor
    first_tile: Tensor
    tiles: int

    @classmethod
    def dense(cls, batch: int, length: int, used: Tensor | None, device: torch.device) -> Tokens:
        """A batch of one length, of which `used` [B] tokens take part; None: all."""
        rows = torch.arange(batch * length, device=device)
        sequence, place = rows // max(1, length), rows % max(1, length)
        each = -(-length // TILE)
        if used is not None:
            sequence = torch.where(place < used.to(torch.int64)[sequence], sequence, batch)
        return cls(sequence, place, torch.arange(batch + 1, device=device) * each, batch * each)

    @classmethod
    def packed(cls, starts: Tensor, used: Tensor | None, tokens: int) -> Tokens:
        """Sequences one after another; `starts` [N + 1] are cumulative lengths."""
        starts = starts.to(torch.int64)
        count = len(starts) - 1
        rows = torch.arange(tokens, device=starts.device)
        sequence = torch.searchsorted(starts[1:], rows, right=True)
        place = rows - starts[sequence.clamp(max=count - 1)]
        if used is not None:
            taken = place < used.to(torch.int64)[sequence.clamp(max=count - 1)]
            sequence = torch.where(taken, sequence, count)
        each = (starts.diff() + TILE - 1) // TILE
        first = torch.cat([each.new_zeros(1), each.cumsum(0)])
        return cls(sequence, place, first, tokens // TILE + count)

    @property
    def sequences(self) -> int:
        return len(self.first_tile) - 1

    @property
    def tiles_of_each(self) -> int:
        """Tiles of each sequence of a dense batch."""
        return self.tiles // max(1, self.sequences)

    @property
    def tile(self) -> Tensor:
        """Tile of each token; the number of tiles for padding."""
        return torch.where(self._padding, self.tiles, self.first_tile[self.sequence] + self.place // TILE)

    @property
    def column(self) -> Tensor:
        """Column of each key among values that are transposed; the number of columns for padding."""
        row = self.first_tile[self.sequence] * TILE + self.place // 16 * 16 + swapped(self.place % 16)
        return torch.where(self._padding, self.tiles * TILE, row)

    @property
    def _padding(self) -> Tensor:
        return self.sequence == self.sequences

    def means(self, x: Tensor) -> Tensor:
        """Mean of x [T, ...] over the tokens of each sequence: [N, ...] in float32; 0 without tokens."""
        sums = _sums(x, self.sequence, self.sequences)
        ones = torch.ones(len(x), device=x.device)
        counts = _sums(ones, self.sequence, self.sequences).clamp(min=1)
        return sums / counts.view(-1, *[1] * (x.ndim - 1))

    def of_sequences(self, x: Tensor) -> Tensor:
        """Rows of x [N, ...] for each token, 0 for padding."""
        return torch.cat([x, torch.zeros_like(x[:1])])[self.sequence]

    def cleared(self, x: Tensor) -> Tensor:
        """x [T, ...] with 0 for padding."""
        return x.masked_fill(self._padding.view(-1, *[1] * (x.ndim - 1)), 0.0)

    def of_tiles(self, x: Tensor) -> Tensor:
        """Rows of x [tiles, ...] for each token, 1 for padding."""
        return torch.cat([x, torch.ones_like(x[:1])])[self.tile]

    def greatest_of_tiles(self, x: Tensor) -> Tensor:
        """Greatest of x [T, H] >= 0 over the tokens of each tile: [tiles, H]; 0 without tokens."""
        return _greatest(x, self.tile, self.tiles)

    def greatest_of_sequences(self, x: Tensor) -> Tensor:
        """The same over the tokens of each sequence: [N, ...]."""
        return _greatest(x, self.sequence, self.sequences)


def swapped(place: Tensor) -> Tensor:
    """Column of a key within 16, where it meets its probability: a thread of an accumulator has the scores of
    keys 8j + 2c + b, an operand of 8 bits wants 4c + 2j + b."""
    return (place >> 1 & 3) * 4 + (place >> 3 & 1) * 2 + (place & 1)


def _sums(x: Tensor, which: Tensor, count: int) -> Tensor:
    sums = torch.zeros(count + 1, *x.shape[1:], dtype=torch.float32, device=x.device)
    return sums.index_add(0, which, x.float())[:count]


def _greatest(x: Tensor, which: Tensor, count: int) -> Tensor:
    greatest = torch.zeros(count + 1, *x.shape[1:], dtype=torch.float32, device=x.device)
    index = which.view(-1, *[1] * (x.ndim - 1)).expand_as(x)
    return greatest.scatter_reduce(0, index, x.float(), "amax")[:count]
