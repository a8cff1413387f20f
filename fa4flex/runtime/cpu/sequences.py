"""Ragged batches on a CPU: every sequence is one attention call on views of its rows.

`b` is the index of the sequence; q_len and kv_len are its used lengths; indices count from its start.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fa4flex.codegen.analyze.domain import Ragged
from fa4flex.codegen.analyze.facts import Facts
from fa4flex.errors import InputError
from fa4flex.primitives.varlen import Varlen
from fa4flex.runtime.cpu.backward import Gradients, Upstream, accumulate
from fa4flex.runtime.cpu.captured import SharedGradients
from fa4flex.runtime.cpu.forward import attend, skipped
from fa4flex.runtime.cpu.fused import attend as attend_fused
from fa4flex.runtime.cpu.softmax import Forward
from fa4flex.runtime.cpu.tiles import Inputs, fitted_call

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

    @staticmethod
    def of(varlen: Varlen, q: Tensor, k: Tensor) -> Sequences:
        """Sequences of these lengths in q and k. Raises InputError where lengths do not fit each other, or a
        padded batch."""
        if not varlen.checked:  # on a device
            varlen.check_contents()
        if not varlen.packed:
            varlen.check_used(q.shape[2], k.shape[2])
        bounds = varlen.bounds() if varlen.packed else varlen.bounds(q.shape[2], k.shape[2])
        return Sequences(tuple(x[:2] for x in bounds), tuple(x[2:] for x in bounds), varlen.packed)

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


def check_within(inputs: Inputs, sequences: Sequences) -> None:
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


def extents_of(inputs: Inputs, sequences: Sequences) -> Ragged:
    of_queries, of_keys = (
        max((stop - start for start, stop in rows), default=0) for rows in (sequences.queries, sequences.keys)
    )
    return Ragged(len(sequences), inputs.q.shape[1], of_queries, of_keys)


def inputs_of(inputs: Inputs, sequences: Sequences) -> Iterator[tuple[int, Inputs]]:
    for n in range(len(sequences)):
        q, k, v = (
            sequences.of_queries(inputs.q, n),
            *(sequences.of_keys(x, n) for x in (inputs.k, inputs.v)),
        )
        yield n, replace(inputs, q=q, k=k, v=v, sequence=n)


def _statistics(result: Forward) -> tuple[Tensor, ...]:
    return result.lse, result.max_scores, result.total, *(() if result.entropy is None else (result.entropy,))


@torch.no_grad()
def forward_sequences(
    facts: Facts, inputs: Inputs, sequences: Sequences, outputs_alone: bool = False
) -> Forward:
    """`forward` of every sequence; results are laid out as the inputs are. With `outputs_alone` nobody reads
    max_scores and total."""
    check_within(inputs, sequences)
    facts, inputs = fitted_call(facts, inputs, extents_of(inputs, sequences))
    shape = inputs.q.shape
    result = Forward.of_no_keys(inputs, (shape[1], shape[0]) if sequences.packed else shape[:3])
    for n, one in inputs_of(inputs, sequences):
        results = attend_fused(facts, one) if outputs_alone and facts.softmax else None
        if results is not None:
            sequences.of_queries(result.out, n).copy_(results[0])
            sequences.of_statistics(result.lse, n).copy_(results[1])
            continue
        part = attend(facts, one)
        sequences.of_queries(result.out, n).copy_(part.out)
        for whole, own in zip(_statistics(result), _statistics(part), strict=True):
            sequences.of_statistics(whole, n).copy_(own)
    return result


def skipped_sequences(facts: Facts, inputs: Inputs, sequences: Sequences) -> Tensor:
    """`skipped` of every sequence, laid out as the lse."""
    check_within(inputs, sequences)
    shape = inputs.q.shape
    result = torch.zeros((shape[1], shape[0]) if sequences.packed else shape[:3])
    for n, one in inputs_of(inputs, sequences):
        sequences.of_statistics(result, n).copy_(skipped(facts, one))
    return result


@torch.no_grad()
def backward_sequences(
    facts: Facts,
    inputs: Inputs,
    sequences: Sequences,
    saved: Forward,
    upstream: Upstream,
    needs: Collection[int] = (),
) -> Gradients:
    """Gradients of `forward_sequences`, from upstream ones that are laid out as its results."""
    check_within(inputs, sequences)
    facts, inputs = fitted_call(facts, inputs, extents_of(inputs, sequences))
    dout, *of_rows = upstream
    dq, dk, dv = (
        torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (inputs.q, inputs.k, inputs.v)
    )
    shared = SharedGradients(facts, inputs, needs)
    for n, one in inputs_of(inputs, sequences):
        statistics = (sequences.of_statistics(x, n) for x in _statistics(saved))
        part = Forward(sequences.of_queries(saved.out, n), *statistics)
        dlse, dentropy = (None if x is None else sequences.of_statistics(x, n) for x in of_rows)
        grads = accumulate(facts, one, part, (sequences.of_queries(dout, n), dlse, dentropy), shared)
        sequences.of_queries(dq, n).copy_(grads[0])
        sequences.of_keys(dk, n).copy_(grads[1])
        sequences.of_keys(dv, n).copy_(grads[2])
    return Gradients(dq, dk, dv, *shared.result())
