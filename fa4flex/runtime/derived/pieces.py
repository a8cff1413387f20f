"""Pieces of a call: a block of queries with the keys that they see, and how tensors are cut into such
pieces."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fa4flex.codegen.analyze.facts import SCORE, Facts
from fa4flex.codegen.evaluate import Captured, Value, evaluate
from fa4flex.codegen.expr import TRUE
from fa4flex.runtime.cpu.sequences import Sequences, check_within, extents_of, inputs_of
from fa4flex.runtime.cpu.tiles import QUERY_TILE, Heads, Inputs, Span, Walk, fitted_call, remaining, spans
from fa4flex.runtime.derived.modified import Place, value_of
from fa4flex.torch_internals import dispatch_modes

Kind = Literal["queries", "keys", "columns", "rows", "heads", "whole"]
"""The way in which a tensor is cut: q [B, H, Sq, D], k or v [B, Hkv, Skv, D], sums per key and query head
[B, H, Skv], lse [B, H, Sq], sinks [H], or captured tensors."""

SCORES = 1 << 20
"""Scores of a piece, where 16 queries have fewer."""


@dataclass(frozen=True, eq=False)
class Piece:
    """Queries of entries and heads that see the same keys, and these keys.

    facts, inputs   of the sequence, or of all entries, in which rows and spans are counted
    entries         entries of the batch; of one sequence, whose rows and keys begin at q_at and k_at there
    heads           query heads, `ratio` of which share one of keys
    """

    facts: Facts
    inputs: Inputs
    entries: slice
    heads: Heads
    rows: slice
    spans: tuple[Span, ...]
    q_at: int = 0
    k_at: int = 0

    @property
    def keys(self) -> int:
        """Number of keys."""
        return sum(span.stop - span.start for span in self.spans)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Numbers of entries, of KV heads, of query heads of each, and of queries."""
        heads, rows, entries = self.heads, self.rows, self.entries
        return entries.stop - entries.start, heads.groups, heads.ratio, rows.stop - rows.start

    def cut(self, x: Tensor, kind: Kind) -> Tensor:
        """The part of a tensor: [entries, groups, ratio, rows, ..] of queries, [entries, groups, keys, D] of
        keys, [entries, groups, ratio, keys] of columns, [groups, ratio, 1, 1] of what there is by head."""
        heads, rows = self.heads, self.rows
        if kind == "whole":
            return x
        if kind == "heads":
            return x[heads.start : heads.stop].view(heads.groups, heads.ratio, 1, 1)
        if kind in ("keys", "columns"):
            own = self._by_keys(x, kind)
            parts = [own[:, :, self.k_at + s.start : self.k_at + s.stop] for s in self.spans]
            cut = torch.cat(parts, 2) if parts else own[:, :, :0]
            return cut if kind == "keys" else cut.unflatten(1, (heads.groups, heads.ratio))
        own = x[self.entries, heads.start : heads.stop, self.q_at + rows.start : self.q_at + rows.stop]
        return own.unflatten(1, (heads.groups, heads.ratio))

    def _by_keys(self, x: Tensor, kind: Kind) -> Tensor:
        """The entries and heads of a tensor that has keys along its third dimension."""
        first, count = self.heads.kv_start, self.heads.groups
        if kind == "columns":
            first, count = self.heads.start, self.heads.stop - self.heads.start
        return x[self.entries, first : first + count]

    def add(self, total: Tensor, kind: Kind, part: Tensor) -> Tensor:
        """The total with a part added to the place that it would be cut from: itself, changed. Where
        operators are intercepted it is another tensor, as graphs whose constants are changed in place are
        folded wrongly."""
        if dispatch_modes():
            places = self.cut(torch.arange(total.numel(), device=total.device).view(total.shape), kind)
            flat = total.reshape(-1).index_add(0, places.reshape(-1), part.reshape(-1).to(total.dtype))
            return flat.view(total.shape)
        if kind not in ("keys", "columns"):
            self.cut(total, kind).add_(part)
            return total
        own, start = self._by_keys(total, kind), 0
        part = part if kind == "keys" else part.flatten(1, 2)
        for span in self.spans:
            size = span.stop - span.start
            own[:, :, self.k_at + span.start : self.k_at + span.stop].add_(part[:, :, start : start + size])
            start += size
        return total

    def place(self, device: torch.device) -> Place:
        """The pairs of this piece."""
        heads, inputs = self.heads, self.inputs
        rows = torch.arange(self.rows.start, self.rows.stop, device=device)
        spans = [torch.arange(s.start, s.stop, device=device) for s in self.spans]
        of_heads = torch.arange(heads.start, heads.stop, device=device).view(heads.groups, heads.ratio, 1, 1)
        of_entries = torch.arange(self.entries.start, self.entries.stop, device=device).view(-1, 1, 1, 1, 1)
        symbols: dict[str, Value] = {
            "b": of_entries if inputs.sequence is None else inputs.sequence,
            "h": of_heads,
            "q": rows.view(-1, 1),
            "kv": torch.cat(spans) if spans else rows[:0],
            "q_len": inputs.q.shape[2],
            "kv_len": inputs.k.shape[2],
            "num_heads": inputs.q.shape[1],
        }
        allowed, mask, shape = None, self.facts.mask, (*self.shape, self.keys)
        if mask is not TRUE and any(span.partial for span in self.spans):
            # Entries and heads with masks of their own are pieces of their own.
            alone = {
                "h": heads.start,
                "b": self.entries.start if inputs.sequence is None else inputs.sequence,
            }
            (found,) = evaluate([mask], {**symbols, **alone}, inputs.captured, inputs.precision)
            allowed = torch.as_tensor(found, device=device).expand(shape[3:])
        return Place(symbols, shape, inputs.captured.scalars, inputs.precision, allowed)


class Rows(NamedTuple):
    """Results of a piece: out [entries, groups, ratio, rows, Dv] and lse [entries, groups, ratio, rows]."""

    out: Tensor
    lse: Tensor


def attend(piece: Piece, q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> Rows:
    """Attention of a piece, by operations that autograd knows. rest: sinks, if there are any, and
    operands."""
    inputs, facts = piece.inputs, piece.facts
    sinks, operands = (rest[0], rest[1:]) if inputs.sinks is not None else (None, rest)
    place = piece.place(q.device)
    scores = ((q * inputs.scale).flatten(2, 3) @ k.transpose(2, 3)).view(place.shape)
    if facts.score is not SCORE:
        scores = value_of(facts.score, place, scores, operands)
    if place.allowed is not None:
        scores = torch.where(place.allowed, scores, -torch.inf)
    shift = scores.new_full((*piece.shape, 1), -torch.inf)
    if piece.keys:
        shift = scores.detach().amax(-1, keepdim=True)
    if sinks is not None:
        shift = torch.maximum(shift, sinks.detach())
    shift = shift.masked_fill(shift == -torch.inf, 0)
    weights = torch.exp(scores - shift)
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks - shift)
    none = total == 0
    divisor = torch.where(none, 1, total)
    if facts.kept is not None:
        (there,) = evaluate([facts.kept], place.symbols, Captured(operands, place.scalars), inputs.precision)
        weights = weights * torch.as_tensor(there, device=q.device) * remaining(facts, inputs)
    out = (weights.flatten(2, 3) @ v).view(*piece.shape, v.shape[-1]) / divisor
    lse = torch.where(none, -torch.inf, torch.log(divisor) + shift).squeeze(-1)
    return Rows(out, lse)


def pieces(facts: Facts, inputs: Inputs, sequences: Sequences | None) -> Iterator[Piece]:
    """All pieces of a call, whose tensors are [B, H, S, D], of packed sequences one entry."""
    if sequences is None:
        yield from _dense(*fitted_call(facts, inputs))
        return
    check_within(inputs, sequences)
    facts, inputs = fitted_call(facts, inputs, extents_of(inputs, sequences))
    for n, one in inputs_of(inputs, sequences):
        entry = 0 if sequences.packed else n
        q_at, k_at = sequences.queries[n][0], sequences.keys[n][0]
        for piece in _dense(facts, one):
            yield replace(piece, entries=slice(entry, entry + 1), q_at=q_at, k_at=k_at)


def _dense(facts: Facts, inputs: Inputs) -> Iterator[Piece]:
    """Pieces of sequences of the same lengths, of so many scores as SCORES or few."""
    (batch, heads, q_len), kv_len, ratio = inputs.q.shape[:3], inputs.k.shape[2], inputs.ratio
    if not (batch and heads and q_len):
        return
    most = max(SCORES // max(ratio * kv_len, 1), 1)
    walk = Walk(facts, replace(inputs, tile=None), min(QUERY_TILE, most))
    tiles = walk.tiles
    for b in range(tiles.map_batch):
        entries = [slice(b, b + 1)] if tiles.map_batch > 1 else [slice(0, batch)]
        for h in range(tiles.map_heads):
            whole = (
                Heads(b, 0, heads, ratio, 0) if tiles.map_heads == 1 else Heads(b, h, h + 1, 1, h // ratio)
            )
            for row in range(-(-q_len // walk.rows)):
                rows = slice(row * walk.rows, min((row + 1) * walk.rows, q_len))
                cut = tuple(spans(tiles.runs(b, h, row), walk.keys, kv_len, kv_len))
                piece = Piece(facts, inputs, entries[0], whole, rows, cut)
                yield from few(piece)


def few(piece: Piece) -> Iterator[Piece]:
    """A piece as some of so many entries, and heads, as have SCORES."""
    _, groups, ratio, rows = piece.shape
    together = max(SCORES // max(ratio * rows * piece.keys, 1), 1)
    of_heads, of_entries = min(together, groups), max(together // groups, 1)
    for start in range(piece.entries.start, piece.entries.stop, of_entries):
        some = slice(start, min(start + of_entries, piece.entries.stop))
        for group in range(0, groups, of_heads):
            stop, heads = min(group + of_heads, groups), piece.heads
            own = replace(
                heads,
                start=heads.start + group * ratio,
                stop=heads.start + stop * ratio,
                kv_start=heads.kv_start + group,
            )
            yield replace(piece, entries=some, heads=own)
