"""Warps of a block, and the barriers between them, as data."""

from __future__ import annotations

from typing import Literal, Protocol

from fa4flex.kernels.plan.barriers import BarrierTable, NamedRow, Per, Row, tile_ring
from fa4flex.kernels.plan.topology import WARP, WARPGROUP

CORRECTION = 8
"""First warp of the warpgroup that corrects outputs; the two before take the softmax of a query tile each."""

MULTIPLY, STORE, LOAD, SCHEDULE = 12, 13, 14, 15
"""Warps."""

WARPS = 16

ALLOCATED = NamedRow(
    "allocated",
    1,
    WARP * (CORRECTION + WARPGROUP + 1),
    "tensor memory is there, for softmax and correction warpgroups, and the warp that multiplies",
)
FINISHED = NamedRow(
    "finished", 2, WARP * WARPGROUP, "the correction warpgroup has read the last of tensor memory"
)

Handed = Literal["", "number", "answer"]
"""Source of the next tile: none, where blocks take tiles in turn; a number that a warp takes from a counter;
or the hardware's answer, for which a warp asks."""


class Sizes(Protocol):
    """Numbers of query tiles of 128 rows, and of stages, those of scores among them."""

    @property
    def q_tiles(self) -> int: ...
    @property
    def kv_stages(self) -> tuple[int, int]: ...
    @property
    def out_stages(self) -> int: ...
    @property
    def score_stages(self) -> int: ...


def barrier_table(sizes: Sizes, handed: Handed, ctas: int = 1) -> BarrierTable:
    """Barriers of a block, or of a CTA of a pair.

    The warps of the softmax warpgroup hand over rows to the correction warps with the same rows.
    """
    n, (k_stages, v_stages) = sizes.q_tiles, sizes.kv_stages
    tile, warp = Per(n), Per(n, by_warp=True)
    scores, scales = Per(n, sizes.score_stages), Per(n, sizes.score_stages, by_warp=True)
    staged, chunk = sizes.out_stages > 0, Per(stages=max(sizes.out_stages, 1))
    # Of softmax and correction, those that multiply and load, and the one that stores.
    readers = WARPGROUP * (n + 1) + 2 + staged
    if handed == "answer":
        # The warp that asks reads the answer, too. Of a pair, both CTAs do, but only the first multiplies.
        readers = ctas * (readers + 1) - (ctas - 1)
    # Scores that are there tell that the output before them was added to, unless they are ahead of it.
    o_full = "the output is complete" if sizes.score_stages == 1 else "the output is added to"
    both, by_all = ctas * WARPGROUP, "softmax, correction, multiply, load, store, scheduler"
    rows = (
        Row("q_full", 1, "load", "queries have come", tile, "q", first=True),
        Row("q_empty", 1, "multiply", "their last scores are multiplied", tile, "q"),
        Row("s_full", 1, "multiply", "scores are there, and all earlier products are done", scores),
        Row(
            "p_early",
            2 * both,
            "softmax, correction",
            "the first probabilities are there and the output may be added to",
            scores,
            first=True,
        ),
        Row("p_late", both, "softmax", "the other probabilities are there", scores, first=True),
        Row("o_full", 1, "multiply", o_full, tile),
        Row(
            "scale_full",
            1,
            "softmax",
            "what the output is to be multiplied by before the next product",
            scales,
        ),
        Row("final_full", 1, "softmax", "what it is to be multiplied by at last", warp, "finals"),
        Row("final_empty", 1, "correction", "that has been read", warp, "finals"),
        Row("out_full", WARPGROUP, "correction", "a chunk of outputs is staged", chunk, "out", used=staged),
        Row("out_empty", 1, "store", "its store has read it", chunk, "out", used=staged),
        Row("next_full", 1, "scheduler", "the next tile is known", ring="next", used=bool(handed)),
        Row("next_empty", readers, by_all, "all have read it", ring="next", first=True, used=bool(handed)),
        *tile_ring("k", k_stages, 1, ("load", "multiply"), first=True),
        *tile_ring("v", v_stages, 1, ("load", "multiply"), first=True),
    )
    return BarrierTable(rows, (ALLOCATED, FINISHED))
