"""Configuration of the Hopper forward kernel, besides hooks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from fa4flex.kernels.plan.lengths import Lengths
from fa4flex.kernels.plan.paging import Boxes, Producing
from fa4flex.kernels.plan.target import ALL_SHARED

HANDED = 8
"""Numbers of 32 bits in which a tile of queries is handed over, those of a Work: whoever takes it finds its
head and sequence for the others as well, whose products wait for what they compute between two tiles."""

PRODUCERS: dict[Producing, int] = {"alone": 1, "apart": 2, "gathering": 4}

PASSING = ("packed",)
"""Lengths in whose tiles warpgroups without rows compute nothing. Of tiles that may end anywhere, 3 % of all
steps are such (128 rows, sequences of 1,000 queries on average) to 10 % (192 rows, 500)."""


@dataclass(frozen=True)
class Config:
    """head_dim, head_dim_v    widths of the tiles in shared memory: multiples of 16 that hold the tensors'
    depth                    instructions of 16 columns of scores: what is behind them is padding
    tile_m, tile_n           queries and keys per tile; each consumer warpgroup owns 64 rows
    kv_stages                tiles of K, and as many of V, in flight
    q_stages                 tiles of queries in flight; of two, the output has room of its own
    producer_registers, consumer_registers   per thread, after the split
    pingpong                 warpgroups take turns at the tensor cores
    rescale_threshold        in log2 units: the output is rescaled only when the row maximum grew by more
    alias_output             the output tile lies where the queries were; otherwise it has room of its own
    persistent               `workers` blocks take tile after tile; otherwise one block per tile
    dynamic                  persistent blocks take the next tile from a counter; otherwise every so-manieth
    workers                  multiprocessors, times the blocks that share one
    longest_first            tiles of queries start from the end of the sequence
    lengths                  "dense", "packed" (cu_seqlens) or "used" (seqused per batch)
    boxes                    keys that one copy brings where they lie in pages
    producing                which producer warps there are
    one_body                 steps that need no mask are taken like those that do, by the same code
    tables                   tiles come from block tables; otherwise from the hooks' spans, or all of them
    row_ends                 with tables: spans of each row's keys whose ends stand beside them
    divisors                 of a tile's number are prepared on the host
    short_tiles              tiles of heads of few keys that are computed next to each other, at least
    group                    heads of queries whose rows share tiles; 1: each head has tiles of its own
    sinks                    a learnable logit per head joins the denominator
    statistics               which of "lse" and "max_scores" are written
    skip                     probability that each row may leave out, by tiles of keys
    blocks                   that share a multiprocessor
    """

    head_dim: int
    head_dim_v: int
    tile_m: int
    tile_n: int
    depth: int | None = None
    kv_stages: int = 2
    producer_registers: int = 24
    consumer_registers: int = 240
    pingpong: bool = True
    rescale_threshold: float = 0.0
    alias_output: bool = True
    persistent: bool = False
    dynamic: bool = False
    workers: int = 132
    longest_first: bool = False
    lengths: Lengths = "dense"
    boxes: Boxes | None = None
    producing: Producing = "alone"
    one_body: bool = False
    tables: bool = False
    sinks: bool = False
    statistics: tuple[str, ...] = ("lse",)
    row_ends: int = 0
    divisors: bool = False
    short_tiles: int = 0
    q_stages: int = 1
    group: int = 1
    skip: float = field(default=0.0, metadata={"default": 0.0})
    blocks: int = field(default=1, metadata={"default": 1})

    splits: ClassVar[bool] = False
    """True if several blocks may share the keys of a tile."""

    @property
    def passes(self) -> bool:
        """True if a warpgroup passes by the keys of a tile of which it has no row."""
        return self.lengths in PASSING and not self.paged

    @property
    def paged(self) -> bool:
        """True if keys and values lie in pages."""
        return self.boxes is not None

    @property
    def consumers(self) -> int:
        """Consumer warpgroups."""
        return self.tile_m // 64

    @property
    def frees_queries(self) -> bool:
        """True if queries are let go of after their last scores, before the output leaves: none is staged
        over them."""
        return not self.alias_output or self.paged

    @property
    def producers(self) -> int:
        """Producer warps."""
        return PRODUCERS[self.producing]

    @property
    def gathers(self) -> bool:
        """True if warps copy rows of keys that lie in pages."""
        return self.producing == "gathering"

    @property
    def gather_warps(self) -> int:
        """Number of these warps."""
        return self.producers if self.gathers else 0

    @property
    def carveout(self) -> int | None:
        """Percentage of a multiprocessor's memory that is shared memory, where blocks have to share it; None
        where the one that there is gets what it asks for."""
        return ALL_SHARED if self.blocks > 1 else None

    @property
    def threads(self) -> int:
        return 128 * (1 + self.consumers)
