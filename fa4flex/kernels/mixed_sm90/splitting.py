"""Splitting of mixed batches: which parts of the keys of a sequence blocks share is decided on the device."""

from __future__ import annotations

from dataclasses import dataclass

from fa4flex.kernels.mixed_sm90.config import LEAST, WAVES
from fa4flex.kernels.plan.splitting import Splits, Splitting


@dataclass(frozen=True)
class MixedSplitting(Splitting):
    """`rows`: of a tile of few rows, at most. The host knows neither which sequences have few queries nor how
    long they are; it makes room for all parts that there can be."""

    rows: int = 64

    def splits(self, batch: int, pairs: int, kv_len: int, rows: int) -> Splits:
        """Parts of the keys of a sequence of up to kv_len keys, at most; 1: none is split."""
        most = 1
        if self.applies(batch, pairs, rows):
            tiles = -(-kv_len // self.tile_n)
            most = max(-(-tiles // (LEAST if self.share is None else self.share)), 1)
        return Splits(most, most, self.floats(most, pairs, rows))

    def applies(self, batch: int, pairs: int, rows: int) -> bool:
        """A single sequence has all tokens: where these are many rows, nothing is split, and no second kernel
        is launched. One of whose tokens few are used is right all the same. What a schedule asks for is
        done."""
        return self.share is not None or batch > 1 or rows <= self.rows * pairs

    def floats(self, splits: int, pairs: int, rows: int) -> int:
        """float32 of memory for the parts of `rows` rows of `pairs` (sequence, KV head).

        A part has its share of the keys, or its tile would not be split; so there are at most twice as many
        parts as shares in all work, and those are WAVES for each multiprocessor. Shares that a schedule asks
        for know no such limit.
        """
        if splits == 1:
            return 0
        room = min(rows, pairs * self.rows) * splits
        if self.share is None:
            room = min(room, 2 * WAVES * self.multiprocessors * self.rows)
        return room * (self.width + 1)
