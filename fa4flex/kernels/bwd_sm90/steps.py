"""Steps of consumer warpgroups over the tiles of queries of a head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass
from cutlass import Int32, cute

from fa4flex.kernels.bwd_sm90.warpgroup import Progress, Step
from fa4flex.kernels.common.backward import QueryTiles, needs_mask, query_tile_at

Body = Callable[..., None]
"""Body of a step, of pipeline states, a Step, and whether it needs the mask."""


@cute.jit
def like_steps(
    body: cutlass.Constexpr[Body],
    queries: QueryTiles,
    first: Any,
    end: Any,
    progress: Progress,
    masked: cutlass.Constexpr[bool],
) -> Progress:
    """Takes the tiles from `first` to before `end`, which all need the mask, or none."""
    q_state, do_state, count = progress
    for i in cutlass.range(first, end, unroll=1):
        body((q_state, do_state), Step(query_tile_at(queries, i), count), masked)
        q_state.advance()
        do_state.advance()
        count += 1
    return Progress(q_state, do_state, count)


@cute.jit
def mixed_steps(body: cutlass.Constexpr[Body], queries: QueryTiles, progress: Progress) -> Progress:
    """Takes all tiles in the order of turns: those that need the mask stand between those that do not.

    A tile's entry is read during the step before. The table comes from the L2 cache each time: whenever a
    turn is looked for, the L1 cache forgets everything. Each lane reads another entry, and the first lane's
    counts: what all lanes read alike would go to a uniform register at once, and be waited for there."""
    q_state, do_state, before = progress
    count = before
    ahead = Int32(cute.arch.lane_idx())
    following = queries.masked.at(ahead)
    for i in cutlass.range(queries.count, unroll=1):
        entry = cute.arch.make_warp_uniform(following)
        following = queries.masked.at(i + 1 + ahead)
        step = Step(entry >> 1, count)
        if needs_mask(entry):
            body((q_state, do_state), step, True)
        else:
            body((q_state, do_state), step, False)
        q_state.advance()
        do_state.advance()
        count += 1
    return Progress(q_state, do_state, before + queries.count)
