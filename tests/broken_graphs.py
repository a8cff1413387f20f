"""Graphs of barriers with something changed, and whether a check or a run of them fails."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fa4flex.kernels.plan.counts import check_counts
from fa4flex.kernels.plan.errors import PlanError
from fa4flex.kernels.plan.topology import Role, Topology
from fa4flex.kernels.plan.verify import at_random, round_robin, simulate


def with_role(topology: Topology, role: Role) -> Topology:
    """The same with another role of that name."""
    return replace(topology, roles=tuple(role if r.name == role.name else r for r in topology.roles))


def is_red(topology: Topology, seed: int, runs: Sequence[list[int]]) -> bool:
    """True if the sums of arrivals or some order of events fails. runs: key tiles of each tile of queries."""
    try:
        check_counts(topology)
        for tiles in runs:
            for pick in (round_robin(), lambda n: 0, lambda n: n - 1, at_random(seed), at_random(seed + 1)):
                simulate(topology, tiles, pick)
    except PlanError:
        return True
    return False
