"""Sums of rectangles for a range of queries: results, by their log-sum-exps, and gradients.

Each tensor is passed over as few times as can be: on a GPU that is what adding up costs. A lone part stays as
it came.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fa4flex.parallel.pieces import SEQUENCE
from fa4flex.parallel.placement import Range, Ranges


class Result:
    """Output and log-sum-exp over the keys so far, of the dtype of sums where parts are merged.

    A row without keys has output 0 and log-sum-exp -inf, in each part and in the sum.
    """

    def __init__(self, out: Tensor, lse: Tensor) -> None:
        self.out, self.lse = out, lse

    def take_in(self, out: Tensor, lse: Tensor) -> None:
        """Add a part over other keys."""
        mine, theirs = self._shares(lse)
        self.out.mul_(mine).addcmul_(out, theirs)

    def take_in_sinks(self, logits: Tensor) -> None:
        """Add keys whose values are 0, of these logits [H]."""
        mine, _ = self._shares(logits.to(self.lse.dtype)[:, None].expand_as(self.lse))
        self.out.mul_(mine)

    def _shares(self, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Weights of what is here and of a part, both at most 1; from now on the sum has the part's keys."""
        total = torch.logaddexp(self.lse, lse)
        largest = total.masked_fill(total == -torch.inf, 0.0)
        mine, theirs = ((x - largest).exp_().unsqueeze(-1) for x in (self.lse, lse))
        self.lse = total
        return mine, theirs


class Sum:
    """A sum of tensors in `dtype`."""

    def __init__(self, dtype: torch.dtype, x: Tensor) -> None:
        self.dtype, self.total, self.alone = dtype, x, True

    def take_in(self, x: Tensor) -> None:
        if self.alone:
            self.total, self.alone = self.total.to(self.dtype, copy=True), False
        self.total += x


def in_order(parts: dict[Range, Tensor], ranges: Ranges, into: Tensor, fill: float) -> Tensor:
    """Parts of queries, one range after another, written to `into`; `fill` where there is none. A lone part
    of its dtype is given back itself."""
    alone = parts.get(ranges[0]) if len(ranges) == 1 else None
    if alone is not None and alone.dtype == into.dtype:
        return alone
    at = 0
    for lo, hi in ranges:
        place = into.narrow(SEQUENCE, at, hi - lo)
        at += hi - lo
        if (lo, hi) in parts:
            place.copy_(parts[lo, hi])
        else:
            place.fill_(fill)
    return into
