"""Tiles of keys that scores of 8 bits prove to matter less than a tolerance.

Scores of 16 bits are s_j = f(scale q.k_j), f the score mod, of Lipschitz constant L; those of 8 bits are
s'_j = f(scale q.k'_j). By Cauchy and Schwarz |s_j - s'_j| <= d for each key j of a tile, with

    d = L scale |q| (max_j |k_j - k'_j| + what float32 rounds)

and so a tile's sum of exp(s_j) is at most exp(d), and at least exp(-d), times that of exp(s'_j). What is
left out has a share w of the softmax: at most the sum of its upper bounds over that of all lower ones, a
sink's exp among these. Each element of an output is off by at most w (max v - min v), as docs/primitives.md
proves for what `Precision(skip=...)` leaves out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from fa4flex.codegen.analyze.facts import Facts
from fa4flex.codegen.analyze.lipschitz import lipschitz
from fa4flex.codegen.analyze.tables import Tables
from fa4flex.kernels.planes.config import SLACK, ULPS
from fa4flex.quantization.planes import Planes
from fa4flex.runtime.cpu.sequences import Sequences, check_within, extents_of, inputs_of
from fa4flex.runtime.cpu.tiles import Block, Inputs, Span, Walk, fitted_call
from fa4flex.runtime.planes import Masses

ROWS = 64
"""Queries of a block."""


def slope_of(facts: Facts, inputs: Inputs) -> float | None:
    """Lipschitz constant of the score mod; None where none is known."""
    return lipschitz(facts.score, Tables(inputs.captured))


@torch.no_grad()
def masses(facts: Facts, inputs: Inputs, planes: Planes, sequences: Sequences | None, slope: float) -> Masses:
    """Masses of all tiles by the plane. inputs.k is that of the planes, with heads first."""
    (batch, heads, q_len, _), tiles = inputs.q.shape, planes.tiles
    low = torch.full((batch, heads, q_len, tiles), -torch.inf)
    made = Masses(low, low.clone(), torch.zeros(batch, inputs.k.shape[1], tiles, dtype=torch.bool))
    inputs = replace(inputs, tile=(ROWS, planes.block), skip=0.0)
    for n, facts_of_one, one in _sequences(facts, inputs, sequences):
        if 0 in (one.q.numel(), one.k.numel()):
            continue
        for block in Walk(facts_of_one, one):
            at = slice(None) if n is None else slice(n, n + 1)
            own = Masses(made.upper[at], made.lower[at], made.visited[at])
            plane = _Plane.of(block, planes, block.heads.batch if n is None else n, slope)
            for span in block.spans:
                plane.enter(span, own)
    return made


def _sequences(
    facts: Facts, inputs: Inputs, sequences: Sequences | None
) -> Iterator[tuple[int | None, Facts, Inputs]]:
    """Calls of one length: (sequence, facts, inputs); None for all of a batch at once."""
    if sequences is None:
        yield None, *fitted_call(facts, inputs)
        return
    check_within(inputs, sequences)
    facts, inputs = fitted_call(facts, inputs, extents_of(inputs, sequences))
    for n, one in inputs_of(inputs, sequences):
        yield n, facts, one


@dataclass
class _Plane:
    """Rows of a block of queries beside the plane of their keys."""

    block: Block
    planes: Planes
    sequence: int
    queries: Tensor
    """scale * q, rotated, in float32: [groups, ratio * rows, D]."""
    shift: Tensor
    """Products of these and the offset of the keys: [groups, ratio * rows, 1]."""
    steep: Tensor
    """Lipschitz constant times norms of scale * q: [groups, ratio, rows, 1]."""

    @staticmethod
    def of(block: Block, planes: Planes, sequence: int, slope: float) -> _Plane:
        heads, inputs = block.heads, block.walk.inputs
        q = heads.queries(inputs.q, block.rows).float() * inputs.scale
        turned = planes.turned(q).flatten(1, 2)
        offset = planes.offset[sequence, heads.kv_start : heads.kv_start + heads.groups]
        steep = q.norm(dim=-1, keepdim=True) * slope
        shift = (turned * offset[:, None]).sum(-1, keepdim=True)
        return _Plane(block, planes, sequence, turned, shift, steep)

    def enter(self, span: Span, into: Masses) -> None:
        """Write the masses of a span's tiles."""
        block, planes, heads = self.block, self.planes, self.block.heads
        tiles = slice(span.start // planes.block, -(-span.stop // planes.block))
        groups = slice(heads.kv_start, heads.kv_start + heads.groups)
        scale, error, size = (
            x[self.sequence, groups, tiles] for x in (planes.scale, planes.error, planes.size)
        )
        scores = self._scores(span, planes.codes[self.sequence, groups, span.keys], scale)
        short = (tiles.stop - tiles.start) * planes.block - (span.stop - span.start)
        sums = (
            pad(scores, (0, short), value=-math.inf).unflatten(-1, (-1, planes.block)).logsumexp(-1).float()
        )
        whole = 2 * (size + planes.norms[self.sequence, groups].unsqueeze(-1))
        width = planes.offset.shape[-1]
        off = self.steep * (error * SLACK + ULPS * width * whole)[:, None, None]
        for x, found in ((into.upper, sums + off), (into.lower, sums - off)):
            heads.queries(x, block.rows)[..., tiles] = found
        into.visited[heads.batch, groups, tiles] = True

    def _scores(self, span: Span, codes: Tensor, scale: Tensor) -> Tensor:
        """Scores of 8 bits of a span, -inf where they are masked: [groups, ratio, rows, keys]."""
        block, walk = self.block, self.block.walk
        by = scale.repeat_interleave(self.planes.block, -1)[:, None, : span.stop - span.start]
        products = _products(self.queries, codes) * by + self.shift
        scores = products.unflatten(1, (block.heads.ratio, -1)).to(walk.inputs.precision)
        if not walk.plain:
            (modified,) = block.evaluate([walk.facts.score], span, {"score": scores})
            scores = modified.expand(scores.shape) if isinstance(modified, Tensor) else scores * 0 + modified
            scores = scores.clone()
        block.hide(scores, span, -math.inf)
        return scores


def _products(queries: Tensor, codes: Tensor) -> Tensor:
    """Products of rows of queries and codes, as exact as sums of float32 whatever torch is told of matrix
    products of float32."""
    if torch.get_float32_matmul_precision() == "highest":
        return queries @ codes.float().mT
    return (queries.double() @ codes.double().mT).float()
