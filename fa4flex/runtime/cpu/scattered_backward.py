"""Gradients of attention over scattered tiles: the formulas of backward.py on batches of items.

Contributions to keys and values are added to their tiles in the order of items, by `index_add_`, which on a
CPU adds one after the other: results are the same to the last bit on every run.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fa4flex.codegen.analyze.gradient import ONE
from fa4flex.codegen.evaluate import DividedByZero, PastTheEnd, Value
from fa4flex.runtime.cpu.scattered import Batch, Scattered
from fa4flex.runtime.cpu.softmax import Forward, normalised
from fa4flex.runtime.cpu.tiles import exponential

Upstream = tuple[Tensor, Tensor | None, Tensor | None]
"""Gradients of the output [B, H, Sq, Dv] and of the log-sum-exp [B, H, Sq]; none of the entropy."""


def gradients(
    call: Scattered, saved: Forward, upstream: Upstream, sinks: Tensor | None
) -> tuple[Tensor, Tensor, Tensor] | None:
    """dq, dk and dv; those of the sinks [H] are added to `sinks`. None where a mod cannot be evaluated at
    some pair, as in the forward pass; then nothing was added."""
    state = _State.of(call, saved, upstream)
    try:
        result = state.run()
    except (PastTheEnd, DividedByZero):
        return None
    if sinks is not None:
        state.add_to(sinks)
    return result


@dataclass(frozen=True, eq=False)
class _State:
    """Tensors of all items: queries are scaled, dout and delta divided by the softmax's denominator. largest
    and delta [items, height, 1]; keys and values by tiles."""

    call: Scattered
    queries: Tensor
    dout: Tensor
    largest: Tensor
    delta: Tensor
    logits: Tensor | None
    keys: Tensor
    values: Tensor

    @staticmethod
    def of(call: Scattered, saved: Forward, upstream: Upstream) -> _State:
        inputs, dtype = call.inputs, call.inputs.precision
        largest, total = (call.of_rows(x, dtype).unsqueeze(-1) for x in (saved.max_scores, saved.total))
        logits = None if call.sinks is None else call.sinks.unsqueeze(-1)
        dlse = None if upstream[1] is None else call.of_rows(upstream[1], dtype)
        dout, out = call.of_rows(upstream[0], dtype), call.of_rows(saved.out, dtype)
        largest, delta = normalised(dout, out, dlse, largest, total, logits)
        return _State(
            call,
            call.of_rows(inputs.q, dtype).mul_(inputs.scale),
            dout,
            largest,
            delta,
            logits,
            *(call.of_keys(x, dtype) for x in (inputs.k, inputs.v)),
        )

    def run(self) -> tuple[Tensor, Tensor, Tensor]:
        call, inputs = self.call, self.call.inputs
        dq = torch.zeros_like(self.queries)
        dk, dv = torch.zeros_like(self.keys), torch.zeros_like(self.values)
        for numbers, items in call.batches():
            batch = Batch.of(call, items)
            dq[numbers] = self._batch(batch, numbers, (dk, dv))
        into = torch.empty_like(inputs.q, memory_format=torch.contiguous_format)
        call.to_rows(dq.mul_(inputs.scale), into)
        return into, self._of_tiles(dk, inputs.k), self._of_tiles(dv, inputs.v)

    def _batch(self, batch: Batch, numbers: Tensor, sums: tuple[Tensor, Tensor]) -> Tensor:
        """Add a batch's part to dk and dv; its dq / scale."""
        queries, dout = self.queries[numbers], self.dout[numbers]
        keys, values = batch.gathered(self.keys), batch.gathered(self.values)
        scores = torch.bmm(queries, keys.mT)
        weights, slope, hidden = self._weights(batch, scores)
        weights = weights.sub_(self.largest[numbers])
        weights = exponential(weights) if hidden is not None or not self.call.plain else weights.exp_()
        _add(sums[1], batch, torch.bmm(weights.mT, dout))
        dscores = torch.bmm(dout, values.mT).sub_(self.delta[numbers]).mul_(weights)
        if slope is not None:
            pairs = dscores.unflatten(1, (self.call.ratio, -1))
            pairs.mul_(slope)
            # The slope may be infinite or NaN where the mask hides the score, and 0 * inf is NaN.
            if hidden is not None:
                pairs.masked_fill_(hidden, 0)
        _add(sums[0], batch, torch.bmm(dscores.mT, queries))
        return torch.bmm(dscores, keys)

    def _weights(self, batch: Batch, scores: Tensor) -> tuple[Tensor, Value | None, Tensor | None]:
        """Modified scores, -inf where hidden; d score' / d score (None: one); what is hidden."""
        call, slope, weights = self.call, None, scores
        pairs = scores.unflatten(1, (call.ratio, -1))
        if not call.plain:
            by_score = call.facts.gradient.by_score
            modified, slope = batch.evaluate([call.facts.score, by_score], score=pairs)
            weights = scores.new_empty(scores.shape)
            pairs = weights.unflatten(1, (call.ratio, -1))
            pairs.copy_(modified) if isinstance(modified, Tensor) else pairs.fill_(modified)
            slope = None if by_score is ONE else slope
        hidden = batch.hidden()
        if hidden is not None:
            pairs.masked_fill_(hidden, -torch.inf)
        return weights, slope, hidden

    def _of_tiles(self, x: Tensor, like: Tensor) -> Tensor:
        """[B, Hkv, Skv, D] of the tiles of all heads, in the dtype of `like`."""
        batch, heads, length, width = like.shape
        return x.view(batch, heads, -1, width)[:, :, :length].to(like.dtype, copy=True)

    def add_to(self, sinks: Tensor) -> None:
        """Add the gradients of the sinks."""
        assert self.logits is not None
        share = ((self.logits - self.largest).exp_() * self.delta).squeeze(-1)
        of_heads = share.unflatten(1, (self.call.ratio, -1)).sum(-1, dtype=torch.float64)
        sinks.view(-1, self.call.ratio).index_add_(0, self.call.items.h, -of_heads)


def _add(total: Tensor, batch: Batch, parts: Tensor) -> None:
    """Add gradients of gathered keys [items, tiles * keys, D] to those of their tiles. Padding has none."""
    count = batch.places.numel()
    total.index_add_(0, batch.places, parts.reshape(count, -1))
