"""Tokens that go to another place before attention, and back after it: to where queries are computed, or to
the rank that has their heads. Both ways are exchanges of rows; each is the gradient of the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fa4flex.parallel.exchange import tokens
from fa4flex.parallel.links import Links
from fa4flex.parallel.pieces import SEQUENCE, Pieces, rows_of, tensors_of
from fa4flex.parallel.placement import Ranges, joined

Held = tuple[Ranges, ...]
Exchange = Callable[[Links, Tensor, Held], Tensor]
"""The tokens of each rank."""


def common(a: Ranges, b: Ranges) -> Ranges:
    """Tokens that are in both ranges, in order."""
    results = [(max(x[0], y[0]), min(x[1], y[1])) for x in a for y in b]
    return tuple(sorted(x for x in results if x[0] < x[1]))


class Moved(torch.autograd.Function):
    """Local [B, H, tokens, D], whose tokens were those of `source` by rank, with those of `target`."""

    @staticmethod
    def forward(ctx: Any, links: Links, x: Tensor, source: Held, target: Held) -> Any:
        ctx.route = links, target, source
        return _moved(links, x, source, target)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        links, source, target = ctx.route
        return None, _moved(links, gradient, source, target), None, None


def moved(links: Links, x: Tensor, source: Held, target: Held) -> Tensor:
    """See Moved. Nothing is sent where both are the same."""
    if source == target:
        return x
    result: Tensor = Moved.apply(links, x, source, target)
    return result


def _moved(links: Links, x: Tensor, source: Held, target: Held) -> Tensor:
    outgoing = [common(source[links.rank], to) for to in target]
    incoming = [common(of, target[links.rank]) for of in source]
    rows = rows_of([x], source[links.rank], outgoing)
    rows = links.all_to_all(rows, list(map(tokens, outgoing)), list(map(tokens, incoming)))()
    (result,) = tensors_of(rows, [x])
    return _in_order(result, joined(incoming), target[links.rank])


def _in_order(x: Tensor, places: Ranges, wanted: Ranges) -> Tensor:
    pieces = Pieces(x, places)
    return torch.cat([x.narrow(SEQUENCE, 0, 0), *(pieces.take(lo_hi) for lo_hi in wanted)], SEQUENCE)


# --- tokens for heads ---------------------------------------------------------------------------------------


def by_heads(links: Links, x: Tensor, held: Held) -> Tensor:
    """All tokens of this rank's heads, [B, H / ranks, S, D], from this rank's tokens of all heads."""
    result: Tensor = _AllToAll.apply((_by_heads, _by_tokens), links, x, held)
    return result


def by_tokens(links: Links, x: Tensor, held: Held) -> Tensor:
    """This rank's tokens of all heads, from all tokens of this rank's heads."""
    result: Tensor = _AllToAll.apply((_by_tokens, _by_heads), links, x, held)
    return result


class _AllToAll(torch.autograd.Function):
    """An exchange, whose gradient goes by the reverse one."""

    @staticmethod
    def forward(ctx: Any, both: tuple[Exchange, Exchange], links: Links, x: Tensor, held: Held) -> Tensor:
        there, ctx.back = both
        ctx.links, ctx.held = links, held
        return there(links, x, held)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, None, ctx.back(ctx.links, gradient, ctx.held), None


def _by_heads(links: Links, x: Tensor, held: Held) -> Tensor:
    parts = x.chunk(links.size, 1)
    rows = torch.cat([part.permute(2, 0, 1, 3).flatten(1) for part in parts])
    counts = list(map(tokens, held))
    rows = links.all_to_all(rows, [x.shape[SEQUENCE]] * links.size, counts)()
    (result,) = tensors_of(rows, [parts[0]])
    return _in_order(result, joined(held), ((0, sum(counts)),))


def _by_tokens(links: Links, x: Tensor, held: Held) -> Tensor:
    rows = rows_of([x], ((0, x.shape[SEQUENCE]),), held)
    counts = list(map(tokens, held))
    mine = counts[links.rank]
    rows = links.all_to_all(rows, counts, [mine] * links.size)()
    return torch.cat(
        [tensors_of(part, [x])[0] for part in rows.split(mine)] if mine else [x[:, :, :0]] * links.size, 1
    )
