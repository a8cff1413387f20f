"""Score mods: functions of the scaled score and its indices. They chain with `>>`, left to right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fa4flex.errors import InputError
from fa4flex.primitives.base import CONTEXT, Family, accepted_context, call_mod, positional, settle

ScoreFunction = Callable[..., Any]


class ScoreMod:
    """Base of all score mods: callable as `score_mod(score, b, h, q_idx, kv_idx)`."""

    context: tuple[str, ...] = ()
    __signature__ = positional("score", "b", "h", "q_idx", "kv_idx")

    def __call__(self, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, **context: Any) -> Any:
        raise NotImplementedError

    def __rshift__(self, other: ScoreMod | ScoreFunction) -> ScoreMod:
        return Chain(self, as_score(other))

    def __rrshift__(self, other: ScoreMod | ScoreFunction) -> ScoreMod:
        return Chain(as_score(other), self)

    @property
    def __name__(self) -> str:
        return repr(self)


@dataclass(frozen=True, eq=False, repr=False)
class ModScore(ScoreMod):
    """A score_mod function; `label` is what its repr prints."""

    mod: ScoreFunction
    label: str

    @property
    def context(self) -> tuple[str, ...]:  # type: ignore[override]
        return accepted_context(self.mod)

    def __call__(self, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, **context: Any) -> Any:
        return call_mod(self.mod, (score, b, h, q_idx, kv_idx), context)

    def __repr__(self) -> str:
        return self.label


@dataclass(frozen=True, eq=False, repr=False)
class Chain(ScoreMod):
    """`then(first(score))` at the same indices."""

    first: ScoreMod
    then: ScoreMod

    @property
    def context(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(name for name in CONTEXT if name in self.first.context or name in self.then.context)

    def __call__(self, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, **context: Any) -> Any:
        score = call_mod(self.first, (score, b, h, q_idx, kv_idx), context)
        return call_mod(self.then, (score, b, h, q_idx, kv_idx), context)

    def __repr__(self) -> str:
        return f"({self.first!r} >> {self.then!r})"


def as_score(value: ScoreMod | ScoreFunction | Family[ScoreMod]) -> ScoreMod:
    """`value` as a ScoreMod: a score mod, a family (its defaults), or any score_mod function.

    Raises InputError for anything that is not callable.
    """
    value = settle(value)
    if isinstance(value, ScoreMod):
        return value
    if not callable(value):
        raise InputError(
            f"{value!r} was given as a score_mod",
            "a function score_mod(score, b, h, q_idx, kv_idx) or a fa4flex score mod",
            "capture a bias tensor in a function: lambda s, b, h, q, kv: s + bias[h, q, kv]",
        )
    return ModScore(value, getattr(value, "__name__", repr(value)))


def score_family(make: Callable[..., ScoreFunction]) -> Family[ScoreMod]:
    """Decorator: a function from parameters to a score_mod becomes a family of score mods."""
    return Family(make, ModScore)
