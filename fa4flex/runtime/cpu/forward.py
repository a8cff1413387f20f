"""Blockwise attention forward on a CPU: online softmax over the non-empty key tiles of each query block.

Memory is O(S x D) for the results plus a bounded tile buffer. The maths is Milakov & Gimelshein, "Online
normalizer calculation for softmax" (2018), in the tiling of FlashAttention (Dao et al. 2022, algorithm 1).
"""

from __future__ import annotations

import torch
from torch import Tensor

from fa4flex.codegen.analyze.facts import Facts
from fa4flex.runtime.cpu import entropy
from fa4flex.runtime.cpu.few import few_queries, single_queries
from fa4flex.runtime.cpu.fused import attend as attend_fused
from fa4flex.runtime.cpu.scattered import attend as attend_scattered
from fa4flex.runtime.cpu.scattered import scattered
from fa4flex.runtime.cpu.skipping import Skipping
from fa4flex.runtime.cpu.softmax import INFINITY, Forward, finite, with_sinks
from fa4flex.runtime.cpu.tiles import (
    Block,
    Heads,
    Inputs,
    Span,
    Walk,
    Workspace,
    fitted_call,
    matmul,
    raw_scores,
    scaled_queries,
)
from fa4flex.runtime.cpu.weights import attend as attend_weighted


@torch.no_grad()
def forward(facts: Facts, inputs: Inputs) -> Forward:
    """Attention of `inputs` under the score and mask of `facts`. Deterministic.

    Raises UnsupportedError where integers of the mods may leave 64 bits, InputError where one is divided
    by 0.
    """
    return attend(*fitted_call(facts, inputs))


@torch.no_grad()
def outputs(facts: Facts, inputs: Inputs) -> tuple[Tensor, Tensor] | None:
    """(out, lse) of `inputs` alone, by PyTorch's fused kernel; None for calls that it is not for. Raises as
    `forward` does."""
    if not facts.softmax:
        return None
    return single_queries(facts, inputs) or attend_fused(*fitted_call(facts, inputs))


def attend(facts: Facts, inputs: Inputs) -> Forward:
    """`forward` of facts whose integers fit in 64 bits."""
    if not facts.softmax:
        return attend_weighted(facts, inputs)
    few = few_queries(facts, inputs)
    if few is not None:
        return few
    result = Forward.of_no_keys(inputs, inputs.q.shape[:3])
    if result.out.numel() == 0 and result.lse.numel() == 0:
        return result
    call = None if inputs.skip else scattered(facts, inputs)
    outcome = None if call is None else attend_scattered(call)
    if call is not None and outcome is not None:
        for parts, into in zip(
            outcome, (result.out, result.lse, result.max_scores, result.total), strict=True
        ):
            call.to_rows(parts, into)
        return result
    space = Workspace(inputs.precision)
    for block in Walk(facts, inputs):
        rows = _Rows(block, space)
        rows.run()
        rows.write(result)
    return result


@torch.no_grad()
def skipped(facts: Facts, inputs: Inputs) -> Tensor:
    """Share of the keys of each query's tiles that `forward` leaves out, float32 [B, H, Sq]. Raises as it
    does."""
    facts, inputs = fitted_call(facts, inputs)
    result, space = torch.zeros(inputs.q.shape[:3]), Workspace(inputs.precision)
    if not inputs.skip or result.numel() == 0 or inputs.k.numel() == 0:
        return result
    for block in Walk(facts, inputs):
        rows = _Rows(block, space)
        rows.run()
        if rows.skipping is not None:
            block.heads.queries(result, block.rows).copy_(rows.skipping.share)
    return result


def sink_logits(inputs: Inputs, heads: Heads) -> Tensor | None:
    """The sinks of some heads, shaped [groups, ratio, 1, 1]."""
    if inputs.sinks is None:
        return None
    sinks = inputs.sinks[heads.start : heads.stop].to(inputs.precision)
    return sinks.view(heads.groups, heads.ratio, 1, 1)


class _Rows:
    """Running maximum, sum and output of one block of query rows."""

    def __init__(self, block: Block, space: Workspace) -> None:
        self.block, self.space = block, space
        self.queries = scaled_queries(block, space)
        self.maximum: Tensor | None = None  # [groups, ratio, rows, 1]
        self.total = torch.zeros(())
        self.moment = torch.zeros(())
        self.output = torch.zeros(())
        self.skipping = Skipping.of(block)

    def run(self) -> None:
        """Take in all keys. Where some may be left out the last ones come first: scores that grow towards
        near keys then leave out most."""
        for span in self.block.spans if self.skipping is None else reversed(self.block.spans):
            self.attend(span)

    def attend(self, span: Span) -> None:
        """Take in the keys of one span."""
        block, inputs = self.block, self.block.walk.inputs
        scores = raw_scores(block, span, self.queries, self.space)
        if not block.walk.plain:
            (modified,) = block.evaluate([block.walk.facts.score], span, {"score": scores})
            scores.copy_(modified) if isinstance(modified, Tensor) else scores.fill_(modified)
        block.hide(scores, span, -INFINITY)
        maximum = scores.amax(-1, keepdim=True)
        if self.maximum is not None:
            if self.skipping is not None and self.skipping.leaves_out(scores, maximum, self.maximum):
                return
            maximum = torch.maximum(maximum, self.maximum)
        shift = finite(maximum)
        scores.sub_(shift)
        logs = scores.clone() if inputs.entropy else None
        total = block.exponentials(scores, span).sum(-1, keepdim=True)
        moment = self.moment if logs is None else entropy.moment_of(logs, scores)
        weights = block.keep(scores, span).flatten(1, 2)
        values = block.heads.keys(inputs.v, span.keys).to(inputs.precision)
        if self.maximum is None:
            self.output = self.space.take("output", *weights.shape[:2], values.shape[-1])
            matmul(weights, values, self.output)
            self.total, self.moment = total, moment
        else:
            kept = (self.maximum - shift).exp_()
            if logs is not None:
                by = entropy.relative_to(self.maximum, shift)
                self.moment = entropy.moved(self.moment, self.total, by, kept) + moment
            self.output.mul_(kept.flatten(1, 2))
            matmul(weights, values, self.output, accumulate=True)
            self.total = self.total.mul_(kept).add_(total)
        self.maximum = maximum

    def write(self, result: Forward) -> None:
        """Normalise and store."""
        heads, rows = self.block.heads, self.block.rows
        sinks = sink_logits(self.block.walk.inputs, heads)
        if self.maximum is None:
            if sinks is not None:
                heads.queries(result.lse, rows).copy_(sinks.squeeze(-1))
                heads.queries(result.total, rows).copy_((sinks - finite(sinks)).exp_().squeeze(-1))
            return
        heads.queries(result.max_scores, rows).copy_(self.maximum.squeeze(-1))
        shift, total = finite(self.maximum), self.total
        if sinks is not None:
            own = total
            shift, rescale, total = with_sinks(self.maximum, own, sinks)
            self.output.mul_(rescale.flatten(1, 2))
            if result.entropy is not None:
                by = entropy.relative_to(self.maximum, shift)
                self.moment = entropy.with_sink(entropy.moved(self.moment, own, by, rescale), sinks, shift)
        if result.entropy is not None:
            found = entropy.entropy_of(self.moment, total)
            heads.queries(result.entropy, rows).copy_(found.squeeze(-1))
        heads.queries(result.total, rows).copy_(total.squeeze(-1))
        inverse = total.reciprocal().masked_fill_(total == 0, 0)
        out = self.output.mul_(inverse.flatten(1, 2))
        heads.queries(result.out, rows).copy_(out.unflatten(1, (heads.ratio, -1)))
        heads.queries(result.lse, rows).copy_(total.log().add_(shift).squeeze(-1))
