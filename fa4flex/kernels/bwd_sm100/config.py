"""Configuration of the Blackwell backward kernel, besides hooks."""

from __future__ import annotations

from dataclasses import dataclass

from fa4flex.kernels.common.dq_layout import Order
from fa4flex.kernels.plan.lengths import Lengths

ROWS = 128
"""Keys of a block, and queries of a step: what one tcgen05.mma spans."""

HALF = ROWS // 2
"""Queries of a step that one of the two compute warpgroups takes, of all keys."""

COLUMNS = 512
"""Columns of tensor memory, 32 bits wide: a block has all of them."""

FRAGMENT = 32
"""Columns that a thread takes from tensor memory at a time: queries, or elements of a head."""


@dataclass(frozen=True)
class Registers:
    """Per thread, after the split: of the warpgroup that hands on dQ, of both that compute, and of the one
    that holds the warps which load and multiply."""

    reduce: int = 72
    compute: int = 168
    other: int = 104


@dataclass(frozen=True)
class TensorMemory:
    """First columns. Of probabilities and dS, which lie over scores and dP, by compute warpgroup; dQ takes
    the columns of dP, too."""

    scores: int
    probabilities: tuple[int, int]
    dv: int
    dprob: int
    ds: tuple[int, int]
    dk: int
    dq: int


@dataclass(frozen=True)
class Config:
    """head_dim, head_dim_v    widths of the tiles in shared memory: multiples of 32 that hold the tensors'
    depths                   instructions of 16 columns of scores, and of dP: what is behind them is padding
    memory                   where in tensor memory what lies
    q_stages, do_stages      tiles of Q, and of dO, in flight
    dq_stages                pieces of dQ, 32 rows by 32 columns, that a warp has staged in shared memory
    registers                of each kind of warpgroup
    masked                   whether tiles come from block tables; otherwise all of them
    lengths                  "dense", "packed" (cu_seqlens) or "used" (seqused per batch)
    deterministic            whether sums of dQ are added up in one order
    """

    head_dim: int
    head_dim_v: int
    depths: tuple[int, int]
    memory: TensorMemory
    q_stages: int = 2
    do_stages: int = 1
    dq_stages: int = 2
    registers: Registers = Registers()
    masked: bool = False
    lengths: Lengths = "dense"
    deterministic: bool = False

    persistent = False
    stores_dq = False
    clears = takes_first = False
    columns = None

    @property
    def ragged(self) -> bool:
        """True if sequences may end before the tensors do."""
        return self.lengths != "dense"

    @property
    def ctas(self) -> int:
        """Number of CTAs that take a tile of keys together."""
        return 1

    @property
    def tile_m(self) -> int:
        """Queries per step."""
        return ROWS

    @property
    def tile_n(self) -> int:
        """Keys that a CTA has, or all of them together."""
        return ROWS * self.ctas

    @property
    def dq_parts(self) -> int:
        """Number of parts of a step's dQ, one for each warp that hands it on."""
        return 4 * self.ctas

    @property
    def turn_rows(self) -> int:
        """Each of these warps adds as many numbers of dQ as so many rows have, and waits for those who add to
        the same ones alone."""
        return ROWS // self.dq_parts

    @property
    def dq_order(self) -> Order:
        """Order of a step's dQ in memory: each warp of the warpgroup that hands it on has 32 rows, a row per
        lane, and writes four columns at a time."""
        return Order((4, 32, self.head_dim // 4, 4), rows=(0, 1, 0, 32), columns=(1, 0, 4, 0))
