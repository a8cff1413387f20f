"""Blockwise attention with other weights than the softmax's: those of elementwise normalisers, and softpick.

Elementwise: the modified score is the weight, masked pairs weigh 0, and dscore' = dP. Nothing is rescaled.

Softpick: relative to m = max(0, largest score) of a row, with u = exp(s - m) - exp(-m), computed as
expm1(s) exp(-m) below 1, where the difference would have no digits,

    p = max(u, 0) / total     total = sum |u| + eps exp(-m)
    ds = exp(s - m) ([s > 0] dP - sign(s) delta) / total

No exponential is above 1, and total is never 0: either some u is near 1, or m is small and eps counts.

Dropout multiplies p by Z, after normalising, and so dP: dV = (p Z)^T dO, dP = Z (dO V^T). Softpick's total is
of all pairs, and delta stays rowsum(dO O).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fa4flex.codegen.analyze.facts import Facts
from fa4flex.codegen.analyze.gradient import ONE
from fa4flex.codegen.evaluate import Value
from fa4flex.runtime.cpu.accumulators import Accumulators
from fa4flex.runtime.cpu.captured import SharedGradients
from fa4flex.runtime.cpu.softmax import INFINITY, Forward
from fa4flex.runtime.cpu.tiles import (
    Block,
    Inputs,
    Span,
    Walk,
    Workspace,
    matmul,
    raw_scores,
    scaled_queries,
)


def attend(facts: Facts, inputs: Inputs) -> Forward:
    """Results of a call; integers of `facts` fit in 64 bits. An elementwise normaliser's lse is 0, its sum
    being 1; softpick's is the logarithm of its sum."""
    result = Forward.of_no_keys(inputs, inputs.q.shape[:3])
    if not result.lse.numel():
        return result
    of_nothing = facts.weights.eps if facts.weights.summed else 1.0
    result.lse.fill_(math.log(of_nothing))
    result.max_scores.zero_()
    result.total.fill_(of_nothing)
    space = Workspace(inputs.precision)
    rows = _Softpick if facts.weights.summed else _Elementwise
    for block in Walk(facts, inputs):
        rows(block, space).run(result)
    return result


class _Elementwise:
    """The output of one block of query rows."""

    def __init__(self, block: Block, space: Workspace) -> None:
        self.block, self.space = block, space
        self.queries = scaled_queries(block, space)
        width = block.walk.inputs.v.shape[-1]
        self.output = space.take("output", *self.queries.shape[:2], width).zero_()

    def run(self, result: Forward) -> None:
        for span in self.block.spans:
            scores = raw_scores(self.block, span, self.queries, self.space)
            weights = self.weights(modified(self.block, span, scores, self.space), span)
            values = self.block.heads.keys(self.block.walk.inputs.v, span.keys)
            flat = self.block.keep(weights, span).flatten(1, 2)
            matmul(flat, values.to(flat.dtype), self.output, accumulate=True)
        self.write(result)

    def weights(self, scores: Tensor, span: Span) -> Tensor:
        self.block.hide(scores, span, 0)
        return scores

    def write(self, result: Forward) -> None:
        heads = self.block.heads
        heads.queries(result.out, self.block.rows).copy_(self.output.unflatten(1, (heads.ratio, -1)))


class _Softpick(_Elementwise):
    """The same, with the largest score of each row, or 0, and the sum relative to it."""

    def __init__(self, block: Block, space: Workspace) -> None:
        super().__init__(block, space)
        shape = *self.queries.unflatten(1, (block.heads.ratio, -1)).shape[:3], 1
        self.shift = torch.zeros(shape, dtype=self.queries.dtype)
        self.total = torch.full_like(self.shift, block.walk.facts.weights.eps)

    def weights(self, scores: Tensor, span: Span) -> Tensor:
        self.block.hide(scores, span, -INFINITY)
        shift = torch.maximum(self.shift, scores.amax(-1, keepdim=True))
        kept = (self.shift - shift).exp_()
        self.output.mul_(kept.flatten(1, 2))
        weights, _ = shifted(scores, shift)
        self.block.hide(weights, span, 0)
        self.total = self.total.mul_(kept).add_(weights.abs().sum(-1, keepdim=True))
        self.shift = shift
        return weights.clamp_(min=0)

    def write(self, result: Forward) -> None:
        heads, rows = self.block.heads, self.block.rows
        self.output.div_(self.total.flatten(1, 2))
        super().write(result)
        heads.queries(result.max_scores, rows).copy_(self.shift.squeeze(-1))
        heads.queries(result.total, rows).copy_(self.total.squeeze(-1))
        heads.queries(result.lse, rows).copy_(self.total.log().add_(self.shift).squeeze(-1))


def shifted(scores: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    """exp(s - m) - exp(-m), and exp(s - m), of scores of which none is above the shift m >= 0, or not by
    much."""
    power = (scores - shift).exp_()
    base = (-shift).exp_()
    small = torch.expm1(scores.clamp(max=1.0)).mul_(base)
    return torch.where(scores < 1, small, power - base), power


def modified(block: Block, span: Span, scores: Tensor, space: Workspace) -> Tensor:
    """The score mod of a tile's raw scores, which are kept where there is one."""
    if block.walk.plain:
        return scores
    (value,) = block.evaluate([block.walk.facts.score], span, {"score": scores})
    result = space.take("weights", *scores.shape)
    return result.copy_(value) if isinstance(value, Tensor) else result.fill_(value)


# --- the backward pass --------------------------------------------------------------------------------------


def accumulate(facts: Facts, inputs: Inputs, state: Accumulators, shared: SharedGradients) -> None:
    """Add the gradients of a call to `state` and `shared`."""
    for block in Walk(facts, inputs):
        _Rows(block, state, shared).run()


class _Rows:
    """Gradients of one block of query rows."""

    def __init__(self, block: Block, state: Accumulators, shared: SharedGradients) -> None:
        self.block, self.state, self.shared, self.space = block, state, shared, state.space
        heads, rows = block.heads, block.rows
        dout = heads.queries(state.dout, rows)
        self.four = self.space.take("dout", *dout.shape).copy_(dout)
        self.dout = self.four.flatten(1, 2)
        self.queries = scaled_queries(block, self.space)
        self.softpick = block.walk.facts.weights.summed
        if self.softpick:
            saved = state.saved
            self.shift, self.total = (
                heads.queries(x, rows).unsqueeze(-1) for x in (saved.max_scores, saved.total)
            )
            self.delta = (self.four * heads.queries(saved.out, rows)).sum(-1, keepdim=True)
            if state.dlse is not None:
                self.delta -= heads.queries(state.dlse, rows).unsqueeze(-1).to(self.delta.dtype)

    def run(self) -> None:
        heads = self.block.heads
        dq = self.space.take("dq", *self.queries.shape).zero_()
        for span in self.block.spans:
            self._span(span, dq)
        dq = dq.mul_(self.state.inputs.scale).unflatten(1, (heads.ratio, -1))
        heads.queries(self.state.dq, self.block.rows).copy_(dq)

    def _span(self, span: Span, dq: Tensor) -> None:
        block, state, heads = self.block, self.state, self.block.heads
        scores = raw_scores(block, span, self.queries, self.space)
        weights, slope = self._weights(span, scores)
        values = heads.keys(state.inputs.v, span.keys).to(state.inputs.precision)
        dscores = self.space.take("dscores", *weights.shape)
        matmul(self.dout, values.mT, dscores.flatten(1, 2))
        block.keep(dscores, span)
        if self.softpick:
            weights, dscores = self._normalised(span, weights, dscores)
        weights = block.keep(weights, span)
        matmul(weights.flatten(1, 2).mT, self.dout, heads.keys(state.dv, span.keys), accumulate=True)
        block.hide(dscores, span, 0)
        self.shared.add(block, span, scores, dscores)
        if slope is not None:
            dscores.mul_(slope)
            block.hide(dscores, span, 0)  # 0 times an infinite slope is NaN
        flat = dscores.flatten(1, 2)
        keys = heads.keys(state.inputs.k, span.keys).to(state.inputs.precision)
        matmul(flat, keys, dq, accumulate=True)
        matmul(flat.mT, self.queries, heads.keys(state.dk, span.keys), accumulate=True)

    def _weights(self, span: Span, scores: Tensor) -> tuple[Tensor, Value | None]:
        """Modified scores, 0 where they are hidden, and their slopes (None: one)."""
        walk, slope = self.block.walk, None
        weights = self.space.take("weights", *scores.shape)
        if walk.plain:
            weights.copy_(scores)
        else:
            by_score = walk.facts.gradient.by_score
            value, slope = self.block.evaluate([walk.facts.score, by_score], span, {"score": scores})
            weights = weights.copy_(value) if isinstance(value, Tensor) else weights.fill_(value)
            slope = None if by_score is ONE else slope
        self.block.hide(weights, span, 0)
        return weights, slope

    def _normalised(self, span: Span, scores: Tensor, dweights: Tensor) -> tuple[Tensor, Tensor]:
        """Softpick's probabilities of modified scores, and gradients of these."""
        weights, power = shifted(scores, self.shift)
        self.block.hide(weights, span, 0)
        dscores = torch.where(scores > 0, dweights, 0) - scores.sign() * self.delta
        return weights.clamp_(min=0).div_(self.total), dscores.mul_(power).div_(self.total)
