"""Tokens that go to another place before attention, and back after it: to where queries are computed, or to
the rank that has their heads. Both ways are exchanges of rows; each is the gradient of the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fa4flex.parallel.exchange import tokens
from fa4flex.parallel.links import Arrival, Links
from fa4flex.parallel.pieces import SEQUENCE, Pieces, rows_of, tensors_of
from fa4flex.parallel.placement import Ranges, joined

Held = tuple[Ranges, ...]
"""The tokens of each rank."""

Move = Callable[[Tensor], Tensor]


def send(links: Links, rows: Tensor, outgoing: Sequence[Ranges], incoming: Sequence[Ranges]) -> Arrival:
    """Send rows of these ranges to each rank; what arrives has those that come from each."""
    return links.all_to_all(rows, list(map(tokens, outgoing)), list(map(tokens, incoming)))


class _Moved(torch.autograd.Function):
    """A move of tokens, whose gradient goes by the reverse one."""

    @staticmethod
    def forward(ctx: Any, there: Move, back: Move, x: Tensor) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, None, ctx.back(gradient)


def results_by(move: Move, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs [B, H, S, D] and log-sum-exps [B, H, S], both moved."""
    return move(out), move(lse.unsqueeze(-1)).squeeze(-1)


# --- tokens to where queries are computed -------------------------------------------------------------------


def common(a: Ranges, b: Ranges) -> Ranges:
    """Tokens that are in both ranges, in order."""
    results = [(max(x[0], y[0]), min(x[1], y[1])) for x in a for y in b]
    return tuple(sorted(x for x in results if x[0] < x[1]))


def moved(links: Links, source: Held, target: Held, x: Tensor) -> Tensor:
    """Local [B, H, tokens, D], whose tokens were those of `source` by rank, with those of `target`. Nothing
    is sent where both are the same."""
    if source == target:
        return x
    both = partial(_moved, links, source, target), partial(_moved, links, target, source)
    result: Tensor = _Moved.apply(*both, x)
    return result


def _moved(links: Links, source: Held, target: Held, x: Tensor) -> Tensor:
    outgoing = [common(source[links.rank], to) for to in target]
    incoming = [common(of, target[links.rank]) for of in source]
    rows = rows_of([x], source[links.rank], outgoing)
    (result,) = tensors_of(send(links, rows, outgoing, incoming)(), [x])
    return _in_order(result, joined(incoming), target[links.rank])


def _in_order(x: Tensor, places: Ranges, wanted: Ranges) -> Tensor:
    pieces = Pieces(x, places)
    return torch.cat([x.narrow(SEQUENCE, 0, 0), *(pieces.take(lo_hi) for lo_hi in wanted)], SEQUENCE)


# --- tokens for heads ---------------------------------------------------------------------------------------


def by_heads(links: Links, held: Held, x: Tensor) -> Tensor:
    """All tokens of this rank's heads, [B, H / ranks, S, D], from this rank's tokens of all heads."""
    result: Tensor = _Moved.apply(partial(_by_heads, links, held), partial(_by_tokens, links, held), x)
    return result


def by_tokens(links: Links, held: Held, x: Tensor) -> Tensor:
    """This rank's tokens of all heads, from all tokens of this rank's heads."""
    result: Tensor = _Moved.apply(partial(_by_tokens, links, held), partial(_by_heads, links, held), x)
    return result


def _by_heads(links: Links, held: Held, x: Tensor) -> Tensor:
    parts = x.chunk(links.size, 1)
    rows = torch.cat([part.permute(2, 0, 1, 3).flatten(1) for part in parts])
    counts = list(map(tokens, held))
    rows = links.all_to_all(rows, [x.shape[SEQUENCE]] * links.size, counts)()
    (result,) = tensors_of(rows, [parts[0]])
    return _in_order(result, joined(held), ((0, sum(counts)),))


def _by_tokens(links: Links, held: Held, x: Tensor) -> Tensor:
    rows = rows_of([x], ((0, x.shape[SEQUENCE]),), held)
    counts = list(map(tokens, held))
    mine = counts[links.rank]
    rows = links.all_to_all(rows, counts, [mine] * links.size)()
    return torch.cat(
        [tensors_of(part, [x])[0] for part in rows.split(mine)] if mine else [x[:, :, :0]] * links.size, 1
    )
