"""Addresses of a lane's bytes in tiles of keys and values.

A tile lies in blocks of columns, `span` bytes of each row next to each other. The 16 bytes at chunk c of row
r lie at chunk c ^ (r % 8), where a row has 8 chunks; TMA does that, and PTX calls it a swizzle. Which rows
and columns are a lane's is said by the fragments of mma.m16n8k16 (PTX ISA): lane 4 g + c has key g of every 8
as a column, and rows 2 c, 2 c + 1, 2 c + 8 and 2 c + 9 of every 16 keys of values, columns g of every 8."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cutlass import Int32, cute, select_

from fa4flex.kernels.common.gathered_key_values import swizzled
from fa4flex.kernels.decode_fp8_sm90.config import KEYS, Config, span
from fa4flex.kernels.decode_fp8_sm90.instructions import Words, read_words

CHUNK = 16
"""Bytes that a lane reads at once, at most."""

WORD = 4

Place = tuple[Int32, Int32 | int]
"""A stage, and a step of the warp's keys in it."""


@dataclass(frozen=True)
class _Bytes:
    """base     address of a lane's bytes in the first stage, by what differs between its reads
    width    bytes of a row in a block
    rows     keys of a tile
    count    blocks of a tile
    first    bytes before the first key of the warp
    """

    base: tuple[Int32, ...]
    width: int
    rows: int
    count: int
    first: Int32

    def at(self, place: Place) -> Int32:
        """Bytes before a step of the warp's keys in a stage."""
        stage, step = place
        return stage * (self.rows * self.width * self.count) + self.first + step * (KEYS * self.width)

    def block(self, number: int) -> int:
        return number * self.rows * self.width


def _first(config: Config, width: int) -> Int32:
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) - 4
    return warp % config.key_warps * (config.steps * KEYS * width)


class KeyBytes(_Bytes):
    """A lane has a quarter of each block of a row of keys, in one run."""

    @staticmethod
    def of(address: Int32, head_dim: int, config: Config, lane: Int32) -> KeyBytes:
        width = span(head_dim)
        run = width // 4
        starts = range(0, run, min(run, CHUNK))
        row, quarter = lane // 4 * width, lane % 4 * run
        base = tuple(address + swizzled(row + quarter + start, width) for start in starts)
        return KeyBytes(base, width, config.tile_n, head_dim // width, _first(config, width))

    def chunks(self, place: Place) -> Iterator[list[Words]]:
        """Words of a lane's keys of a step, one of every 8, as far as they are read at once."""
        before = self.at(place)
        count = min(self.width // 4, CHUNK) // WORD
        for number in range(self.count):
            offsets = [self.block(number) + 8 * n * self.width for n in range(KEYS // 8)]
            for base in self.base:
                yield [read_words(base + before, offset, count) for offset in offsets]


class ValueBytes(_Bytes):
    """A lane has an eighth of each block of a row of values, in one run."""

    @staticmethod
    def of(address: Int32, head_dim_v: int, config: Config, lane: Int32) -> ValueBytes:
        width = span(head_dim_v)
        column = lane // 4 * (width // 8)
        rows = (lane % 4 * 2 + e for e in (0, 1))
        base = tuple(address + swizzled(row * width + column, width) for row in rows)
        return ValueBytes(base, width, config.tile_n, head_dim_v // width, _first(config, width))

    @property
    def run(self) -> int:
        """Columns of a block that a lane has."""
        return self.width // 8

    def pairs(
        self, place: Place, block: int, pair: int, end: Int32 | None
    ) -> tuple[tuple[Words, Words], tuple[Words, Words]]:
        """Words of a lane's rows 2 c, 2 c + 1, and 2 c + 8, 2 c + 9 of 16 keys of a step. Keys of the step
        from `end` on have zeros."""
        before = self.at(place)
        found = []
        for far in (0, 8):
            offset = self.block(block) + (16 * pair + far) * self.width
            for e, base in enumerate(self.base):
                words = read_words(base + before, offset, self.run // WORD)
                if end is not None:
                    exists = cute.arch.lane_idx() % 4 * 2 + (16 * pair + far + e) < end
                    words = [select_(exists, word, Int32(0)) for word in words]
                found.append(words)
        return (found[0], found[1]), (found[2], found[3])
