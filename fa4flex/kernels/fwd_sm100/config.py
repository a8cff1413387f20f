"""Configuration of the Blackwell forward kernel, besides hooks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from fa4flex.kernels.fwd_sm100.roles import Handed
from fa4flex.kernels.plan.lengths import Lengths

ROWS = 128
"""Query rows of one tile: what one tcgen05.mma spans, and a softmax warpgroup owns, a row per thread."""

COLUMNS = 512
"""Columns of tensor memory, 32 bits wide: a block has all of them."""

FRAGMENT = 32
"""Keys that a softmax thread takes from tensor memory, modifies and turns into probabilities at a time."""

InPlace = Literal["none", "masked", "all"]

CORRECTED = 16
"""Columns of the output that a correction thread holds at a time."""


def staged_columns(width: int, itemsize: int) -> int:
    """Columns of a staged chunk of an output of this width: rows of 128 bytes, which is as far as swizzles
    reach, or of 64 where the width is no multiple of these."""
    return 64 if itemsize == 2 and width % 64 == 0 else 32


@dataclass(frozen=True)
class Registers:
    """Per thread, after the split: of both softmax warpgroups, the correction warpgroup, and the one that
    holds the warps which load, multiply, store and schedule. `idle`: of a softmax warpgroup that never has a
    query tile, where that has fewer than the other."""

    softmax: int = 192
    correction: int = 80
    other: int = 48
    idle: int = field(default=0, metadata={"default": 0})


@dataclass(frozen=True)
class TensorMemory:
    """First columns, by query tile, of scores, of the probabilities that lie over them, and of outputs. Of
    scores in several stages, and their probabilities, each stage begins `apart` columns after the last."""

    scores: tuple[int, ...]
    probabilities: tuple[int, ...]
    outputs: tuple[int, ...]
    apart: int = field(default=0, metadata={"default": 0})


@dataclass(frozen=True)
class Exponential:
    """Exponentials that are polynomials of `degree` on FMA units instead of special functions: of every
    `every` pairs of keys the last `count`, in fragments from `skip` on but for the last. 0 switches it
    off.
    """

    degree: int = 3
    every: int = 8
    count: int = 2
    skip: int = 1


@dataclass(frozen=True)
class Config:
    """head_dim, head_dim_v    widths of the tiles in shared memory: multiples of 16 that hold the tensors'
    depth                    instructions of 16 columns of scores: what is behind them is padding
    ctas                     that multiply together: 1, or 2 with twice the rows and half of K and V each
    q_tiles                  query tiles of 128 rows per CTA, each with a softmax warpgroup: 2, or 1
    tile_n                   keys per tile
    kv_stages                tiles of K, and as many of V, in flight
    out_stages               chunks of the output, 128 rows by 64 columns, staged in shared memory
    early_keys               probabilities of so many keys are handed to the product before the rest; or all
    rescale_threshold        in log2 units: the output is rescaled only when a row maximum grew by more
    in_place                 of which tiles scores are modified in tensor memory, by the code of one piece
    piece                    columns of those scores
    persistent               one block per multiprocessor takes tile after tile; otherwise one block per tile
    dynamic                  persistent blocks take the next tile from a counter; otherwise every so-manieth
    cancel                   a block per tile is launched; those that run take over tiles of those that wait
    workers                  multiprocessors
    longest_first            tiles of queries start from the end of the sequence
    lengths                  "dense", "packed" (cu_seqlens) or "used" (seqused per batch)
    paged                    keys and values lie in pages
    box_rows                 keys that one copy brings, where they lie in pages
    tables                   tiles come from block tables; otherwise from the hooks' spans, or all of them
    sinks                    a learnable logit per head joins the denominator
    statistics               which of "lse" and "max_scores" are written
    skip                     probability that each row may leave out, by tiles of keys
    staggered                first scores of the second query tile wait for probabilities of the first one
    score_stages             places for a query tile's scores: with 2, the next ones are multiplied while the
                             softmax of these is taken
    """

    head_dim: int
    head_dim_v: int
    depth: int
    memory: TensorMemory
    ctas: int = 1
    q_tiles: int = 2
    tile_n: int = 128
    kv_stages: tuple[int, int] = (2, 2)
    out_stages: int = 2
    early_keys: int = 96
    registers: Registers = Registers()
    exponential: Exponential = Exponential()
    rescale_threshold: float = 8.0
    in_place: InPlace = "none"
    piece: int = FRAGMENT
    persistent: bool = True
    dynamic: bool = False
    cancel: bool = False
    workers: int = 148
    longest_first: bool = False
    lengths: Lengths = "dense"
    paged: bool = False
    box_rows: int = 0
    tables: bool = False
    sinks: bool = False
    statistics: tuple[str, ...] = ("lse",)
    skip: float = field(default=0.0, metadata={"default": 0.0})
    score_stages: int = field(default=1, metadata={"default": 1})
    staggered: bool = field(default=False, metadata={"default": False})

    splits: ClassVar[bool] = False
    """True if several blocks may share the keys of a tile."""

    @property
    def tile_m(self) -> int:
        """Query rows that are worked on together."""
        return self.q_tiles * self.ctas * ROWS

    @property
    def clears(self) -> bool:
        """True if values past the end of a sequence are to be cleared."""
        return self.lengths != "dense"

    @property
    def last_numbers(self) -> int:
        """Numbers of a row that the softmax hands to the correction warps at last."""
        return 1

    @property
    def handed(self) -> Handed:
        """Source of the next tile."""
        return "answer" if self.cancel else "number" if self.dynamic else ""

    @property
    def next_words(self) -> int:
        """Words of 32 bits in which that warp hands on the next tile: a number, or the hardware's answer."""
        return 4 if self.cancel else 1
