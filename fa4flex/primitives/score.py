"""Score mods: functions of the scaled score and its indices. They chain with `>>`, left to right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fa4flex.errors import InputError
from fa4flex.primitives.base import Family, Mod, kind_of, positional, settle
from fa4flex.primitives.chains import Chainable, Chained, FunctionOfNumber

ScoreFunction = Callable[..., Any]


class ScoreMod(Chainable["ScoreMod"]):
    """Base of all score mods: callable as `score_mod(score, b, h, q_idx, kv_idx)`."""

    role, noun = "score_mod", "score mod"
    __signature__ = positional("score", "b", "h", "q_idx", "kv_idx")

    def __call__(self, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, **context: Any) -> Any:
        raise NotImplementedError

    @staticmethod
    def _accepted(value: Any) -> ScoreMod:
        return as_score(value)

    @staticmethod
    def _chained(first: Any, then: Any) -> ScoreMod:
        return Chain(first, then)


@dataclass(frozen=True, eq=False, repr=False)
class ModScore(FunctionOfNumber, ScoreMod):
    """A score_mod function as a score mod."""


@dataclass(frozen=True, eq=False, repr=False)
class Chain(Chained, ScoreMod):
    """`then(first(score))` at the same indices."""


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
        place = (
            f"{other}=" if other in ("output_mod", "normalizer") else "mask= (block_mask= of flex_attention)"
        )
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
