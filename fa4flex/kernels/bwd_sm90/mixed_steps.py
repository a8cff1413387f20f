"""Steps of consumer warpgroups in the order of turns: those that need the mask stand between those that do
not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass
from cutlass import Int32, cute

from fa4flex.kernels.bwd_sm90.resources import Pipes, Shared
from fa4flex.kernels.common.backward import QueryTiles, needs_mask
from fa4flex.kernels.common.transfer import States


@cute.jit
def mixed_steps(
    step: cutlass.Constexpr[Callable[..., None]],
    given: cutlass.Constexpr[tuple[Any, ...]],
    shared: cutlass.Constexpr[Shared],
    pipes: cutlass.Constexpr[Pipes],
    queries: QueryTiles,
    states: States,
    where: tuple[Int32, Int32, Int32],
) -> States:
    """Calls step(given, shared, pipes, states, places, masked) for each tile of queries of a head. where:
    lane, warpgroup, and how many steps were before.

    A tile's entry is read during the step before. The table comes from the L2 cache each time: whenever a
    turn is looked for, the L1 cache forgets everything. Each lane reads another entry, and the first lane's
    counts: what all lanes read alike would go to a uniform register at once, and be waited for there."""
    q_state, do_state = states
    lane, w, count = where
    ahead = Int32(cute.arch.lane_idx())
    following = queries.masked.at(ahead)
    for i in cutlass.range(queries.count, unroll=1):
        entry = cute.arch.make_warp_uniform(following)
        following = queries.masked.at(i + 1 + ahead)
        places = entry >> 1, lane, w, count
        if needs_mask(entry):
            step(given, shared, pipes, (q_state, do_state), places, True)
        else:
            step(given, shared, pipes, (q_state, do_state), places, False)
        q_state.advance()
        do_state.advance()
        count += 1
    return q_state, do_state
