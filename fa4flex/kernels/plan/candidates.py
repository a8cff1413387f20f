"""Candidates: the ways in which a pass could be computed, and the choice among them. Data only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

from fa4flex.kernels.plan.model import Predicted

T = TypeVar("T")


class Candidate(NamedTuple, Generic[T]):
    """One way, its name for people, and how long it would take."""

    what: T
    name: str
    predicted: Predicted

    @property
    def seconds(self) -> float:
        return self.predicted.seconds


def least(seconds: Sequence[float], error: float) -> int:
    """The number of the candidate that takes least; of those that take up to `error` more, which is what
    predictions are wrong by, the one that is listed first: it was measured most, or costs least memory."""
    best = min(seconds)
    return next(i for i, one in enumerate(seconds) if one * (1 - error) <= best)


def listed(candidates: Sequence[Candidate[T]], taken: T, origin: str) -> list[str]:
    """A short table in words: what each would take, the one that is taken, and where the numbers are from."""
    lines = [f"candidates at this size, as the model predicts them ({origin}):"]
    width = max(len(one.name) for one in candidates)
    for one in candidates:
        mark = ", taken" if one.what == taken else ""
        said = one.predicted
        lines.append(
            f"  {one.name:<{width}}  {said.seconds * 1e6:8.1f} us, {said.busy:.0%} of it busy,"
            f" a step {said.step:.0f} clocks ({said.limit}){mark}"
        )
    return lines


Predict = Callable[[T], Predicted]


def among(ways: Sequence[T], named: Callable[[T], str], predict: Predict[T]) -> list[Candidate[T]]:
    """The candidates of these ways."""
    return [Candidate(way, named(way), predict(way)) for way in ways]
