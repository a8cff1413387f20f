"""Scales of keys or values: one number for all keys of a block, or one for each column of a lane, asked for a
step ahead."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, cute

from fa4flex.kernels.common.arguments import Arguments
from fa4flex.kernels.common.key_loader import KeyLoader, Wanted
from fa4flex.kernels.common.packed_rows import Tile
from fa4flex.kernels.decode_fp8_sm90.config import KEYS
from fa4flex.kernels.plan.lengths import Scaling

COLUMNS = tuple(8 * (c // 2) + c % 2 for c in range(KEYS // 4))
"""A lane's columns of a step, from its first one on."""


@dataclass(frozen=True)
class Scale:
    """whole     what all keys of the block are multiplied by; 1 where that varies
    coming    [column]: scales of the lane's columns of the step that was asked for, where they vary
    """

    whole: Float32
    per: Scaling
    given: Any
    tile: Tile
    pages: Pages | None
    coming: cute.Tensor | None

    @property
    def varies(self) -> bool:
        return self.coming is not None

    def largest(self) -> Float32:
        """The largest magnitude among these; 0 where they do not vary."""
        found = Float32(0.0)
        if self.coming is not None:
            for c in range(len(COLUMNS)):
                found = cute.arch.fmax(found, cute.math.absf(self.coming[c]))
        return found

    def ask(self, first: Int32) -> None:
        """Load the scales of a step whose first key for this lane is `first`. Past the end of the sequence,
        the last key's are read: of keys that nobody sees."""
        if self.coming is None:
            return
        last = cutlass.max(self.tile.kv_len - 1, Int32(0))
        first = cutlass.max(first, Int32(0))  # a block without tiles asks as well
        rows = KEYS if self.pages is None else self.pages.rows
        for start in range(0, KEYS, rows):
            some = [c for c in range(len(COLUMNS)) if start <= COLUMNS[c] < start + rows]
            if not some:
                continue
            find = self._place(cutlass.min(first + COLUMNS[some[0]], last))
            for c in some:
                self.coming[c] = find(cutlass.min(first + COLUMNS[c], last))

    def _place(self, one: Int32) -> Callable[[Int32], Float32]:
        """Function that finds the scale of a key that lies together with this one."""
        head, given = self.tile.kv_head, self.given
        if self.pages is None:
            return lambda key: Float32(given[self.tile.b, head, key])
        loader = self.pages.loader
        entry, slot = loader.entry_of(one)
        # What is no page is read as the nearest: the producer tells of it.
        page = Int32(cutlass.max(cutlass.min(Int64(entry), Int64(loader.pages) - 1), Int64(0)))
        if self.per == "page":
            found = Float32(given[page, head])
            return lambda key: found
        return lambda key: Float32(given[page, head, slot + (key - one)])


class Pages(NamedTuple):
    """Loader of a sequence's keys, and keys that surely lie together."""

    loader: KeyLoader
    rows: int


def scale_of(arguments: Arguments, of: Literal["k", "v"], per: Scaling, tile: Tile, box_rows: int) -> Scale:
    """The scales of keys or of values for a block's tile. box_rows: keys that lie together, where a loader
    finds them."""
    given = getattr(arguments, f"{of}_scale")
    whole, coming, pages = Float32(1.0), None, None
    if per == "head":
        whole = Float32(given[tile.b, tile.kv_head])
    elif per:
        coming = cute.make_rmem_tensor((len(COLUMNS),), Float32)
        if arguments.loader is not None:
            wanted = Wanted(tile.b, tile.kv_head, Int32(0), tile.kv_len)
            pages = Pages(arguments.loader.of(arguments, wanted), min(box_rows, KEYS))
    return Scale(whole, per, given, tile, pages, coming)
