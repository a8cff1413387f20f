"""Guests: queries that visit other ranks, which compute them against parts of their keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fa4flex.parallel.exchange import Exchange
from fa4flex.parallel.links import Links
from fa4flex.parallel.moves import send
from fa4flex.parallel.pieces import SEQUENCE, rows_of, tensors_of
from fa4flex.parallel.placement import Range, Ranges, joined


@dataclass(frozen=True, eq=False)
class Guests:
    """Rows of guests on their way, as one rank sees them. Where a plan has none, nothing is sent."""

    exchange: Exchange
    rank: int
    links: Links

    @property
    def visitors(self) -> Ranges:
        """Queries of others that are here, by owner."""
        return joined(self.exchange.visitors(self.rank))

    def send(self, tensors: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        """Send rows [B, H, own queries, D] of those that visit others; waits for, and returns, visitors'."""
        if not self.exchange.guests:
            return lambda: [x.narrow(SEQUENCE, 0, 0) for x in tensors]
        away, here = self.exchange.visits(self.rank), self.exchange.visitors(self.rank)
        rows = _bytes(tensors, self.exchange.queries[self.rank], away)
        arrival = send(self.links, rows, away, here)
        return lambda: _tensors(arrival(), tensors)

    def send_back(self, tensors: Sequence[Tensor]) -> Iterator[tuple[Range, list[Tensor]]]:
        """Send rows [B, H, visitors, D] to their owners; what comes back, by range, in order of hosts."""
        if not self.exchange.guests:
            return
        away, here = self.exchange.visits(self.rank), self.exchange.visitors(self.rank)
        rows = _bytes(tensors, self.visitors, here)
        result, at = _tensors(send(self.links, rows, here, away)(), tensors), 0
        for lo, hi in joined(away):
            yield (lo, hi), [x.narrow(SEQUENCE, at, hi - lo).contiguous() for x in result]
            at += hi - lo


def _bytes(tensors: Sequence[Tensor], own: Sequence[Range], wanted: Sequence[Ranges]) -> Tensor:
    """uint8 [tokens, bytes]: rows of what goes to each rank, tensors of any dtypes side by side."""
    return torch.cat([rows_of([x], own, wanted).contiguous().view(torch.uint8) for x in tensors], 1)


def _tensors(rows: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The [B, H, tokens, D] tensors of such rows; `like` gives their dtypes and other dimensions."""
    sizes = [x.element_size() * x.shape[0] * x.shape[1] * x.shape[3] for x in like]
    parts = zip(rows.split(sizes, 1), like, strict=True)
    return [tensors_of(part.contiguous().view(x.dtype), [x])[0] for part, x in parts]
