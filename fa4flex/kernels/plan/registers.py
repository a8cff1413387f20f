"""Registers of a block of four warpgroups: whether a split between its roles can be granted."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fa4flex.kernels.plan.errors import PlanError
from fa4flex.kernels.plan.target import Target

WARPGROUPS = 4
"""Warpgroups of a block. Two have one role, in which one may be idle; one has single warps."""


def check_registers(r: Any, twice: str, target: Target, advice: str) -> None:
    """Check registers split by role: the two warpgroups of role `twice` get more than they are launched with,
    and the one of every other role gets fewer. PlanError unless setmaxnreg takes the numbers, and their sum
    is there: it would wait for ever."""
    pool = target.register_pool(WARPGROUPS)
    each, step = pool // WARPGROUPS, target.register_step
    split = asdict(r)
    for name, count in split.items():
        raised = name == twice
        least, most = (each, target.register_most) if raised else (target.register_least, each)
        if not least <= count <= most or count % step:
            raise PlanError(
                f"{count} registers per {name} thread",
                f"a multiple of {step} in {least}..{most}: warps are launched with {each}",
                advice,
            )
    wanted = sum(split.values()) + split[twice]
    if wanted > pool:
        terms = " + ".join(f"2 x {count}" if name == twice else f"{count}" for name, count in split.items())
        raise PlanError(
            f"{terms} = {wanted} registers per thread",
            f"at most {pool}, what {WARPGROUPS} warpgroups are launched with",
            "give one of them fewer",
        )
