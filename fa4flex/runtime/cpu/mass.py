"""Sums of probabilities per key on a CPU, from a log-sum-exp: one product a tile, and nothing kept of it.

    mass[k] = sum over q of exp(score[q, k] - lse[q])

Tiles are taken in one fixed order, so the results are the same to the last bit on every run."""

from __future__ import annotations

import torch
from torch import Tensor

from fa4flex.codegen.analyze.facts import Facts
from fa4flex.runtime.cpu.forward import raw_scores, scaled_queries
from fa4flex.runtime.cpu.sequences import Sequences, check_within, extents_of, inputs_of
from fa4flex.runtime.cpu.softmax import INFINITY
from fa4flex.runtime.cpu.tiles import Block, Inputs, Span, Walk, Workspace, fitted_call


@torch.no_grad()
def key_mass(facts: Facts, inputs: Inputs, sequences: Sequences | None, lse: Tensor) -> Tensor:
    """Sums [B, H, Skv], packed [H, Tk]; 0 for keys that nothing attends to, or that no sequence has."""
    q, k = inputs.q, inputs.k
    packed = sequences is not None and sequences.packed
    shape = (q.shape[1], k.shape[0]) if packed else (*q.shape[:2], k.shape[2])
    mass, space = torch.zeros(shape, dtype=inputs.precision), Workspace(inputs.precision)
    if sequences is None:
        facts, inputs = fitted_call(facts, inputs)
        _add(facts, inputs, (lse, mass), space)
        return mass
    check_within(inputs, sequences)
    facts, inputs = fitted_call(facts, inputs, extents_of(inputs, sequences))
    for n, one in inputs_of(inputs, sequences):
        start, stop = sequences.keys[n]
        own = mass[None, :, start:stop] if packed else mass[n : n + 1, :, start:stop]
        _add(facts, one, (sequences.of_statistics(lse, n), own), space)
    return mass


def _add(facts: Facts, inputs: Inputs, rows: tuple[Tensor, Tensor], space: Workspace) -> None:
    """Add the probabilities of one call. rows: its lse, and its sums."""
    lse, mass = rows
    if 0 in (*inputs.q.shape, *inputs.k.shape):
        return
    for block in Walk(facts, inputs):
        heads = block.heads
        shift = heads.queries(lse, block.rows).to(inputs.precision).unsqueeze(-1)
        # Without keys: exp(score - inf) is 0.
        shift = shift.masked_fill(shift == -INFINITY, INFINITY)
        queries = scaled_queries(block, space)
        for span in block.spans:
            scores = raw_scores(block, span, queries, space)
            _modify(block, span, scores)
            block.hide(scores, span, -INFINITY)
            sums = block.exponentials(scores.sub_(shift), span).sum(2)
            mass[heads.batch, heads.start : heads.stop, span.keys].add_(sums.flatten(0, 1))


def _modify(block: Block, span: Span, scores: Tensor) -> None:
    """Modified scores in place of raw ones."""
    walk = block.walk
    if not walk.plain:
        (modified,) = block.evaluate([walk.facts.score], span, {"score": scores})
        scores.copy_(modified) if isinstance(modified, Tensor) else scores.fill_(modified)
