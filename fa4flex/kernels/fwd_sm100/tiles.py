"""Tiles of a Blackwell forward kernel: what a block multiplies at once, and how deep its rings are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fa4flex.errors import UnsupportedError
from fa4flex.kernels.fwd_sm100.config import FRAGMENT, ROWS, staged_columns
from fa4flex.kernels.fwd_sm100.roles import barrier_table
from fa4flex.kernels.plan.memory import ANSWER, BARRIER, NUMBER, Memory, lay_out, tile_bytes
from fa4flex.kernels.plan.problem import Problem
from fa4flex.kernels.plan.sizes import Sizes
from fa4flex.kernels.plan.target import Target
from fa4flex.kernels.plan.topology import WARPGROUP

Pair = tuple[int, int]
WIDTHS = (32, 64, 96, 128, 192)
"""Widths that a tile in shared memory may have."""

WIDEST_OUTPUT = 128
"""Two outputs and two tiles of scores are all of tensor memory."""

WIDEST = 256
"""Columns to which heads wider than these are padded: one output of this width is half of tensor memory."""

KEYS = 128
KEYS_ALONE = 64
"""Keys of a tile of such heads where a CTA works alone: K and V are two deep then, as of 128 keys in a
pair."""
RINGS = ((4, 4), (3, 3), (2, 2), (2, 1))
"""Tiles of K and of V in flight, deepest first."""

ALONE = 256
"""Queries of a sequence up to which a CTA works alone: a pair has room for twice as many."""

CHANNELS = 2
"""Numbers of a channel of transposed values: its scale and its offset. Each correction warp has its own."""

STAGED = 2
"""Chunks of the output on their way from tensor to global memory."""


@dataclass(frozen=True)
class Tiles:
    """q_tiles of 128 queries and tile_n keys per step; head_dim and head_dim_v as padded in shared memory;
    tiles of K and of V in flight; chunks of the output that are staged, 0 where rows go straight to global
    memory; CTAs that multiply together, each of which holds its own queries and half of K and V; bytes of an
    element of q and k, of one of v and of one of the output; places for the scores of a query tile: 1, or 2
    with one query tile; whether the first scores of the second query tile wait for most probabilities of the
    first one, so that the softmax of one runs under what the other one waits for."""

    q_tiles: int
    tile_n: int
    head_dim: int
    head_dim_v: int
    kv_stages: tuple[int, int]
    out_stages: int
    ctas: int = 1
    itemsize: int = 2
    v_itemsize: int = 2
    out_itemsize: int = 2
    score_stages: int = 1
    staggered: bool = False

    @property
    def tile_m(self) -> int:
        """Queries that are worked on together."""
        return self.q_tiles * self.ctas * ROWS

    @property
    def early_keys(self) -> int:
        """Probabilities of so many keys are handed to the product before the rest (FlashAttention-4)."""
        return 3 * self.tile_n // 4 // FRAGMENT * FRAGMENT

    @property
    def transposed(self) -> bool:
        """True if a tile of values has one row of keys per channel."""
        return self.v_itemsize == 1

    @property
    def values(self) -> tuple[int, int]:
        """Rows and columns of a CTA's tile of values."""
        channels = self.head_dim_v // self.ctas
        return (channels, self.tile_n) if self.transposed else (self.tile_n, channels)

    @property
    def last_numbers(self) -> int:
        """Numbers of a row that are handed over at last: transposed values have an offset, which counts as
        far as probabilities add up to 1."""
        return 2 if self.transposed else 1

    @property
    def out_columns(self) -> int:
        """Columns of a staged chunk of the output."""
        return staged_columns(self.head_dim_v, self.out_itemsize)

    def memory(self, target: Target, cancel: bool = False) -> Memory:
        """The shared-memory map of one CTA. `cancel`: the next tile is found in the hardware's answer."""
        k_stages, v_stages = self.kv_stages
        rows = 4 * self.q_tiles * ROWS
        sizes = {
            "next": ANSWER if cancel else NUMBER,
            "freed": BARRIER,
            "columns": NUMBER,
            "scales": rows * self.score_stages,
            "finals": rows * self.last_numbers,
            "channels": CHANNELS * NUMBER * self.head_dim_v * WARPGROUP if self.transposed else 0,
            "q": tile_bytes(self.q_tiles * ROWS, self.head_dim, self.itemsize),
            "k": tile_bytes(self.tile_n, self.head_dim, self.itemsize) // self.ctas * k_stages,
            "v": tile_bytes(*self.values, self.v_itemsize) * v_stages,
            "out": tile_bytes(ROWS, self.out_columns, self.out_itemsize) * self.out_stages,
        }
        barriers = barrier_table(self, "")
        return lay_out({name: size for name, size in sizes.items() if size}, {}, barriers.count, target)


def pad(width: int) -> int:
    """The width of the tile in shared memory that holds rows this wide; TMA fills the rest with zeros."""
    return next(w for w in (*WIDTHS, WIDEST) if w >= width)


def narrow(problem: Problem) -> bool:
    """True if two outputs and two tiles of scores fit in tensor memory."""
    return problem.head_dim <= WIDTHS[-1] and problem.head_dim_v <= WIDEST_OUTPUT


def choose(
    problem: Problem, target: Target, sizes: Sizes, wanted: Pair | None, counted: bool = False
) -> tuple[Tiles, tuple[str, ...]]:
    """The deepest rings that fit, with a staged output where there is room and dense rows to store.
    `counted`: blocks take their tiles from a counter, as the CTAs of a pair cannot."""
    if not narrow(problem):
        return _wide(problem, target, sizes, wanted, counted)
    q_tiles, reason = _query_tiles(wanted, target, sizes)
    widths = pad(problem.head_dim), pad(problem.head_dim_v)
    staged = STAGED if problem.lengths == "dense" else 0
    ctas = 2 if wanted is None and not counted and _pays_in_pairs(problem, widths, sizes) else 1
    reasons = [reason] + [_PAIR] * (ctas == 2)
    for out_stages in (staged, 0):
        for rings in RINGS:
            sizes_of, staggered = _sizes(problem), q_tiles > 1 and problem.itemsize == 1
            tiles = Tiles(q_tiles, KEYS, *widths, rings, out_stages, ctas, **sizes_of, staggered=staggered)
            if tiles.memory(target).total <= target.shared_memory:
                return tiles, tuple(reasons)
    raise AssertionError(f"no rings fit heads of {widths}")


def _sizes(problem: Problem) -> dict[str, Any]:
    """Bytes of elements."""
    return {
        "itemsize": problem.itemsize,
        "v_itemsize": problem.v_itemsize,
        "out_itemsize": problem.out_itemsize,
    }


_PAIR = "pairs of CTAs: each reads half of K and V from shared memory, which one alone would keep busy"


def _pays_in_pairs(problem: Problem, widths: Pair, sizes: Sizes) -> bool:
    """True if all tiles of queries visit all keys: of others, the two halves of a pair differ in work."""
    plain = problem.mask_form == "none" and problem.lengths == "dense"
    # Each CTA holds half of V's columns: whole blocks of 64.
    wide = widths[0] > 64 and widths[1] % 128 == 0
    return plain and wide and sizes.q.more_than(ALONE, right="any")


_AHEAD = (
    "one tile of queries per CTA: scores of the next keys are multiplied while the softmax of these is taken"
)


def _wide(
    problem: Problem, target: Target, sizes: Sizes, wanted: Pair | None, counted: bool
) -> tuple[Tiles, tuple[str, ...]]:
    """Tiles of heads of which two outputs do not fit."""
    widest = max(problem.head_dim, problem.head_dim_v)
    if widest > WIDEST:
        raise UnsupportedError(
            f"heads of {problem.head_dim} and {problem.head_dim_v} (v) on {target.name}",
            f"at most {WIDEST}: the output and two tiles of scores are all of tensor memory",
            "use narrower heads, or run this one on a Hopper GPU or on a CPU",
        )
    tile, ctas = _wide_tile(problem, target, sizes, wanted, counted)
    widths = pad(problem.head_dim), WIDEST
    more = {**_sizes(problem), "score_stages": 2}
    for out_stages in (STAGED if problem.lengths == "dense" else 0, 0):
        for rings in RINGS:
            tiles = Tiles(1, tile[1], *widths, rings, out_stages, ctas, **more)
            if tiles.memory(target).total <= target.shared_memory:
                return tiles, (_AHEAD, *[_PAIR] * (ctas == 2))
    raise AssertionError(f"no rings fit heads of {widths}")


def _wide_tile(
    problem: Problem, target: Target, sizes: Sizes, wanted: Pair | None, counted: bool
) -> tuple[Pair, int]:
    """Queries and keys of a tile, and the CTAs that have it. Pairs where there are queries for both, and
    where sequences are dense: values past the ends of others are cleared by the CTA that multiplies, which
    does not reach the half that the other one holds."""
    legal = {(ROWS, KEYS_ALONE): 1}
    if problem.lengths == "dense" and not counted:
        legal[2 * ROWS, KEYS] = 2
    tile = wanted
    if tile is None:
        tile = min(legal) if sizes.q.at_most(ROWS, right="any") else max(legal)
    if tile not in legal:
        raise UnsupportedError(
            f"tile={tile} for heads of {problem.head_dim} and {problem.head_dim_v} (v) on {target.name}",
            f"one of {sorted(legal)}: tiles of 256 queries are those of pairs of CTAs, which take no"
            " sequences of different lengths, and no tiles from a counter",
            "use one of these, or leave it at None",
        )
    return tile, legal[tile]


def _query_tiles(wanted: Pair | None, target: Target, sizes: Sizes) -> tuple[int, str]:
    if wanted is None and sizes.q.at_most(ROWS, right="any"):
        return 1, f"one tile of queries: no sequence has more than {ROWS}"
    if wanted is None:
        return 2, "two tiles of queries: one is multiplied while the softmax of the other is taken"
    legal = {(ROWS * n, KEYS): n for n in (1, 2)}
    if wanted not in legal:
        raise UnsupportedError(
            f"tile={wanted} on {target.name}",
            f"one of {sorted(legal)}",
            "use one of these, or leave it at None",
        )
    return legal[wanted], f"{wanted[0]} queries x {wanted[1]} keys: the schedule asks for it"
