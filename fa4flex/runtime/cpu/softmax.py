"""Results of a forward pass, and the softmax's rules that walks over tiles and gathered tiles share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fa4flex.runtime.cpu.tiles import Inputs
from fa4flex.runtime.layouts import empty_output

INFINITY = float("inf")


@dataclass(frozen=True)
class Forward:
    """out [B, H, Sq, Dv] in q's dtype; lse and max_scores [B, H, Sq], fp32 or, for fp64 inputs, fp64.

    lse is the natural logarithm, sink included; max_scores is the largest modified score of the row.
    A row that attends to nothing has out 0, lse -inf (or its sink) and max_scores -inf.

    `total` [B, H, Sq] is the softmax's denominator relative to the largest of max_scores and sink. The
    backward pass needs it: an lse of -1e9 has no digits left for the logarithm of the number of keys.
    `entropy` [B, H, Sq], see entropy.py; None where it is not wanted.
    """

    out: Tensor
    lse: Tensor
    max_scores: Tensor
    total: Tensor
    entropy: Tensor | None = None

    @staticmethod
    def of_no_keys(inputs: Inputs, statistics: tuple[int, ...]) -> Forward:
        """Results of rows that attend to nothing, without sinks; `statistics` is the shape of all but out."""
        out = empty_output(inputs.q, inputs.v.shape[-1], inputs.output or inputs.q.dtype).zero_()
        lse = torch.full(statistics, -INFINITY, dtype=inputs.precision)
        entropy = torch.zeros_like(lse) if inputs.entropy else None
        return Forward(out, lse, lse.clone(), torch.zeros_like(lse), entropy)


def finite(x: Tensor) -> Tensor:
    """x with -inf replaced by 0: what may be subtracted from a score without making inf - inf."""
    return x.masked_fill(x == -INFINITY, 0)


def with_sinks(maximum: Tensor, total: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(shift, rescale, total) of rows with a sink beside their keys: the score that others are taken relative
    to, the factor of all that was summed relative to `maximum`, and the denominator.

    A row without keys has maximum -inf: its output is 0 / 1, and its lse is the sink.
    """
    shift = finite(torch.maximum(maximum, sinks))
    rescale = (maximum - shift).exp_()
    return shift, rescale, total * rescale + (sinks - shift).exp_()


def beside_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) of rows [..., Dv] and [...] with one more logit each, without a value; `sinks` broadcasts
    against lse."""
    whole = torch.logaddexp(lse, sinks)
    return out * (lse - finite(whole)).exp_().unsqueeze(-1), whole


def normalised(
    dout: Tensor, out: Tensor, dlse: Tensor | None, largest: Tensor, total: Tensor, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(largest, D / total) of rows, [..., 1] each: what scores are taken relative to, sinks among it, and
    D = rowsum(dout * out) - dlse. `dout` [..., rows, Dv] is divided by `total` in place.

    1 / total multiplies every weight: applied to dout and D once per row, not to each score. A row that
    attends to nothing has total 0; against +inf its weights are exp(-inf) = 0, not NaN.
    """
    largest = largest if sinks is None else torch.maximum(largest, sinks)
    nothing = total == 0
    inverse = total.reciprocal().masked_fill_(nothing, 0)
    delta = (dout * out).sum(-1, keepdim=True)
    if dlse is not None:
        delta -= dlse.unsqueeze(-1).to(delta.dtype)
    dout.mul_(inverse)
    return largest.masked_fill(nothing, INFINITY), delta.mul_(inverse).masked_fill_(nothing, 0)
