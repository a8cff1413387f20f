"""Scores of blocks of keys, of which selections are made."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from fa4flex.contents import version_of
from fa4flex.errors import InputError, StateError
from fa4flex.exact import is_count
from fa4flex.primitives.base import check_device, kind_of, show
from fa4flex.primitives.kept import where_seen
from fa4flex.primitives.pooled import group_sizes
from fa4flex.primitives.units import SEEN, Rule, Seen

REDUCTIONS = "sum", "mean", "max", "logsumexp"
Reduction = tuple[str, int]
"""Name of a reduction, and how many neighbours it is over."""


@dataclass(frozen=True, eq=False, repr=False)
class Scores:
    """`values` [B, H, R, C], float32 or float64, a score for each row of `queries` tokens and unit of `keys`.

    R = ceil(q_len / queries), C = ceil(kv_len / keys). A unit whose score is -inf or NaN is not selected.
    Raises InputError for values of another shape.
    """

    values: Tensor
    queries: int
    keys: int
    q_len: int
    kv_len: int

    def __post_init__(self) -> None:
        if not isinstance(self.values, Tensor) or not self.values.is_floating_point():
            raise InputError(
                f"scores of {kind_of(self.values)}", "a floating tensor", "convert them with .float()"
            )
        for name in ("queries", "keys", "q_len", "kv_len"):
            if not is_count(getattr(self, name)):
                raise InputError(
                    f"{name}={getattr(self, name)!r}", "a positive int", f"pass {name} in tokens"
                )
        wanted = [-(-self.q_len // self.queries), -(-self.kv_len // self.keys)]
        if self.values.ndim != 4 or list(self.values.shape[2:]) != wanted:
            raise InputError(
                f"scores {list(self.values.shape)} for q_len={self.q_len} in rows of {self.queries}, "
                f"kv_len={self.kv_len} in units of {self.keys}",
                f"[B, H, {wanted[0]}, {wanted[1]}]",
                "pass the tokens that a row and a column stand for",
            )

    @property
    def selectable(self) -> Tensor:
        """bool, as `values`: True where a unit may be selected."""
        return self.values > -math.inf  # not so NaN

    def causal(self, whole: bool = False) -> Scores:
        """Scores without units that lie in the future of all queries of a row, aligned bottom-right.

        whole  also without units that have a key in the future of some query of the row, as methods with
               pooled keys want: a pooled key knows all of its tokens
        """
        return _limited(self, "whole" if whole else "causal")

    def reduced(
        self,
        over_heads: str | Reduction | Tensor | None = None,
        over_queries: Reduction | None = None,
        over_keys: Reduction | None = None,
    ) -> Scores:
        """Scores of larger rows and units: see `score`. Units are counted from the first."""
        scores = self
        if over_keys is not None:
            size = checked_reduction("over_keys", over_keys)
            scores = replace(scores, values=neighbours(scores.values, over_keys, 3), keys=scores.keys * size)
        if over_queries is not None:
            size = checked_reduction("over_queries", over_queries)
            values = neighbours(scores.values, over_queries, 2)
            scores = replace(scores, values=values, queries=scores.queries * size)
        if over_heads is not None:
            scores = replace(scores, values=heads_reduced(scores.values, over_heads))
        return scores

    @property
    def _unmasked(self) -> tuple[Tensor, Seen]:
        """Values, and which units of theirs may be selected: masking is left to selections while nobody has
        read values that are masked."""
        return self.values, "all"

    def _rule(self, first: int = 0, own: int = 0, last: int = 0) -> Rule:
        """The rule of selections that force so many units."""
        sizes = self.queries, self.keys, self.q_len, self.kv_len
        return Rule(*sizes, first, own, last, SEEN.index(self._unmasked[1]))

    def __repr__(self) -> str:
        return f"Scores({show(self.values)}, {self.queries}, {self.keys}, {self.q_len}, {self.kv_len})"


class _Limited(Scores):
    """Scores without units in the future, whose values are made when they are read first, with a gradient if
    one was wanted when these scores were made. `dataclasses.replace` makes another one of other values, of
    which nothing is left out."""

    inner: ClassVar[Scores | None] = None
    seen: ClassVar[Seen] = "all"
    version: ClassVar[int] = -1
    differentiable: ClassVar[bool] = False

    @cached_property
    def values(self) -> Tensor:  # the field, until it is set
        inner = self._unchanged()
        with torch.inference_mode(False), torch.set_grad_enabled(self.differentiable):
            return _masked(inner, self.seen)

    @property
    def _unmasked(self) -> tuple[Tensor, Seen]:
        if self.inner is None or "values" in vars(self):
            return self.values, "all"
        return self._unchanged().values, self.seen

    def _unchanged(self) -> Scores:
        """The scores that are masked. Raises StateError where somebody wrote to them since."""
        assert self.inner is not None
        if version_of(self.inner.values) != self.version:
            raise StateError(
                "scores that were written to after causal()",
                "the values that causal() was called for",
                "call causal() after the values are written, or write to the values of its result",
            )
        return self.inner


def _limited(scores: Scores, seen: Seen) -> Scores:
    """Scores of the units that are `seen`. Where torch does not count changes of values, nothing could tell
    of one, and they are masked now."""
    values, before = scores._unmasked
    if before != "all" or torch.compiler.is_compiling() or version_of(values) < 0:
        return replace(scores, values=_masked(scores, seen))
    made: _Limited = object.__new__(_Limited)
    for name in ("queries", "keys", "q_len", "kv_len"):
        object.__setattr__(made, name, getattr(scores, name))
    object.__setattr__(made, "inner", scores)
    object.__setattr__(made, "seen", seen)
    object.__setattr__(made, "version", version_of(values))
    object.__setattr__(made, "differentiable", torch.is_grad_enabled())
    return made


def _masked(scores: Scores, seen: Seen) -> Tensor:
    values = scores.values
    mask = scores._rule()._replace(seen=SEEN.index(seen)).mask(values.device)
    assert mask is not None
    return where_seen(values, mask)


def checked_reduction(name: str, given: Any) -> int:
    """Number of neighbours that a reduction is over. Raises InputError for what is none."""
    fits = isinstance(given, tuple) and len(given) == 2 and given[0] in REDUCTIONS and is_count(given[1])
    if not fits:
        raise InputError(
            f"{name}={given!r}",
            f"a pair of one of {', '.join(REDUCTIONS)} and a positive int",
            f'e.g. {name}=("max", 64), the largest of 64 neighbours',
        )
    return int(given[1])


def neighbours(x: Tensor, reduction: Reduction, dim: int) -> Tensor:
    """Reduction over groups of neighbours along `dim`; the last group is of those that there are."""
    how, size = reduction
    length, more = x.shape[dim], -x.shape[dim] % size
    fill = 0.0 if how in ("sum", "mean") else -math.inf
    if more:
        x = torch.cat((x, x.new_full((*x.shape[:dim], more, *x.shape[dim + 1 :]), fill)), dim)
    parts = x.unflatten(dim, (-1, size))
    if how == "max":
        return parts.amax(dim + 1)
    if how == "logsumexp":
        return parts.logsumexp(dim + 1)
    total = parts.sum(dim + 1)
    if how == "sum":
        return total
    sizes = group_sizes(length, size, x.device)
    return total / (sizes if isinstance(sizes, int) else sizes.view(-1, *[1] * (total.ndim - dim - 1)))


def checked_weights(given: Tensor, sizes: tuple[int, int, int]) -> Tensor:
    """Weights [1, H, 1] or [B, H, R] of scores of B, H, R = `sizes`. Raises InputError for other shapes."""
    batch, heads, rows = sizes
    weights = given if given.ndim > 1 else given.view(1, -1, 1)
    fits = weights.ndim == 3 and weights.is_floating_point() and weights.shape[1] == heads
    if not fits or weights.shape[0] not in (1, batch) or weights.shape[2] not in (1, rows):
        raise InputError(
            f"over_heads of {kind_of(given)}{list(given.shape)} for scores [{batch}, {heads}, {rows}, C]",
            f"floating weights [{heads}] or [{batch}, {heads}, {rows}]",
            "weights of single queries fit scores whose rows are single queries",
        )
    return weights


def heads_reduced(x: Tensor, how: str | Reduction | Tensor) -> Tensor:
    """Scores [B, H, R, C] reduced over heads: all of them, groups of neighbours, or a weighted sum."""
    heads = x.shape[1]
    if isinstance(how, Tensor):
        weights = checked_weights(how, (x.shape[0], heads, x.shape[2]))
        check_device("over_heads", weights, "scores", x.device, "move the weights to the scores")
        return (x * weights.to(x.dtype).unsqueeze(-1)).sum(1, keepdim=True)
    name, left = (
        (how, 1) if isinstance(how, str) else how if isinstance(how, tuple) and len(how) == 2 else ("", 0)
    )
    if name not in REDUCTIONS or not is_count(left) or heads % left:
        raise InputError(
            f"over_heads={how!r} of {heads} heads",
            f"one of {', '.join(REDUCTIONS)}, a pair of one and the number of heads that are left, which "
            f"divides {heads}, or weights",
            'e.g. over_heads="sum", or over_heads=("max", 2) for two heads of keys',
        )
    return neighbours(x, (name, heads // left), 1)
