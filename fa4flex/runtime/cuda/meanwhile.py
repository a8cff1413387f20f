"""Calls whose kernel is still being compiled: where another one is right for them, it serves meanwhile.

Plans differ by answers to questions about sizes (kernels/plan/sizes.py), of which some are about speed alone.
So a call of new sizes is planned twice: as is best, and with the answers that earlier calls got to those.
That second plan is one for this very call, proved and checked as any: if its kernels have been compiled, they
serve until those of the first are on disk, which the background sees to (compiler/background.py).

It is not done where results are to have the same bits whenever they are computed, nor where the schedule says
which kernel is to run. A CUDA graph keeps what was launched as it was captured.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from fa4flex.codegen.analyze.extents import ANY, Reach
from fa4flex.compiler import background
from fa4flex.compiler.background import Awaited
from fa4flex.contents import capturing
from fa4flex.errors import Fa4flexError
from fa4flex.kernels.plan.few_rows import asks_for_order
from fa4flex.kernels.plan.sizes import Answers

if TYPE_CHECKING:
    from fa4flex.compiler.signature import Signature
    from fa4flex.lower import Given, Lowered
    from fa4flex.primitives.schedule import Schedule


class Owner(Protocol):
    """Engine whose calls these are, as far as it is needed here."""

    schedule: Schedule

    def switch(self) -> None: ...

    def note(self, one: Meanwhile) -> None: ...


class Described(NamedTuple):
    """All that decides the launch of a call. reach: extents of other calls for which it is the same; kernels:
    all that are launched, that of the pass first."""

    lowered: Lowered
    given: Given
    signature: Signature
    reach: Reach
    kernels: list[tuple[Lowered, Signature]]

    @property
    def missing(self) -> list[tuple[Lowered, Signature]]:
        """Kernels that would have to be compiled."""
        return [(lowered, signature) for lowered, signature in self.kernels if not lowered.kept(signature)]


class Meanwhile(NamedTuple):
    """The launch that serves, for calls within `reach`, and the one that is awaited."""

    serving: Described
    chosen: Described
    reach: Reach
    awaited: Awaited

    def explain(self) -> str:
        """The kernel that serves, the calls that it serves, and the reason, in words."""
        own, better = _kernel(self.serving), _kernel(self.chosen)
        return f"{own} serves calls of {_calls(self.reach)}: {better}, which is faster, {self.awaited.state}"


def allowed(schedule: Schedule) -> bool:
    """True if results may come from one kernel now and from another one later."""
    exact = schedule.deterministic or torch.are_deterministic_algorithms_enabled()
    fixed = schedule.split is not None or asks_for_order(schedule)
    return not exact and not fixed and not capturing() and background.on()


def meanwhile(
    engine: Owner, chosen: Described, answers: Iterable[Answers], described: Callable[[Answers], Described]
) -> Meanwhile | None:
    """The launch that serves a call until the kernels of `chosen` are compiled, which this begins; None where
    they are, or where nothing that has been compiled is right for it.

    answers    of earlier calls that look like this one, to questions about speed
    described  the call with such answers
    """
    missing = chosen.missing
    if not missing or not allowed(engine.schedule):
        return None
    for one in answers:
        try:
            other = described(one)
        except Fa4flexError:  # no kernel does it in that way
            continue
        if other.missing:
            continue
        jobs = [lowered.job(signature) for lowered, signature in missing]
        awaited = background.begin(jobs, partial(_call, weakref.WeakMethod(engine.switch)))
        result = Meanwhile(other, chosen, other.reach.within(chosen.reach), awaited)
        engine.note(result)
        return result
    return None


def _call(method: weakref.WeakMethod[Callable[[], None]]) -> None:
    found = method()
    if found is not None:
        found()


# --- words ------------------------------------------------------------------------------------------------


def _kernel(described: Described) -> str:
    lowered = described.lowered
    rows, keys = lowered.plan.tile
    return (
        f"the {lowered.direction} kernel {lowered.plan.module.rpartition('kernels.')[2]} of {rows} x {keys}"
    )


def _calls(reach: Reach) -> str:
    names = "batch", "q_len", "kv_len"
    ranges = zip(names, reach.least, reach.most, strict=True)
    return ", ".join(
        f"{name} {least} to {most}" if most < ANY else f"{name} from {least}" for name, least, most in ranges
    )
