"""Expressions of scores as functions of autograd whose derivatives are the expressions that analysis derives.

Autograd of torch would differentiate what computes them instead: branches that are not selected would give
NaN where their slope is infinite, and slopes that a function of the user states would be lost."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fa4flex.codegen.analyze.gradient import ONE, CapturedGradient, ScoreGradient, score_gradient
from fa4flex.codegen.evaluate import Captured, DividedByZero, PastTheEnd, Value, evaluate
from fa4flex.codegen.expr import Expr
from fa4flex.runtime.cpu.captured import flat_index


@dataclass(frozen=True, eq=False)
class Place:
    """Pairs of some queries and keys, at which expressions are evaluated.

    symbols   indices, lengths and axes of reductions, which broadcast to `shape`
    allowed   bool that broadcasts to `shape`, or None where all pairs take part
    """

    symbols: dict[str, Value]
    shape: tuple[int, ...]
    scalars: tuple[Any, ...]
    dtype: torch.dtype
    allowed: Tensor | None = field(default=None)

    def at(self, axes: dict[str, Value]) -> Place:
        """The same pairs at these values of axes."""
        return replace(self, symbols={**self.symbols, **axes})

    def times(self, upstream: Tensor, slope: Tensor | None) -> Tensor:
        """upstream * slope (None: one), 0 where the mask hides the pair. Slopes may be infinite there, and
        0 * inf is NaN, in derivatives of the product as well: the slope itself is hidden first."""
        if self.allowed is None:
            return upstream if slope is None else upstream * slope
        if slope is None:
            return torch.where(self.allowed, upstream, 0)
        return torch.where(self.allowed, upstream, 0) * torch.where(self.allowed, slope, 0)

    def values(self, roots: tuple[Expr, ...], score: Tensor, operands: tuple[Tensor, ...]) -> list[Value]:
        """Values of expressions; of allowed pairs alone where one reads past a tensor, or divides by 0."""
        symbols = {**self.symbols, "score": score}
        captured = Captured(operands, self.scalars)
        try:
            return evaluate(roots, symbols, captured, self.dtype)
        except (PastTheEnd, DividedByZero):
            if self.allowed is None:
                raise
        allowed = self.allowed.expand(self.shape)
        flat = {n: x.expand(self.shape)[allowed] if isinstance(x, Tensor) else x for n, x in symbols.items()}
        return [
            x.new_zeros(self.shape).masked_scatter_(allowed, x) if isinstance(x, Tensor) and x.ndim else x
            for x in evaluate(roots, flat, captured, self.dtype)
        ]


@lru_cache(maxsize=512)
def _derivative(root: Expr) -> ScoreGradient:
    return score_gradient(root, again=True)


class Modified(torch.autograd.Function):
    """The value of an expression at each pair, of raw scores and captured tensors."""

    @staticmethod
    def forward(ctx: Any, root: Expr, place: Place, score: Tensor, *operands: Tensor) -> Tensor:
        (value,) = place.values((root,), score, operands)
        ctx.root, ctx.place = root, place
        ctx.save_for_backward(score, *operands)
        return torch.as_tensor(value, dtype=place.dtype, device=score.device).expand(place.shape).clone()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Any, ...]:
        score, *operands = ctx.saved_tensors
        by, place = _derivative(ctx.root), ctx.place
        of_score = None
        if ctx.needs_input_grad[2]:
            slope = None if by.by_score is ONE else value_of(by.by_score, place, score, operands)
            of_score = place.times(upstream, slope)
        needed = [slot for slot, needs in enumerate(ctx.needs_input_grad[3:]) if needs]
        gradients: list[Tensor | None] = [None] * len(operands)
        for term in by.of_slots(needed):
            for axes in term.points():
                share = _share(term, place.at({**axes}), upstream, score, operands)
                before = gradients[term.slot]
                gradients[term.slot] = share if before is None else before + share
        return None, None, of_score, *gradients


def value_of(root: Expr, place: Place, score: Tensor, operands: Any) -> Tensor:
    """`Modified` of arguments that are found in a list."""
    result: Tensor = Modified.apply(root, place, score, *operands)
    return result


def _share(
    term: CapturedGradient, place: Place, upstream: Tensor, score: Tensor, operands: list[Tensor]
) -> Tensor:
    """The gradient of a captured tensor by one place where it is read."""
    value = None if term.value is ONE else value_of(term.value, place, score, operands)
    share = place.times(upstream, value)
    operand = operands[term.slot]
    with torch.no_grad():
        found = place.values(term.index, score.detach(), tuple([x.detach() for x in operands]))
        # Pairs that the mask hides may have read past the tensor: their share is 0.
        at = flat_index(found, operand.shape).to(share.device).expand(place.shape).reshape(-1)
    sums = torch.zeros(operand.numel(), dtype=place.dtype, device=share.device)
    return sums.index_add(0, at, share.reshape(-1)).view(operand.shape).to(operand.dtype)
