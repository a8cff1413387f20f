"""Guests: queries that visit other ranks, which compute them against parts of their keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from fa4flex.parallel.exchange import Exchange, tokens
from fa4flex.parallel.links import Links
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

    def go(self, tensors: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        """Send rows [B, H, own queries, D] of those that visit others; waits for, and returns, visitors', in
        the widest of the dtypes."""
        if not self.exchange.guests:
            return lambda: [x.narrow(SEQUENCE, 0, 0) for x in tensors]
        away, here = self.exchange.visits(self.rank), self.exchange.visitors(self.rank)
        rows = rows_of(tensors, self.exchange.queries[self.rank], away)
        arrival = self.links.all_to_all(rows, list(map(tokens, away)), list(map(tokens, here)))
        return lambda: tensors_of(arrival(), tensors)

    def return_home(self, tensors: Sequence[Tensor]) -> Iterator[tuple[Range, list[Tensor]]]:
        """Send rows [B, H, visitors, D] to their owners; what comes back, by range, in order of hosts."""
        if not self.exchange.guests:
            return
        away, here = self.exchange.visits(self.rank), self.exchange.visitors(self.rank)
        rows = rows_of(tensors, self.visitors, here)
        rows = self.links.all_to_all(rows, list(map(tokens, here)), list(map(tokens, away)))()
        found, at = tensors_of(rows, tensors), 0
        for lo, hi in joined(away):
            yield (lo, hi), [x.narrow(SEQUENCE, at, hi - lo).contiguous() for x in found]
            at += hi - lo
