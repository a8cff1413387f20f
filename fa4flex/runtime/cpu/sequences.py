"""Ragged batches on a CPU: every sequence is one attention call on views of its rows.

`b` is the index of the sequence; q_len and kv_len are its used lengths; indices count from its start.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from fa4flex.codegen.analyze.domain import Ragged
from fa4flex.codegen.analyze.facts import Facts
from fa4flex.errors import InputError
from fa4flex.runtime.cpu.backward import Gradients, accumulate
from fa4flex.runtime.cpu.captured import SharedGradients
from fa4flex.runtime.cpu.forward import INFINITY, Forward, attend
from fa4flex.runtime.cpu.tiles import Inputs, fitted_call
from fa4flex.runtime.layouts import empty_output

Range = tuple[int, int]


@dataclass(frozen=True)
class Sequences:
    """Rows of each sequence: in packed [T, heads, D] tensors, or in row n of padded [B, heads, S, D] ones.

    Statistics (lse, max_scores) are [H, Tq] when packed and [B, H, Sq] when padded. Query rows of no
    sequence have out 0, lse -inf and no gradient; keys and values of no sequence are never read.
    """

    queries: tuple[Range, ...]
    keys: tuple[Range, ...]
    packed: bool

    def __len__(self) -> int:
        return len(self.queries)

    def of_queries(self, x: Tensor, n: int) -> Tensor:
        """Sequence n of q, out or their gradients as a view [1, H, rows, ...]."""
        return self._view(x, n, self.queries[n])

    def of_keys(self, x: Tensor, n: int) -> Tensor:
        """Sequence n of k, v or their gradients as a view [1, Hkv, rows, ...]."""
        return self._view(x, n, self.keys[n])

    def of_statistics(self, x: Tensor, n: int) -> Tensor:
        """Sequence n of lse, max_scores or dlse as a view [1, H, rows]."""
        start, stop = self.queries[n]
        return x[None, :, start:stop] if self.packed else x[n : n + 1, :, start:stop]

    def _view(self, x: Tensor, n: int, rows: Range) -> Tensor:
        start, stop = rows
        return x[start:stop].transpose(0, 1)[None] if self.packed else x[n : n + 1, :, start:stop]


def packed(
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
) -> Sequences:
    """Sequences at rows cu_seqlens[n] .. cu_seqlens[n+1] of packed tensors; the first seqused[n] rows count.

    cu_seqlens [N+1] and seqused [N] are integers. Raises InputError where they do not fit each other.
    """
    queries = _ranges("q", cu_seqlens_q.tolist(), seqused_q)
    keys = _ranges("k", cu_seqlens_k.tolist(), seqused_k)
    if len(queries) != len(keys):
        raise InputError(
            f"cu_seqlens_q has {len(queries)} sequences and cu_seqlens_k has {len(keys)}",
            "the same number of sequences",
            "pass two vectors of N + 1 cumulative lengths; a sequence may be empty",
        )
    return Sequences(queries, keys, True)


def padded(
    q: Tensor, k: Tensor, seqused_q: Tensor | None = None, seqused_k: Tensor | None = None
) -> Sequences:
    """The first seqused_q[n] queries and seqused_k[n] keys of padded q [B, H, Sq, D], k [B, Hkv, Skv, D]."""
    batch = q.shape[0]
    queries = _ranges("q", [q.shape[2] * n for n in range(batch + 1)], seqused_q)
    keys = _ranges("k", [k.shape[2] * n for n in range(batch + 1)], seqused_k)
    return Sequences(
        tuple((0, stop - start) for start, stop in queries),
        tuple((0, stop - start) for start, stop in keys),
        False,
    )


def _ranges(name: str, bounds: list[int], used: Tensor | None) -> tuple[Range, ...]:
    rows = list(pairwise(bounds))
    if bounds[:1] != [0] or any(stop < start for start, stop in rows):
        raise InputError(
            f"cu_seqlens_{name} = {bounds}",
            "0 first, then cumulative lengths that never fall",
            "use a cumulative sum",
        )
    if used is None:
        return tuple(rows)
    lengths = used.tolist()
    if len(lengths) != len(rows) or any(
        not 0 <= n <= stop - start for n, (start, stop) in zip(lengths, rows, strict=True)
    ):
        raise InputError(
            f"seqused_{name} = {lengths} for sequences of {[stop - start for start, stop in rows]} rows",
            "one used length per sequence, at least 0 and at most its rows",
            f"clamp seqused_{name} to the rows of each sequence",
        )
    return tuple((start, start + n) for n, (start, _) in zip(lengths, rows, strict=True))


def _check(inputs: Inputs, sequences: Sequences) -> None:
    axis = 0 if sequences.packed else 2
    for name, rows, held in (
        ("q", sequences.queries, inputs.q.shape[axis]),
        ("k", sequences.keys, min(inputs.k.shape[axis], inputs.v.shape[axis])),
    ):
        last = max((stop for _, stop in rows), default=0)
        if last > held:
            raise InputError(
                f"the sequences end at row {last} of {name}, which has {held} rows",
                f"cumulative lengths within {name}",
                f"check that cu_seqlens_{name}[-1] is the number of packed rows",
            )


def _shape(inputs: Inputs, sequences: Sequences) -> Ragged:
    of_queries, of_keys = (
        max((stop - start for start, stop in rows), default=0) for rows in (sequences.queries, sequences.keys)
    )
    return Ragged(len(sequences), inputs.q.shape[1], of_queries, of_keys)


def _each(inputs: Inputs, sequences: Sequences) -> Iterator[tuple[int, Inputs]]:
    for n in range(len(sequences)):
        q, k, v = (
            sequences.of_queries(inputs.q, n),
            *(sequences.of_keys(x, n) for x in (inputs.k, inputs.v)),
        )
        yield n, replace(inputs, q=q, k=k, v=v, sequence=n)


def _results(inputs: Inputs, packed: bool) -> Forward:
    q = inputs.q
    statistics = (q.shape[1], q.shape[0]) if packed else q.shape[:3]
    out = empty_output(q, inputs.v.shape[-1], inputs.output or q.dtype).zero_()
    lse = torch.full(statistics, -INFINITY, dtype=inputs.precision)
    return Forward(out, lse, lse.clone(), torch.zeros_like(lse))


def _statistics(result: Forward) -> tuple[Tensor, Tensor, Tensor]:
    return result.lse, result.max_scores, result.total


@torch.no_grad()
def forward_sequences(facts: Facts, inputs: Inputs, sequences: Sequences) -> Forward:
    """`forward` of every sequence; results are laid out as the inputs are."""
    _check(inputs, sequences)
    facts, inputs = fitted_call(facts, inputs, _shape(inputs, sequences))
    result = _results(inputs, sequences.packed)
    for n, one in _each(inputs, sequences):
        part = attend(facts, one)
        sequences.of_queries(result.out, n).copy_(part.out)
        for whole, own in zip(_statistics(result), _statistics(part), strict=True):
            sequences.of_statistics(whole, n).copy_(own)
    return result


@torch.no_grad()
def backward_sequences(
    facts: Facts,
    inputs: Inputs,
    sequences: Sequences,
    saved: Forward,
    upstream: tuple[Tensor, Tensor | None],
    needs: Collection[int] = (),
) -> Gradients:
    """Gradients of `forward_sequences`, from upstream (dout, dlse) laid out as its out and lse."""
    _check(inputs, sequences)
    facts, inputs = fitted_call(facts, inputs, _shape(inputs, sequences))
    dout, dlse = upstream
    dq, dk, dv = (
        torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (inputs.q, inputs.k, inputs.v)
    )
    shared = SharedGradients(facts, inputs, needs)
    for n, one in _each(inputs, sequences):
        statistics = (sequences.of_statistics(x, n) for x in _statistics(saved))
        part = Forward(sequences.of_queries(saved.out, n), *statistics)
        arguments = sequences.of_queries(dout, n), None if dlse is None else sequences.of_statistics(dlse, n)
        grads = accumulate(facts, one, part, arguments, shared)
        sequences.of_queries(dq, n).copy_(grads[0])
        sequences.of_keys(dk, n).copy_(grads[1])
        sequences.of_keys(dv, n).copy_(grads[2])
    return Gradients(dq, dk, dv, *shared.result())
