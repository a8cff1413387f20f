"""Blockwise attention backward on a CPU: scores are recomputed tile by tile, and normalised by saved sums.

With P = exp(score' - max) / total, dP = dO V^T and D = rowsum(dO * O) - dLSE,

    dscore' = P * (dP - D)      dV = P^T dO      dsink = -sum(exp(sink - max) / total * D)
    dscore = dscore' * (d score' / d score)      dQ = scale dscore K      dK = scale dscore^T Q

(FlashAttention, Dao et al. 2022, algorithm 4, with the derivative of the score mod and of the lse). A
gradient of the entropy adds to dscore': see entropy.py.

Dropout multiplies P by Z, which is 0 or 1 / (1 - rate), after normalising: O = (P * Z) V, dV = (P * Z)^T dO
and dP = Z * (dO V^T). D stays rowsum(dO * O), since sum_k P dP = sum_k P Z (dO V^T) = dO (P * Z) V = dO O. So
dscore' = P * (Z * (dO V^T) - D), of pairs that are dropped too: their scores count in the denominator.

Tiles are taken in one fixed order, so the results are the same to the last bit on every run.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from fa4flex.codegen.analyze.facts import Facts
from fa4flex.codegen.analyze.gradient import ONE
from fa4flex.codegen.evaluate import Value
from fa4flex.runtime.cpu.accumulators import Accumulators
from fa4flex.runtime.cpu.captured import SharedGradients
from fa4flex.runtime.cpu.entropy import Pulled
from fa4flex.runtime.cpu.forward import sink_logits
from fa4flex.runtime.cpu.scattered import scattered
from fa4flex.runtime.cpu.scattered_backward import gradients as scattered_gradients
from fa4flex.runtime.cpu.softmax import INFINITY, Forward, normalised
from fa4flex.runtime.cpu.tiles import (
    Block,
    Inputs,
    Span,
    Walk,
    fitted_call,
    matmul,
    raw_scores,
    scaled_queries,
)
from fa4flex.runtime.cpu.weights import accumulate as accumulate_weighted


@dataclass(frozen=True)
class Gradients:
    """dq, dk, dv, sinks in the dtypes of their inputs; `operands` by slot, None where not asked for."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    operands: tuple[Tensor | None, ...]
    sinks: Tensor | None


Upstream = tuple[Tensor, Tensor | None, Tensor | None]
"""Gradients of the output [B, H, Sq, Dv], and of log-sum-exp and entropy [B, H, Sq], None for zeros."""


@torch.no_grad()
def backward(
    facts: Facts,
    inputs: Inputs,
    saved: Forward,
    dout: Tensor,
    dlse: Tensor | None = None,
    needs: Collection[int] = (),
    dentropy: Tensor | None = None,
) -> Gradients:
    """Gradients of `forward(facts, inputs)`, whose result is `saved`.

    dout [B, H, Sq, Dv], dlse and dentropy [B, H, Sq] (None: zero) may have any strides, expanded ones too.
    `needs` names the operand slots whose gradient is wanted.
    """
    facts, inputs = fitted_call(facts, inputs)
    shared = SharedGradients(facts, inputs, needs)
    dq, dk, dv = accumulate(facts, inputs, saved, (dout, dlse, dentropy), shared)
    return Gradients(dq, dk, dv, *shared.result())


def accumulate(
    facts: Facts,
    inputs: Inputs,
    saved: Forward,
    upstream: Upstream,
    shared: SharedGradients,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of one call; gradients of operands and sinks go to `shared`.

    All integers of `facts` fit in 64 bits.
    """
    if not facts.softmax:
        state = Accumulators(inputs, saved, upstream, shared)
        accumulate_weighted(facts, inputs, state, shared)
        return state.dq, state.dk.to(inputs.k.dtype), state.dv.to(inputs.v.dtype)
    call = None if shared.operands or upstream[2] is not None else scattered(facts, inputs)
    result = None if call is None else scattered_gradients(call, saved, upstream, shared.sinks)
    if result is not None:
        return result
    state = Accumulators(inputs, saved, upstream, shared)
    for block in Walk(facts, inputs):
        _Rows(block, state).run()
    return state.dq, state.dk.to(inputs.k.dtype), state.dv.to(inputs.v.dtype)


class _Rows:
    """One block of query rows."""

    def __init__(self, block: Block, state: Accumulators) -> None:
        self.block, self.state, self.space = block, state, state.space
        heads, rows = block.heads, block.rows
        dout = heads.queries(state.dout, rows)
        dout = self.space.take("dout", *dout.shape).copy_(dout)
        self.queries = scaled_queries(block, self.space)
        largest, total = (
            heads.queries(x, rows).unsqueeze(-1) for x in (state.saved.max_scores, state.saved.total)
        )
        self.sinks = sink_logits(state.inputs, heads)
        dlse = None if state.dlse is None else heads.queries(state.dlse, rows)
        out = heads.queries(state.saved.out, rows)
        self.largest, self.delta = normalised(dout, out, dlse, largest, total, self.sinks)
        self.dout = dout.flatten(1, 2)
        self.pulled: Pulled | None = None
        self.logs = torch.zeros(())
        if state.dentropy is not None:
            assert state.saved.entropy is not None
            given, entropy = (
                heads.queries(x, rows).unsqueeze(-1) for x in (state.dentropy, state.saved.entropy)
            )
            self.pulled = Pulled.of(given, entropy, total)

    def run(self) -> None:
        heads = self.block.heads
        if self.sinks is not None and self.state.shared.sinks is not None:
            delta = self.delta
            if self.pulled is not None:
                delta = delta + self.pulled.of_sinks(self.sinks, self.largest)
            share = ((self.sinks - self.largest).exp_() * delta).sum((-1, -2)).flatten()
            self.state.shared.sinks[heads.start : heads.stop] -= share
        dq = self.space.take("dq", *self.queries.shape).zero_()
        for span in self.block.spans:
            self._span(span, dq)
        dq = dq.mul_(self.state.inputs.scale).unflatten(1, (heads.ratio, -1))
        heads.queries(self.state.dq, self.block.rows).copy_(dq)

    def _span(self, span: Span, dq: Tensor) -> None:
        block, state, heads = self.block, self.state, self.block.heads
        scores, weights, dscores, slope = self._recompute(span)
        used = weights
        if block.walk.facts.kept is not None:
            used = block.keep(self.space.take("kept", *weights.shape).copy_(weights), span)
            block.keep(dscores, span)
        matmul(used.flatten(1, 2).mT, self.dout, heads.keys(state.dv, span.keys), accumulate=True)
        dscores.sub_(self.delta)
        if self.pulled is not None:
            self.pulled.subtract(dscores, self.logs, weights)
        dscores.mul_(weights)
        state.shared.add(block, span, scores, dscores)
        if slope is not None:
            dscores.mul_(slope)
            # The slope may be infinite or NaN where the mask hides the score, and 0 * inf is NaN.
            block.hide(dscores, span, 0)
        flat = dscores.flatten(1, 2)
        keys = heads.keys(state.inputs.k, span.keys).to(state.inputs.precision)
        matmul(flat, keys, dq, accumulate=True)
        matmul(flat.mT, self.queries, heads.keys(state.dk, span.keys), accumulate=True)

    def _recompute(self, span: Span) -> tuple[Tensor, Tensor, Tensor, Value | None]:
        """Recomputed values of one tile: raw scores, weights P * total, dP / total, and d score' / d score
        (None: one)."""
        inputs, heads = self.state.inputs, self.block.heads
        scores = raw_scores(self.block, span, self.queries, self.space)
        weights, slope = self._weights(span, scores)
        dweights = self.space.take("dscores", *weights.shape)
        values = heads.keys(inputs.v, span.keys).to(inputs.precision)
        matmul(self.dout, values.mT, dweights.flatten(1, 2))
        return scores, weights, dweights, slope

    def _weights(self, span: Span, scores: Tensor) -> tuple[Tensor, Value | None]:
        """P * total of a tile, and d score' / d score (None: one). A score mod's `scores` are kept."""
        walk, slope = self.block.walk, None
        weights = scores
        if not walk.plain:
            by_score = walk.facts.gradient.by_score
            modified, slope = self.block.evaluate([walk.facts.score, by_score], span, {"score": scores})
            weights = self.space.take("weights", *scores.shape)
            weights.copy_(modified) if isinstance(modified, Tensor) else weights.fill_(modified)
            slope = None if by_score is ONE else slope
        self.block.hide(weights, span, -INFINITY)
        weights.sub_(self.largest)
        if self.pulled is not None:
            self.logs = weights.clone()
        return self.block.exponentials(weights, span), slope
