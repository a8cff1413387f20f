"""Configuration of the Hopper backward kernel, besides hooks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from fa4flex.kernels.common.dq_layout import Order
from fa4flex.kernels.plan.lengths import Lengths
from fa4flex.kernels.plan.target import ALL_SHARED

Split = Literal["keys", "columns", "products"]

KEYS = 64
"""Keys of one consumer warpgroup: what one wgmma instruction spans."""

EIGHT = 8
"""Columns of an accumulator, or rows of its transpose, that lie together."""

SWIZZLES = (64, 32, 16)
"""Columns of 16 bits that the patterns of shared memory span."""


class Swizzles(NamedTuple):
    """Columns of a block of q, dout, k and v in shared memory."""

    q: int
    dout: int
    k: int
    v: int


@dataclass(frozen=True)
class Config:
    """head_dim, head_dim_v    widths of the tiles in shared memory: multiples of 32 that hold the tensors'
    depths                   instructions of 16 columns of scores, and of dP: what is behind them is padding
    columns                  of dQ that are not padding, of which nothing is cleared, added up or read
    tile_m                   queries per step, a multiple of 64; of 16 where dQ is transposed
    tile_n                   keys per block, or per pair of them
    split                    what consumer warpgroups share out: "keys", 64 each, and hold their dK and dV; or
                             the "columns" of dK and dV of 64 keys, and the queries of a step for its scores;
                             or the "products" of 64 keys: S' and dV are one's, dP' and dK the other's
    keeps_k                  whether K lies in registers for S', where products are shared out; V always does
    q_stages, do_stages      tiles of Q, and of dO, in flight
    dq_stages                tiles of dQ on their way to global memory
    producer_registers, consumer_registers   per thread, after the split
    masked                   whether tiles come from block tables; otherwise all of them
    one_body                 whether steps that need no mask are taken like those that do, by the same code
    deterministic            whether sums of dQ are added up in one order
    lengths                  "dense", "packed" (cu_seqlens) or "used" (seqused per batch)
    stores_dq                whether a block has all keys of its queries, and writes their dQ itself
    dk_by_ds                 whether dK of persistent blocks leaves by the memory of dS: it does not wait for
                             the writer
    clears                   whether blocks clear sums of dQ for tiles of keys that come later
    ctas                     CTAs of a tile of keys: of a pair, which shares out products, each has 64 keys,
                             and half of the columns of dQ for the keys of both
    workers                  multiprocessors, times the blocks that share one, where blocks are persistent and
                             take tiles of keys from a counter; 0 where each tile has a block
    blocks                   that share a multiprocessor
    """

    head_dim: int
    head_dim_v: int
    depths: tuple[int | None, int | None] = (None, None)
    columns: int | None = None
    tile_m: int = 64
    tile_n: int = 128
    split: Split = "keys"
    keeps_k: bool = False
    q_stages: int = 2
    do_stages: int = 2
    dq_stages: int = 2
    producer_registers: int = 24
    consumer_registers: int = 240
    masked: bool = False
    one_body: bool = False
    lengths: Lengths = "dense"
    deterministic: bool = False
    stores_dq: bool = False
    dk_by_ds: bool = False
    clears: bool = False
    workers: int = 0
    ctas: int = 1
    blocks: int = field(default=1, metadata={"default": 1})

    @property
    def carveout(self) -> int | None:
        """Percentage of a multiprocessor's memory that is shared memory, where blocks have to share it; None
        where the one that there is gets what it asks for."""
        return ALL_SHARED if self.blocks > 1 else None

    @property
    def persistent(self) -> bool:
        """dK and dV then leave by the memory of dS and dQ: the next tiles of Q and dO come meanwhile."""
        return self.workers > 0

    @property
    def takes_first(self) -> bool:
        """True if blocks take their first tile of keys from the counter, too: what a tile waits for (cleared
        sums, a turn) then comes from tiles that have been taken before it."""
        return self.persistent and (self.clears or self.deterministic)

    @property
    def told(self) -> int:
        """Warps beside consumers that a persistent block's producer tells of its next tile of keys."""
        return 2 if self.clears else 1

    @property
    def ragged(self) -> bool:
        """True if sequences may end before the tensors that hold them."""
        return self.lengths != "dense"

    @property
    def block_keys(self) -> int:
        """Keys of one block."""
        return self.tile_n // self.ctas

    @property
    def dq_parts(self) -> int:
        """Parts of a tile of dQ that one block makes, of two that there are."""
        return self.consumers // self.ctas

    @property
    def consumers(self) -> int:
        """Consumer warpgroups."""
        return self.tile_n // KEYS if self.split == "keys" else 2

    @property
    def queries(self) -> int:
        """Query rows per step whose scores one warpgroup computes."""
        return self.tile_m // self.consumers if self.split == "columns" else self.tile_m

    @property
    def threads(self) -> int:
        return 128 * (1 + self.consumers)

    @property
    def turn_rows(self) -> int:
        """Rows, or as many numbers, that take turns by themselves: one warp adds all of a tile of dQ, or of a
        pair, half of its columns."""
        return self.tile_m // self.ctas

    @property
    def split_columns(self) -> bool:
        """True if warpgroups share the rows of dQ and take half of its columns each; otherwise each takes its
        own rows."""
        return self.tile_m < 64 * self.consumers

    @property
    def transposes_dq(self) -> bool:
        """True if dQ' = K' dS' is what is multiplied: columns of dQ are then the 64 rows of an instruction,
        of which queries need not be a whole number. dS lies along the keys."""
        return self.tile_m % KEYS != 0

    @property
    def rounds_first(self) -> bool:
        """P' is rounded to 16 bits, as dV's product has it, before dP' is multiplied by it. This adds a
        quarter to the rounding error of dQ and dK; but in steps of 80 queries, 32 bits spill registers, and
        took up to 17 % longer."""
        return self.tile_m == 80

    @property
    def dq_shapes(self) -> tuple[tuple[int, int], ...]:
        """(rows, columns) of each product for dQ of one warpgroup, or of one block of a pair. Where
        dQ is transposed, 64 columns are the least: of the last ones, where they cannot be dealt out evenly,
        warpgroups have some rows each."""
        if not self.split_columns:
            return ((self.tile_m // self.consumers, self.head_dim),)
        if not self.transposes_dq or self.head_dim // KEYS % self.consumers == 0:
            return ((self.tile_m, self.head_dim // self.consumers),)
        even = self.head_dim // KEYS // self.consumers * KEYS
        return (self.tile_m, even), (self.tile_m // self.consumers, KEYS)

    def dq_tiles(self, w: Any) -> tuple[tuple[Any, Any], ...]:
        """Positions of the products of warpgroup w, or of block w of a pair, in dQ, in tiles of the product's
        shape."""
        first = (0, w) if self.split_columns else (w, 0)
        return first, *((w, self.head_dim // columns - 1) for _, columns in self.dq_shapes[1:])

    def dq_numbers(self, w: Any) -> tuple[tuple[Any, int], ...]:
        """Range of each product's numbers among those of a tile of dQ: the first one, and how many they
        are."""
        found, first = [], 0
        for rows, columns in self.dq_shapes:
            count = rows * columns
            found.append((first + w * count, count))
            first += self.consumers * count
        return tuple(found)

    def dq_added(self, w: Any) -> tuple[int, ...]:
        """Numbers of each product that are added to sums: eight columns lie together, and those that are
        padding behind all others."""
        counts = tuple(count for _, count in self.dq_numbers(w))
        if self.columns is None or self.transposes_dq or not isinstance(w, int):
            return counts
        ((_, columns),), ((_, across),) = self.dq_shapes, self.dq_tiles(w)
        used = min(columns, max(self.columns - across * columns, 0))
        return (counts[0] // columns * (-(-used // EIGHT) * EIGHT),)

    def dq_rows(self, w: Any) -> tuple[Any, ...]:
        """First row of each product for dQ of a warpgroup, or of one block of a pair."""
        rows, *others = (rows for rows, _ in self.dq_shapes)
        return (0 if self.split_columns else w * rows), *(w * n for n in others)

    @property
    def dq_room(self) -> int:
        """float32 of shared memory that a warpgroup's part of a tile of dQ has, half of them if it is stored:
        of persistent blocks, its dK, or dV, in 16 bits must fit there too."""
        numbers = self.tile_m * self.head_dim // self.consumers // (2 if self.stores_dq else 1)
        return max(numbers, KEYS * self.head_dim // 2) if self.persistent else numbers

    @property
    def dq_order(self) -> Order:
        """Part by part, as an accumulator's registers lie: of lane l of a warpgroup, two columns from 2 (l %
        4) on of a row and of the row 8 below, then the same 8 columns further. Where dQ is transposed,
        rows for columns."""
        if self.transposes_dq:
            return Order(
                (2, 2, 4, 8, 4, self.tile_m // 8, self.head_dim // KEYS),
                rows=(1, 0, 2, 0, 0, 8, 0),
                columns=(0, 8, 0, 1, 16, 0, KEYS),
            )
        ((rows, columns),) = self.dq_shapes
        down, across = (0, columns) if self.split_columns else (rows, 0)
        return Order(
            (2, 2, 4, 8, 4, columns // 8, self.consumers),
            rows=(0, 8, 0, 1, 16, 0, down),
            columns=(1, 0, 2, 0, 0, 8, across),
        )

    @property
    def swizzles(self) -> Swizzles:
        q, dout = self.head_dim, self.head_dim_v
        if self.split == "columns":
            q, dout = q // self.consumers, dout // self.consumers
        _, k = self.dq_shapes[0]
        return Swizzles(
            swizzle(self.head_dim, q),
            swizzle(self.head_dim_v, dout),
            swizzle(self.head_dim, k),
            swizzle(self.head_dim_v, self.head_dim_v),
        )


def swizzle(width: int, part: int) -> int:
    """The widest pattern of which rows this wide have a whole number, and the `part` of the columns that one
    instruction reads along them a whole number too, or lies in one."""
    return next(s for s in SWIZZLES if width % s == 0 and (part % s == 0 or s % part == 0))
