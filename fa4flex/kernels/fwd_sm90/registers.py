"""Registers: how a block's are split between its warpgroups, and what a consumer thread needs.

A warpgroup multiplies 64 rows with 128 threads, so a tile of 64 x n float32 takes n / 2 registers of each
thread, and every thread holds parts of two rows (PTX ISA, wgmma register fragments).
"""

from __future__ import annotations

from dataclasses import dataclass

from fa4flex.kernels.plan.errors import PlanError
from fa4flex.kernels.plan.keys import Codes
from fa4flex.kernels.plan.target import Target
from fa4flex.kernels.plan.work import Work

ROWS = 2
"""Rows of the accumulator that a thread has a part of."""

ADDRESSES = 20
"""Descriptors, barrier addresses and phases, tile counters: what such a kernel keeps besides its data."""

CODES_ADDRESSES = 9
"""The same of kernels of codes, whose epilogue computes its addresses itself, as compiled ones have them."""

MOST_SCRATCH = 8
"""Temporaries of a score's expression; the compiler walks a fragment in pieces, so they do not grow."""

LOADS = 8
"""Addresses and values of loads that are under way at once, where each score has one of its own."""


@dataclass(frozen=True)
class Split:
    """Registers per thread of the producer warpgroup and of each consumer warpgroup, after setmaxnreg."""

    producer: int
    consumer: int

    def check(self, consumers: int, target: Target, blocks: int = 1) -> None:
        """PlanError unless setmaxnreg takes both numbers and their sum is there, where so many `blocks` share
        a multiprocessor: it would wait for ever."""
        for name in ("producer", "consumer"):
            count = getattr(self, name)
            least, most, step = target.register_least, target.register_most, target.register_step
            if not least <= count <= most or count % step:
                raise PlanError(
                    f"{count} registers per {name} thread",
                    f"a multiple of {step} in {least}..{most}",
                    "take a split from registers.SPLITS",
                )
        wanted = self.producer + consumers * self.consumer
        pool = target.register_pool((1 + consumers) * blocks) // blocks
        if wanted > pool:
            raise PlanError(
                f"{self.producer} + {consumers} x {self.consumer} = {wanted} registers per thread",
                f"at most {pool}, what {1 + consumers} warpgroups are launched with",
                "take a split from registers.SPLITS",
            )


# consumer warpgroups -> splits: first FlashAttention-3's, then one for producers that compute as they copy
SPLITS: dict[int, tuple[Split, ...]] = {
    1: (Split(56, 240),),
    2: (Split(24, 240), Split(40, 232)),
    3: (Split(32, 160),),
}

SHARED: dict[int, Split] = {2: Split(24, 232), 3: Split(24, 136)}
"""Splits of blocks of one consumer by how many share a multiprocessor."""


def split_registers(consumers: int, producer_computes: bool, blocks: int = 1) -> Split:
    """`producer_computes`: it finds key tiles or sequences itself, beside copying. blocks: that share a
    multiprocessor."""
    return SHARED[blocks] if blocks > 1 else SPLITS[consumers][-1 if producer_computes else 0]


def promotes(codes: Codes) -> bool:
    """True if the output of a tile of keys is summed up apart from that of all others."""
    return codes.transposed and codes.promote


MOST_APART = 128
"""The widest values of which all columns of a tile's output are summed up apart at once."""

NARROW_APART = 64
"""Width of values of which half of the columns are, so that a third consumer has registers: 1.07 to 1.16
times the speed at 16k tokens on an H200, as softmax is what takes the time of narrow heads."""


def apart(head_dim_v: int) -> int:
    """Columns of a tile's output that are summed up apart at once: beside the whole of wider ones there is
    no room for these."""
    if head_dim_v == NARROW_APART:
        return NARROW_APART // 2
    return head_dim_v if head_dim_v <= MOST_APART else 64 if head_dim_v % 64 == 0 else 32


@dataclass(frozen=True)
class Need:
    """An estimate of the registers a consumer thread needs, part by part."""

    parts: tuple[tuple[str, int], ...]

    @property
    def total(self) -> int:
        return sum(count for _, count in self.parts)

    @property
    def accumulators(self) -> int:
        """Scores, probabilities and output alone: what no compiler can do without."""
        accumulators = ("scores", "probabilities", "output", "sums of a tile")
        return sum(count for name, count in self.parts if name in accumulators)

    def check(self, most: int) -> None:
        """PlanError if accumulators alone need more than a thread has."""
        if self.accumulators > most:
            raise PlanError(
                f"{self.explain()} registers per consumer thread",
                f"at most {most} for scores, probabilities and output",
                "use fewer keys per tile",
            )

    def explain(self) -> str:
        return " + ".join(f"{count} {name}" for name, count in self.parts if count) + f" = {self.total}"


def consumer_need(tile_n: int, head_dim_v: int, work: Work, codes: Codes | None = None) -> Need:
    """Registers of a consumer thread at their most: the next scores land while probabilities are used.

    Scores of codes beside values of 16 bits are kept twice where a score mod has terms of rows, as kernels
    are compiled: these spilled 244 to 472 bytes at tiles that had room for one copy."""
    eight = codes is not None and codes.transposed
    twice = codes is not None and not eight and work.row > 0
    sums = apart(head_dim_v) // 2 if codes is not None and promotes(codes) else 0
    hooks = work.uniform + ROWS * (work.row + work.row_ends + work.column) + min(work.element, MOST_SCRATCH)
    return Need(
        (
            ("scores", tile_n // 2),
            ("modified scores", tile_n // 2 * twice),
            ("probabilities", tile_n // 8 if eight else tile_n // 4),
            ("output", head_dim_v // 2),
            ("sums of a tile", sums),
            ("row state", (2 if codes is None else 4) * ROWS),
            ("hooks", hooks),
            ("loads", LOADS if work.loads >= 1 else 0),
            ("addresses", ADDRESSES if codes is None else CODES_ADDRESSES),
        )
    )
