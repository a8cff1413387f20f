"""Probabilities of attention from a log-sum-exp, and their sums per key, as functions of pieces.

    p[q, k] = exp(score[q, k] - lse[q])      0 of pairs that the mask hides, and of rows whose lse is -inf
    mass[k] = sum of p[q, k] over the queries

Neither needs a softmax: one product of queries and keys, and nothing to rescale."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fa4flex.codegen.analyze.domain import Ragged
from fa4flex.codegen.analyze.facts import SCORE
from fa4flex.codegen.evaluate import Value, evaluate
from fa4flex.codegen.expr import TRUE
from fa4flex.runtime import compute
from fa4flex.runtime.blockwise import inputs_of_call
from fa4flex.runtime.call import NO_LENGTHS, Call, SequenceLengths
from fa4flex.runtime.cpu.tiles import Heads, Span, fitted_call
from fa4flex.runtime.derived.modified import Place, value_of
from fa4flex.runtime.derived.parts import Like, Recipe
from fa4flex.runtime.derived.pieces import SCORES, Kind, Piece, few
from fa4flex.runtime.key_sources import Contiguous


def weights(piece: Piece, q: Tensor, k: Tensor, lse: Tensor, *operands: Tensor) -> Tensor:
    """Probabilities of a piece [entries, groups, ratio, rows, keys], by operations that autograd knows."""
    facts, place = piece.facts, piece.place(q.device)
    scores = ((q * piece.inputs.scale).flatten(2, 3) @ k.transpose(2, 3)).view(place.shape)
    if facts.score is not SCORE:
        scores = value_of(facts.score, place, scores, operands)
    lse = lse.unsqueeze(-1)
    hidden = lse == -torch.inf
    shift = lse.masked_fill(hidden, 0)
    if place.allowed is not None:
        hidden = hidden | ~place.allowed
    # Hidden before the exponential, which would overflow there, and give gradients 0 * inf.
    return torch.exp(scores.masked_fill(hidden, -torch.inf) - shift)


@dataclass(frozen=True, eq=False)
class SecondPass(Recipe):
    """A call without its tensors, which are q [B, H, Sq, D], k [B, Hkv, Skv, D], lse [B, H, Sq], of packed
    sequences q [1, H, Tq, D], k [1, Hkv, Tk, D], lse [1, H, Tq]; and operands. Sinks are inside lse."""

    def kinds(self, count: int) -> tuple[Kind, ...]:
        """The ways in which `count` tensors of the call are cut."""
        operands: list[Kind] = ["whole"] * (count - 3)
        return ("queries", "keys", "rows", *operands)

    def call(self, tensors: Sequence[Tensor]) -> Call:
        """The call, of packed tensors where it has such. Keys stand for values, which nobody reads."""
        q, k, _, *operands = tensors
        if self.packed:
            q, k = (x.squeeze(0).transpose(0, 1) for x in (q, k))
        kv, lengths = Contiguous(k, k), self.lengths
        return Call(q, kv, tuple(operands), None, lengths, self.scalars, self.scale, True, ())


@dataclass(frozen=True)
class KeyMass:
    """Sums of probabilities over queries, per key and query head."""

    kinds: tuple[Kind, ...]
    of_results: ClassVar[tuple[Kind, ...]] = ("columns",)

    def results(self, recipe: Recipe, tensors: Sequence[Tensor]) -> list[Like]:
        """Shape of the sums: [B, H, Skv]."""
        q, k = tensors[:2]
        return [Like((*q.shape[:2], k.shape[2]), recipe.program.precision.compute_dtype(q.dtype))]

    def part(self, piece: Piece, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Sums of a piece."""
        return [weights(piece, *tensors).sum(3)]

    def at_once(self, recipe: Recipe, tensors: Sequence[Tensor]) -> tuple[Tensor, ...] | None:
        """Sums by a kernel, if there is one."""
        lse = tensors[2].squeeze(0) if recipe.packed else tensors[2]
        result = compute.key_mass(recipe.program, recipe.call(tensors), lse)
        if result is None:
            return None
        return (torch.stack([result]) if recipe.packed else result,)


# --- chosen rows ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Probabilities:
    """Probabilities of chosen rows, with every key."""

    kinds: tuple[Kind, ...]
    of_results: ClassVar[tuple[Kind, ...]] = ("queries",)

    def results(self, recipe: Recipe, tensors: Sequence[Tensor]) -> list[Like]:
        """Shape of the probabilities: [B, H, rows, Skv]."""
        q, k = tensors[:2]
        return [Like((*q.shape[:3], k.shape[2]), recipe.program.precision.compute_dtype(q.dtype))]

    def part(self, piece: Piece, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Probabilities of a piece."""
        return [weights(piece, *tensors)]

    def at_once(self, recipe: Recipe, tensors: Sequence[Tensor]) -> None:
        """None: no kernel writes probabilities."""


@dataclass(frozen=True, eq=False)
class ChosenRows(SecondPass):
    """A call whose q and lse have chosen rows alone.

    rows    int64 [R]: where they are, in q [B, H, q_len, D], or among packed tokens
    """

    rows: Tensor
    q_len: int

    def pieces(self, tensors: Sequence[Tensor]) -> Iterator[Piece]:
        """Some rows each, with all keys."""
        q, k = tensors[:2]
        batch, heads, count, _ = q.shape
        kv_heads, kv_len = k.shape[1:3]
        if not (batch and heads and count):
            return
        call, device = self.call(tensors), q.device
        inputs = inputs_of_call(self.program, call)
        starts = self.lengths.cu_seqlens_q
        sequences = batch if starts is None else starts.shape[0] - 1
        facts, inputs = fitted_call(self.program.facts, inputs, Ragged(sequences, heads, self.q_len, kv_len))
        found = _Indices.of(self.lengths, self.rows, (self.q_len, kv_len), device)
        ratio = heads // kv_heads
        step = max(SCORES // max(ratio * kv_len, 1), 1)
        span = Span(0, kv_len, ((0, kv_len),))
        for first in range(0, count, step):
            rows, whole = slice(first, min(first + step, count)), Heads(0, 0, heads, ratio, 0)
            yield from few(_Chosen(facts, inputs, slice(0, batch), whole, rows, (span,), indices=found))


@dataclass(frozen=True, eq=False)
class _Indices:
    """Indices and lengths of pairs of chosen rows and keys, [R or 1, Skv or 1], of padded batches
    [B, 1, 1, 1, 1]; and which pairs lie within a sequence, or None: all."""

    symbols: dict[str, Value]
    inside: Tensor | None = None

    @staticmethod
    def of(
        lengths: SequenceLengths, rows: Tensor, extents: tuple[int, int], device: torch.device
    ) -> _Indices:
        keys = torch.arange(extents[1], device=device)
        if lengths.cu_seqlens_q is not None:
            return _packed_indices(lengths, rows, keys)
        q, (q_len, kv_len) = rows.view(-1, 1), extents
        symbols: dict[str, Value] = {"q": q, "kv": keys, "q_len": q_len, "kv_len": kv_len}
        if lengths is NO_LENGTHS:
            return _Indices(symbols)
        of_q, of_k = (None if x is None else x.long().view(-1, 1, 1, 1, 1) for x in lengths[2:])
        inside = None
        if of_q is not None:
            symbols |= {"q_len": of_q, "q": torch.minimum(q, (of_q - 1).clamp(min=0))}
            inside = q < of_q
        if of_k is not None:
            symbols |= {"kv_len": of_k, "kv": torch.minimum(keys, (of_k - 1).clamp(min=0))}
            inside = keys < of_k if inside is None else inside & (keys < of_k)
        return _Indices(symbols, inside)

    def cut(self, entries: slice, rows: slice) -> _Indices:
        """Those of some entries and rows."""

        def cut(x: Value) -> Value:
            if not isinstance(x, Tensor) or x.ndim < 2:
                return x
            x = x[entries] if x.ndim == 5 and x.shape[0] > 1 else x
            return x[..., rows, :] if x.shape[-2] > 1 else x

        inside = None if self.inside is None else cut(self.inside)
        assert inside is None or isinstance(inside, Tensor)
        return _Indices({name: cut(x) for name, x in self.symbols.items()}, inside)


def _packed_indices(lengths: SequenceLengths, rows: Tensor, keys: Tensor) -> _Indices:
    """Indices of packed rows and keys, each in its own sequence. Keys of other sequences are given indices
    that exist in the row's, as masks are asked about them, too."""
    starts_q, starts_k, used_q, used_k = lengths
    assert starts_q is not None and starts_k is not None
    (b, q), (of_key, kv) = (_in_sequences(s.long(), x) for s, x in ((starts_q, rows), (starts_k, keys)))
    lengths_q, lengths_k = (
        (s.long().diff() if used is None else used.long())[b].view(-1, 1)
        for s, used in ((starts_q, used_q), (starts_k, used_k))
    )
    b, q = b.view(-1, 1), q.view(-1, 1)
    inside = (of_key == b) & (q < lengths_q) & (kv < lengths_k)
    return _Indices(
        {
            "b": b,
            "q": torch.minimum(q, (lengths_q - 1).clamp(min=0)),
            "kv": torch.minimum(kv, (lengths_k - 1).clamp(min=0)),
            "q_len": lengths_q,
            "kv_len": lengths_k,
        },
        inside,
    )


def _in_sequences(starts: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """The sequence of each packed token, and where it is there."""
    b = (torch.searchsorted(starts, places, right=True) - 1).clamp(0, starts.shape[0] - 2)
    return b, places - starts[b]


@dataclass(frozen=True, eq=False, kw_only=True)
class _Chosen(Piece):
    """Chosen rows with all keys."""

    indices: _Indices

    def place(self, device: torch.device) -> Place:
        """The pairs of this piece."""
        heads, inputs, found = self.heads, self.inputs, self.indices.cut(self.entries, self.rows)
        entries = torch.arange(self.entries.start, self.entries.stop, device=device)
        of_heads = torch.arange(heads.start, heads.stop, device=device)
        symbols: dict[str, Value] = {
            "b": entries.view(-1, 1, 1, 1, 1),
            "h": of_heads.view(heads.groups, heads.ratio, 1, 1),
            "num_heads": inputs.q.shape[1],
            **found.symbols,
        }
        allowed, shape = found.inside, (*self.shape, self.keys)
        if self.facts.mask is not TRUE:
            (value,) = evaluate([self.facts.mask], symbols, inputs.captured, inputs.precision)
            own = torch.as_tensor(value, device=device)
            allowed = own if allowed is None else own & allowed
        return Place(symbols, shape, inputs.captured.scalars, inputs.precision, allowed)


def second_pass_of(recipe: SecondPass, count: int) -> KeyMass | Probabilities:
    """The function of a call of `count` tensors."""
    kinds = recipe.kinds(count)
    return Probabilities(kinds) if isinstance(recipe, ChosenRows) else KeyMass(kinds)
