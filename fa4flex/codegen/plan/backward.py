"""Problem and chip -> the plan of a backward kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from fa4flex.codegen.plan.problem import Problem
from fa4flex.codegen.plan.sm90.backward import plan_hopper_backward
from fa4flex.codegen.plan.sm100.backward_pair import plan_alone_or_in_pairs
from fa4flex.codegen.plan.target import Target
from fa4flex.errors import UnsupportedError


class BackwardPlan(Protocol):
    """A backward kernel for `problem` on `target`. tile: queries per step, and keys per block, or per `ctas`
    of them; head_dim: of the tile that holds rows of q."""

    @property
    def target(self) -> Target: ...

    @property
    def problem(self) -> Problem: ...

    @property
    def tile(self) -> tuple[int, int]: ...

    @property
    def head_dim(self) -> int: ...

    @property
    def ctas(self) -> int: ...

    def config(self) -> Any:
        """What the hand-written kernel is built from."""
        ...


PLANNERS: dict[str, Callable[[Problem, Target], BackwardPlan]] = {
    "sm90": plan_hopper_backward,
    "sm100": plan_alone_or_in_pairs,
}
"""By family of targets."""

ERASING = frozenset(("sm90",))
"""Families whose kernels write the zeros of captured gradients in tiles that the mask hides."""


def plan_backward(problem: Problem, target: Target) -> BackwardPlan:
    """Raises UnsupportedError where there is no kernel."""
    if target.family not in PLANNERS:
        raise UnsupportedError(
            f"a backward kernel for {target.name}",
            f"one of the families {sorted(PLANNERS)}",
            "nothing: gradients are computed in PyTorch operations instead",
        )
    return PLANNERS[target.family](problem, target)
