"""Facts: what analysis proved about a variant's expressions, before any tensor is seen."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

from fa4flex.codegen.analyze.gradient import ScoreGradient, score_gradient
from fa4flex.codegen.analyze.hoist import Hoisting, hoist
from fa4flex.codegen.analyze.intervals import (
    KeyIntervals,
    QueryIntervals,
    allowed_keys,
    key_intervals,
    query_intervals,
)
from fa4flex.codegen.expr import TRUE, Expr, sym
from fa4flex.primitives.weights import SOFTMAX, Weights

SCORE = sym("score")


MaskForm = Literal["none", "spans", "queries", "tables", "pairs"]
"""Form in which a kernel reads the mask: see Problem."""
ASKED: tuple[MaskForm, ...] = ("tables", "pairs")
"""Forms of masks that are evaluated pair by pair, in some tiles or in all."""


@dataclass(frozen=True)
class Facts:
    """`score`: the modified score in terms of sym("score"); `mask`: whether a (q, kv) pair takes part.

    `intervals` stand in for those found from the mask: the same keys, computed in another way. `output`: the
    output function that kernels apply, in terms of the same symbols as a score mod; its slots are those after
    all others. `kept`: whether dropout keeps a pair, an expression of the operation "keep"; None without
    dropout. `weights`: how weights are made of scores; of elementwise ones `score` is the weight.
    """

    score: Expr = SCORE
    mask: Expr = TRUE
    intervals: KeyIntervals | None = None
    output: Expr | None = None
    kept: Expr | None = None
    weights: Weights = SOFTMAX

    @property
    def roots(self) -> tuple[Expr, ...]:
        """All expressions that analyses look at: nothing is proved of `kept`."""
        return (self.score, self.mask) if self.output is None else (self.score, self.mask, self.output)

    @property
    def everything(self) -> tuple[Expr, ...]:
        """All expressions."""
        return self.roots if self.kept is None else (*self.roots, self.kept)

    @property
    def of_output(self) -> Facts | None:
        """Facts of the output function alone, in the place of a score mod."""
        return None if self.output is None else analyze(self.output, TRUE)

    @property
    def plain(self) -> bool:
        """Every pair takes part, with the score that it has: there is neither score mod nor mask, nor
        dropout."""
        return self.score is SCORE and self.mask is TRUE and self.kept is None

    @property
    def softmax(self) -> bool:
        """True if weights are the softmax's."""
        return self.weights == SOFTMAX

    @cached_property
    def keys(self) -> KeyIntervals | None:
        """The mask as a union of key intervals per query row, or None where it is not one."""
        return key_intervals(self.mask) if self.intervals is None else self.intervals

    @cached_property
    def allowed(self) -> KeyIntervals | None:
        """Key intervals whose keys the mask allows for certain, or None. It may allow others."""
        return allowed_keys(self.mask)

    @cached_property
    def queries(self) -> QueryIntervals | None:
        """The mask as a union of query intervals per key, or None where it is not one."""
        return query_intervals(self.mask)

    @cached_property
    def gradient(self) -> ScoreGradient:
        """Derivatives of `score` by the raw score and by every captured floating tensor."""
        return score_gradient(self.score)

    @cached_property
    def hoisting(self) -> Hoisting:
        """Parts of `score` and `mask` that depend on the query or the key alone."""
        return hoist(self.score, self.mask)

    @cached_property
    def key(self) -> str:
        """Identity of the program: equal text, equal program. Captured values are not part of it."""
        text = "\n".join(map(repr, self.everything))
        if self.weights != SOFTMAX:
            text += f"\n{self.weights!r}"
        return hashlib.sha256(text.encode()).hexdigest()[:32]


def analyze(score: Expr, mask: Expr, kept: Expr | None = None, weights: Weights = SOFTMAX) -> Facts:
    """Expressions -> Facts. The facts are derived lazily and kept with the expressions."""
    return _analyzed(score, mask, kept, weights)


@lru_cache(maxsize=1024)
def _analyzed(score: Expr, mask: Expr, kept: Expr | None, weights: Weights) -> Facts:
    return Facts(score, mask, kept=kept, weights=weights)
