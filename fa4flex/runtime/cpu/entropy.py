"""Entropy of softmax rows: H = -sum(p log p) over the keys, and the sink where there is one.

With weights w = exp(score - shift), their sum and the moment M = sum(w log w),

    H = log(total) - M / total      dH / dscore = -p (log p + H)

A shift that grows by d makes M exp(-d) (M - d total). Pairs that weigh 0 add 0 to M.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fa4flex.runtime.cpu.softmax import finite


def moment_of(logs: Tensor, weights: Tensor) -> Tensor:
    """Moments [.., rows, 1] of weights [.., rows, keys] and their logarithms, which are overwritten."""
    return logs.masked_fill_(weights == 0, 0).mul_(weights).sum(-1, keepdim=True)


def moved(moment: Tensor, total: Tensor, by: Tensor, kept: Tensor) -> Tensor:
    """Moments relative to a shift that is larger `by` so much; kept: exp(-by), or 0 without keys before."""
    return (moment - total * by) * kept


def with_sink(moment: Tensor, sinks: Tensor, shift: Tensor) -> Tensor:
    """Moments of rows with a sink beside their keys."""
    logs = sinks - shift
    weights = logs.exp()
    return moment + (logs.masked_fill(weights == 0, 0) * weights)


def entropy_of(moment: Tensor, total: Tensor) -> Tensor:
    """Entropies; 0 of rows that attend to nothing."""
    safe = total.masked_fill(total == 0, 1)
    return (safe.log() - moment / safe).clamp_(min=0).masked_fill_(total == 0, 0)


class Pulled(NamedTuple):
    """Gradient of the entropy, as it is added to those of scores, by row: -w factor (log w + offset)."""

    factor: Tensor
    offset: Tensor

    @staticmethod
    def of(dentropy: Tensor, entropy: Tensor, total: Tensor) -> Pulled:
        """All [.., rows, 1]; total: the softmax's denominator relative to what weights are."""
        safe = total.masked_fill(total == 0, 1)
        factor = dentropy.to(total.dtype) / safe
        return Pulled(factor.masked_fill_(total == 0, 0), entropy - safe.log())

    def subtract(self, dscores: Tensor, logs: Tensor, weights: Tensor) -> None:
        """Take the gradient into those of scores, which are still to be multiplied by the weights. logs [..,
        rows, keys] are overwritten."""
        dscores.sub_(logs.masked_fill_(weights == 0, 0).add_(self.offset).mul_(self.factor))

    def of_sinks(self, sinks: Tensor, largest: Tensor) -> Tensor:
        """The same of the sinks, [.., rows, 1]."""
        logs = sinks - largest
        return self.factor * (logs.masked_fill(torch.isinf(logs), 0) + self.offset)


def relative_to(maximum: Tensor, shift: Tensor) -> Tensor:
    """Growth of a shift since it was a maximum, that of no keys counting as 0."""
    return shift - finite(maximum)
