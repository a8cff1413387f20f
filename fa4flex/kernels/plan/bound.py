"""The least time a kernel can take: the slowest of the chip's units, each at its full rate.

FlashAttention-3 (Shah et al. 2024, section 3.1) explains the pipeline by two of these rates: an H100 makes
989 TFLOP/s of 16-bit products, but 3.9 T/s of exponentials. Here every unit is counted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fa4flex.errors import InputError
from fa4flex.kernels.plan.problem import Problem
from fa4flex.kernels.plan.target import Target
from fa4flex.kernels.plan.work import Work

SHORTEST = 1e-12
"""Shorter times (s) are not listed."""


@dataclass(frozen=True)
class Size:
    """A launch: batch, query heads, lengths, the share of all (query, key) pairs that lies in tiles that are
    computed, KV heads (None: as many as query heads), and the share of keys in a tile that is computed. A
    share of None is not known: all are counted."""

    b: int
    h: int
    q_len: int
    kv_len: int
    density: float | None = 1.0
    kv_heads: int | None = None
    keys_read: float | None = 1.0

    def __post_init__(self) -> None:
        if min(self.b, self.h, self.q_len, self.kv_len, 1 if self.kv_heads is None else self.kv_heads) < 1:
            raise InputError(f"{self!r}", "at least 1 of everything", "pass the sizes of your tensors")
        if not 0 < self.share <= 1:
            raise InputError(
                f"density={self.density}", "0 < density <= 1", "pass the share of computed tiles"
            )

    @property
    def share(self) -> float:
        """Share of the pairs that is counted."""
        return 1.0 if self.density is None else self.density

    @property
    def scores(self) -> float:
        return self.b * self.h * self.q_len * self.kv_len * self.share

    def explain(self) -> str:
        share = (
            "all tiles are counted, as lengths or contents of a call decide which are computed"
            if self.density is None
            else f"{100 * self.density:.1f} % of the tiles are computed"
        )
        return f"batch={self.b}, heads={self.h}, {share}"


@dataclass(frozen=True)
class Bound:
    """`times`: seconds that each unit needs, by name. `flops`: of both products, counted unpadded."""

    times: tuple[tuple[str, float], ...]
    flops: float

    @property
    def limit(self) -> str:
        """The unit that the kernel cannot be faster than."""
        return max(self.times, key=lambda pair: pair[1])[0]

    @property
    def seconds(self) -> float:
        return max(seconds for _, seconds in self.times)

    @property
    def tflops(self) -> float:
        """10^12 FLOP per second at that time."""
        return self.flops / self.seconds / 1e12

    def explain(self) -> str:
        listed = [(name, seconds) for name, seconds in self.times if seconds > SHORTEST]
        each = ", ".join(f"{name} {_digits(seconds * 1e6)} us" for name, seconds in listed)
        return f"at best {self.tflops:.0f} TFLOP/s, limited by {self.limit} ({each})"


def _digits(value: float) -> str:
    return f"{value:.1f}" if value >= 1 else f"{value:.2g}"


def expected_bound(
    problem: Problem, widths: tuple[int, int], work: Work, target: Target, size: Size
) -> Bound:
    """The bound of one launch, where tiles are so wide (q and k, v). Units are taken to overlap perfectly,
    and the grid to fill the chip."""
    flops_per_score = 2 * sum(widths)
    times = (
        ("tensor cores", size.scores * flops_per_score / target.peak_flops),
        ("special functions", size.scores * work.special / target.per_second(target.special_results)),
        ("fp32 arithmetic", size.scores * work.fp32 / target.per_second(target.fp32_results)),
        ("loads", size.scores * work.loads / target.per_second(target.load_lanes)),
        ("HBM", hbm_bytes(problem, work, size) / target.hbm_bytes_per_second),
    )
    return Bound(times, 2 * (problem.head_dim + problem.head_dim_v) * size.scores)


def hbm_bytes(problem: Problem, work: Work, size: Size) -> float:
    """Bytes that must move at least once: q, k, v, output, statistics, and biases of every pair."""
    kv_heads = size.h if size.kv_heads is None else size.kv_heads
    of_row = problem.head_dim * problem.itemsize + problem.head_dim_v * problem.out_itemsize
    of_k, of_v = problem.head_dim / problem.shares.k, problem.head_dim_v / problem.shares.v
    of_key = of_k * problem.kv_itemsize + of_v * problem.v_itemsize
    keys = size.kv_len * (1.0 if size.keys_read is None else size.keys_read)
    tensors = size.b * (size.h * size.q_len * of_row + kv_heads * keys * of_key)
    statistics = 4 * len(problem.statistics) * size.b * size.h * size.q_len
    pairs = size.q_len * size.kv_len * size.share
    biases = sum(
        x.itemsize * (size.b if x.batch else 1) * (size.h if x.heads else 1) * pairs for x in work.bias
    )
    return tensors + statistics + biases


def explain_bound(bound: Callable[[Size], Bound], size: Size | None) -> str:
    """The bound of a launch of `size` in words; for None, that of long rows of keys."""
    if size is None:
        times = bound(Size(1, 1, 1 << 20, 1 << 20)).explain()
        return f"bound: {times.split(' (')[0]} for long sequences"
    return f"bound: {bound(size).explain()}; {size.explain()}"
