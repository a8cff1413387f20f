"""Registers of a block of four warpgroups: whether a split between its roles can be granted."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fa4flex.kernels.plan.errors import PlanError
from fa4flex.kernels.plan.target import Target

WARPGROUPS = 4
"""Warpgroups of a block. Two have one role, in which one may be idle; one has single warps."""

IDLE = "idle"
"""Role of the second of those two, where it has registers of its own."""


def check_registers(r: Any, twice: str, target: Target, advice: str) -> None:
    """Check registers split by role: the two warpgroups of role `twice` get more than they are launched with,
    and the one of every other role gets fewer. Roles of 0 registers are left out; with an IDLE one, `twice`
    is the role of one. PlanError unless setmaxnreg takes the numbers, and their sum is there: it would wait
    for ever."""
    pool = target.register_pool(WARPGROUPS)
    each, step = pool // WARPGROUPS, target.register_step
    split = {name: count for name, count in asdict(r).items() if count}
    both = IDLE not in split
    for name, count in split.items():
        raised = name == twice
        least, most = (each, target.register_most) if raised else (target.register_least, each)
        if not least <= count <= most or count % step:
            raise PlanError(
                f"{count} registers per {name} thread",
                f"a multiple of {step} in {least}..{most}: warps are launched with {each}",
                advice,
            )
    wanted = sum(split.values()) + both * split[twice]
    if wanted > pool:
        terms = " + ".join("2 x " * (both and name == twice) + str(count) for name, count in split.items())
        raise PlanError(
            f"{terms} = {wanted} registers per thread",
            f"at most {pool}, what {WARPGROUPS} warpgroups are launched with",
            "give one of them fewer",
        )
