"""Steps of consumer warpgroups over the tiles of queries of a head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass
from cutlass import Int32, cute, pipeline

from fa4flex.kernels.common.backward import QueryTiles, needs_mask, query_tile_at

Step = Callable[..., None]
"""Step of states, places (tile of queries, lane, warpgroup, steps before), and whether it needs the mask."""

Carried = tuple[pipeline.PipelineState, pipeline.PipelineState, Int32]
"""States of the rings of Q and dO, and how many steps were before."""


@cute.jit
def like_steps(
    step: cutlass.Constexpr[Step],
    queries: QueryTiles,
    span: tuple[Any, Any],
    carried: Carried,
    where: tuple[Int32, Int32],
    masked: cutlass.Constexpr[bool],
) -> Carried:
    """Takes the tiles from the first to before the second of `span`, which all need the mask, or none. where:
    lane, and warpgroup."""
    q_state, do_state, count = carried
    lane, w = where
    for i in cutlass.range(span[0], span[1], unroll=1):
        places = query_tile_at(queries, i), lane, w, count
        step((q_state, do_state), places, masked)
        q_state.advance()
        do_state.advance()
        count += 1
    return q_state, do_state, count


@cute.jit
def mixed_steps(
    step: cutlass.Constexpr[Step], queries: QueryTiles, carried: Carried, where: tuple[Int32, Int32]
) -> Carried:
    """Takes all tiles in the order of turns: those that need the mask stand between those that do not.

    A tile's entry is read during the step before. The table comes from the L2 cache each time: whenever a
    turn is looked for, the L1 cache forgets everything. Each lane reads another entry, and the first lane's
    counts: what all lanes read alike would go to a uniform register at once, and be waited for there."""
    q_state, do_state, before = carried
    lane, w = where
    count = before
    ahead = Int32(cute.arch.lane_idx())
    following = queries.masked.at(ahead)
    for i in cutlass.range(queries.count, unroll=1):
        entry = cute.arch.make_warp_uniform(following)
        following = queries.masked.at(i + 1 + ahead)
        places = entry >> 1, lane, w, count
        if needs_mask(entry):
            step((q_state, do_state), places, True)
        else:
            step((q_state, do_state), places, False)
        q_state.advance()
        do_state.advance()
        count += 1
    return q_state, do_state, before + queries.count
