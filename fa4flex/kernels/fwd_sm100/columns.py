"""Tensor memory of the Blackwell forward kernel: which columns hold what, by query tile."""

from __future__ import annotations

from fa4flex.kernels.fwd_sm100.config import TensorMemory
from fa4flex.kernels.fwd_sm100.tiles import Tiles
from fa4flex.kernels.plan.target import Target
from fa4flex.kernels.plan.tensor_memory import Columns, Range


def lay_out_columns(tiles: Tiles, target: Target) -> Columns:
    """Scores, then outputs. Probabilities, two or four in a column, lie over the second half of
    their scores. There is room for the scores of two query tiles, or for those of one in two stages."""
    n, dv, early, each = tiles.tile_n, tiles.head_dim_v, tiles.early_keys, 4 // tiles.v_itemsize
    staged = (tiles.score_stages, n) if tiles.score_stages > 1 else ()
    scores, probabilities, outputs = [], [], []
    for i in range(tiles.q_tiles):
        start = i * n + n // 2
        scores.append(Range(f"S {i}", i * n, n, *staged))
        probabilities.append(Range(f"P {i} early", start, early // each, *staged))
        probabilities.append(Range(f"P {i} late", start + early // each, (n - early) // each, *staged))
        outputs.append(Range(f"O {i}", 2 * n + i * dv, dv))
    return Columns((*scores, *probabilities, *outputs), target.tensor_columns)


def first_columns(columns: Columns) -> TensorMemory:
    """First columns by query tile."""

    def firsts(letter: str) -> tuple[int, ...]:
        return tuple(r.first for r in columns.ranges if r.name[0] == letter and not r.name.endswith("late"))

    return TensorMemory(firsts("S"), firsts("P"), firsts("O"), columns.ranges[0].apart)
