"""Tiles of the Hopper forward kernel for wide heads: sizes, what fits, and where it lies."""

from __future__ import annotations

from dataclasses import dataclass

from fa4flex.errors import UnsupportedError
from fa4flex.kernels.fwd_sm90.config import HANDED
from fa4flex.kernels.fwd_sm90.tiles import Tiles
from fa4flex.kernels.fwd_wide_sm90.config import BUFFERS, HALVES, ROWS
from fa4flex.kernels.fwd_wide_sm90.roles import barrier_table
from fa4flex.kernels.plan.memory import NUMBER, Memory, lay_out, tile_bytes
from fa4flex.kernels.plan.problem import Problem
from fa4flex.kernels.plan.target import Target

BLOCK = 64
"""Widths of tiles are multiples of it: rows of q and k are whole patterns of 128 bytes, and a warpgroup's
half of the columns of v whole patterns of 64."""

CANDIDATES = ((64, 2), (64, 1), (32, 2), (32, 1))
"""(keys of a tile, stages) in order of preference: queries are read once for each tile of keys, by both
warpgroups, so that 32 keys take twice as long as 64 to multiply; a second stage hides copies."""


@dataclass(frozen=True)
class Choice:
    """Tiles, stages, and why."""

    tiles: Tiles
    kv_stages: int
    reason: str


def pad(width: int) -> int:
    """Columns of the tile that holds rows this wide; TMA fills the rest with zeros."""
    return -(-width // BLOCK) * BLOCK


def memory_of(tiles: Tiles, kv_stages: int, dynamic: bool, target: Target) -> Memory:
    """The shared-memory map of a block. dynamic: the next tile is handed over in it."""
    n, size = tiles.tile_n, tiles.itemsize
    sizes = {"next": NUMBER * HANDED} if dynamic else {}
    sizes |= {
        "q": tile_bytes(ROWS, tiles.head_dim, size),
        "k": tile_bytes(n, tiles.head_dim, size) * kv_stages,
        "v": tile_bytes(n, tiles.head_dim_v, size) * kv_stages,
        "p": tile_bytes(ROWS, n, size) * BUFFERS,
        "statistics": 2 * HALVES * ROWS * NUMBER,
    }
    return lay_out(sizes, {}, barrier_table(tiles, kv_stages, dynamic).used, target)


def choose(problem: Problem, wanted: tuple[int, int] | None, target: Target) -> Choice:
    """The first candidate that fits, or the one with the tile that a schedule asks for. Raises
    UnsupportedError where that does not fit or is none."""
    offers = []
    for keys, stages in CANDIDATES:
        tiles = Tiles(ROWS, keys, pad(problem.head_dim), pad(problem.head_dim_v))
        if memory_of(tiles, stages, True, target).total > target.shared_memory:
            continue
        if wanted in (None, (ROWS, keys)):
            asked = "the schedule asks for it" if wanted else "the most keys whose tiles fit in shared memory"
            return Choice(tiles, stages, f"{ROWS} x {keys}: {asked}")
        offers.append((ROWS, keys))
    raise UnsupportedError(
        f"tile={wanted} for heads of {problem.head_dim} and {problem.head_dim_v} (v)",
        f"one of {sorted(set(offers))}: tiles that fit in shared memory, of rows that two warpgroups share",
        f"use tile={offers[0]}, or leave it at None",
    )
