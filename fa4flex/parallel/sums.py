"""Sums of rectangles for a range of queries: results, by their log-sum-exps, and gradients.

Each tensor is passed over as few times as can be: on a GPU that is what adding up costs. A lone part stays as
it came, and where one covers all that is asked for, what others add to some of it is added in its own memory:
tensors that are taken in belong to the sums.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from fa4flex.parallel.pieces import SEQUENCE, copy_into, in_a_row
from fa4flex.parallel.placement import Range, Ranges


class Result:
    """Output and log-sum-exp over the keys so far, of the dtype of sums where parts are merged.

    A row without keys has output 0 and log-sum-exp -inf, in each part and in the sum. The last part is merged
    where the whole is written.
    """

    def __init__(self, out: Tensor, lse: Tensor) -> None:
        self.out, self.lse = out, lse
        self.last: tuple[Tensor, Tensor] | None = None

    def add(self, out: Tensor, lse: Tensor) -> None:
        """Add a part over other keys."""
        self._merge(self.out)
        self.last = out, lse

    def add_sinks(self, logits: Tensor) -> None:
        """Add keys whose values are 0, of these logits [H], after all parts."""
        self._merge(self.out)
        mine, _ = self._shares(logits.to(self.lse.dtype)[:, None].expand_as(self.lse))
        self.out.mul_(mine)

    def write(self, out: Tensor, lse: Tensor) -> None:
        """Put both there."""
        if self.last is None:
            copy_into(out, self.out)
        self._merge(out)
        lse.copy_(self.lse)

    def _merge(self, into: Tensor) -> None:
        """Merge the last part, the output being written to `into`."""
        if self.last is None:
            return
        (out, lse), self.last = self.last, None
        mine, theirs = self._shares(lse)
        torch.addcmul(self.out.mul_(mine), out, theirs, out=into)

    def _shares(self, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Weights of what is here and of a part, both at most 1; from now on the sum has the part's keys."""
        total = torch.logaddexp(self.lse, lse)
        largest = total.masked_fill(total == -torch.inf, 0.0)
        mine, theirs = ((x - largest).exp_().unsqueeze(-1) for x in (self.lse, lse))
        self.lse = total
        return mine, theirs


class Added(Result):
    """The same of an elementwise normaliser's parts, which are added: their log-sum-exps say nothing."""

    def _merge(self, into: Tensor) -> None:
        if self.last is not None:
            (out, _), self.last = self.last, None
            torch.add(self.out, out, out=into)


class Sum:
    """A sum in `dtype` of tensors of other dtypes, in their order. Two are added where the whole is written:
    one rounding, as a sum in `dtype` would have."""

    def __init__(self, dtype: torch.dtype, x: Tensor) -> None:
        self.dtype, self.total = dtype, x
        self.last: Tensor | None = None
        self.alone = True
        """True while the total is the first tensor itself."""

    def add(self, x: Tensor) -> None:
        if self.last is not None:
            if self.alone:
                self.total, self.alone = self.total.to(self.dtype, copy=True), False
            self.total += self.last
        self.last = x

    def write(self, into: Tensor) -> None:
        """Put the sum there, rounded to the dtype of that."""
        if self.last is None:
            copy_into(into, self.total)
        else:
            torch.add(self.total, self.last, out=into)

    def narrow(self, start: int, length: int) -> Sum:
        """The sum of some of the tokens, which goes on by itself."""
        part = Sum(self.dtype, self.total.narrow(SEQUENCE, start, length))
        part.alone = self.alone
        part.last = None if self.last is None else self.last.narrow(SEQUENCE, start, length)
        return part


class Sums:
    """Sums by ranges of tokens, which may overlap: what is added to some tokens of a sum parts it there."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.parts: dict[Range, Sum] = {}
        self.first: dict[Range, Tensor] = {}
        """The first tensor of each range that had none before."""

    def add(self, where: Range, x: Tensor) -> None:
        """Add x [B, H, tokens, D] to the tokens of a range. What lies within it is added to x instead, whose
        memory may then serve the whole (see `whole`)."""
        lo, hi = where
        over = self._over(lo, hi)
        if over and where not in over and all(lo <= first and last <= hi for first, last in over):
            within = {part: self.parts.pop(part) for part in over}
            self._begin(where, x)
            for part, result in within.items():
                for one in (result.total, result.last):
                    if one is not None:
                        self.add(part, one)
            return
        at = lo
        for first, last in over:
            inner = max(first, lo), min(last, hi)
            if at < inner[0]:
                self._begin((at, inner[0]), x.narrow(SEQUENCE, at - lo, inner[0] - at))
            self._part((first, last), inner)
            self.parts[inner].add(x.narrow(SEQUENCE, inner[0] - lo, inner[1] - inner[0]))
            at = inner[1]
        if at < hi:
            self._begin((at, hi), x.narrow(SEQUENCE, at - lo, hi - at))

    def _begin(self, where: Range, x: Tensor) -> None:
        self.parts[where], self.first[where] = Sum(self.dtype, x), x

    def _part(self, whole: Range, inner: Range) -> None:
        """Part a sum at the ends of `inner`."""
        if whole == inner:
            return
        result = self.parts.pop(whole)
        cuts = sorted({*whole, *inner})
        for lo, hi in pairwise(cuts):
            self.parts[lo, hi] = result.narrow(lo - whole[0], hi - lo)

    def write(self, ranges: Ranges, into: Tensor) -> None:
        """Put the sums of these ranges there, one after another: 0 where nothing was added."""
        at = 0
        for lo, hi in ranges:
            place, end = into.narrow(SEQUENCE, at, hi - lo), lo
            at += hi - lo
            for first, last in self._over(lo, hi):
                inner = max(first, lo), min(last, hi)
                self._part((first, last), inner)
                place.narrow(SEQUENCE, end - lo, inner[0] - end).zero_()
                self.parts[inner].write(place.narrow(SEQUENCE, inner[0] - lo, inner[1] - inner[0]))
                end = inner[1]
            place.narrow(SEQUENCE, end - lo, hi - end).zero_()

    def pop(self, ranges: Ranges, into: Tensor) -> None:
        """Put the sums of these ranges there, as `write`; they are forgotten here."""
        self.write(ranges, into)
        for lo, hi in ranges:
            for part in self._over(lo, hi):
                del self.parts[part]
            self.first = {part: x for part, x in self.first.items() if part[1] <= lo or hi <= part[0]}

    def whole(self, ranges: Ranges, like: Tensor) -> Tensor:
        """The same as a tensor like this one: one that was taken in, if it is of just these tokens."""
        whole = in_a_row(ranges)
        result = self.first.get(whole[0]) if len(whole) == 1 else None
        if result is None or result.dtype != like.dtype:
            result = torch.empty_like(like)
            self.write(ranges, result)
            return result
        first, last = whole[0]
        for lo, hi in self._over(first, last):
            part = self.parts.pop((lo, hi))
            if not (part.alone and part.last is None):
                part.write(result.narrow(SEQUENCE, lo - first, hi - lo))
        self._begin((first, last), result)
        return result

    def _over(self, lo: int, hi: int) -> list[Range]:
        """The parts that have some of these tokens, in order."""
        return sorted(part for part in self.parts if part[0] < hi and lo < part[1])
