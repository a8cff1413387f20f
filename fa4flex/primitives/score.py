"""Score mods: functions of the scaled score and its indices. They chain with `>>`, left to right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fa4flex.errors import InputError
from fa4flex.primitives.base import CONTEXT, Family, FunctionMod, Mod, call_with, kind_of, positional, settle

ScoreFunction = Callable[..., Any]


class ScoreMod(Mod):
    """Base of all score mods: callable as `score_mod(score, b, h, q_idx, kv_idx)`."""

    role, noun = "score_mod", "score mod"
    combined_with = ">> (then)"
    __signature__ = positional("score", "b", "h", "q_idx", "kv_idx")

    def __call__(self, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, **context: Any) -> Any:
        raise NotImplementedError

    def __rshift__(self, other: Any) -> ScoreMod:
        return Chain(self, as_score(other))

    def __rrshift__(self, other: Any) -> ScoreMod:
        return Chain(as_score(other), self)


@dataclass(frozen=True, eq=False, repr=False)
class ModScore(FunctionMod, ScoreMod):
    """A score_mod function as a score mod."""

    def __call__(self, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, **context: Any) -> Any:
        return call_with(self.mod, (score, b, h, q_idx, kv_idx), self.context, context, self)


@dataclass(frozen=True, eq=False, repr=False)
class Chain(ScoreMod):
    """`then(first(score))` at the same indices."""

    first: ScoreMod
    then: ScoreMod
    context: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        names = (*self.first.context, *self.then.context)
        object.__setattr__(self, "context", tuple(name for name in CONTEXT if name in names))

    @property
    def parts(self) -> tuple[Mod, ...]:
        return self.first, self.then

    def __call__(self, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, **context: Any) -> Any:
        score = call_with(self.first, (score, b, h, q_idx, kv_idx), self.first.context, context)
        return call_with(self.then, (score, b, h, q_idx, kv_idx), self.then.context, context)

    def __repr__(self) -> str:
        return f"({self.first!r} >> {self.then!r})"


def as_score(value: Any) -> ScoreMod:
    """`value` as a ScoreMod: a score mod, a variant (its defaults), or any score_mod function.

    Raises InputError for anything else, masks and block maps included.
    """
    value = settle(value)
    if isinstance(value, ScoreMod):
        return value
    if isinstance(value, Mod) or hasattr(value, "kv_num_blocks") or getattr(value, "role", "") == "blocks":
        what = f"the {value.noun} {value!r}" if isinstance(value, Mod) else f"a {type(value).__name__}"
        other = getattr(value, "role", "mask")
        place = f"{other}=" if other == "output_mod" else "mask= (block_mask= of flex_attention)"
        raise InputError(
            f"{what} was given as a score_mod",
            "a function score_mod(score, b, h, q_idx, kv_idx) or a fa4flex score mod",
            f"pass it as {place}; scores, masks and outputs have arguments of their own",
        )
    if not callable(value):
        raise InputError(
            f"{kind_of(value)} was given as a score_mod",
            "a function score_mod(score, b, h, q_idx, kv_idx) or a fa4flex score mod",
            "capture a bias tensor in a function: lambda s, b, h, q, kv: s + bias[h, q, kv]",
        )
    return ModScore(value)


def score_family(make: Callable[..., ScoreFunction]) -> Family[ScoreMod]:
    """Decorator: a function from parameters to a score_mod becomes a variant: a family of score mods."""
    return Family(make, ModScore)
