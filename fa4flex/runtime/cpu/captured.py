"""Gradients of captured tensors: the gradients of a tile's scores summed into the elements they read.

What an index does not depend on is summed first, inside the tile: a bias per head costs one addition per
tile, a relative bias one per diagonal. Only the rest is scattered, by `index_add_` on a flat buffer, which
on a CPU adds in order (`index_put_` with accumulation does not: it uses atomics).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from fa4flex.codegen.analyze.facts import Facts
from fa4flex.codegen.analyze.gradient import ONE, CapturedGradient
from fa4flex.codegen.evaluate import Value
from fa4flex.runtime.cpu.tiles import Block, Inputs, Span


class SharedGradients:
    """Gradients of what all sequences share: captured operands, and sinks.

    They are summed in float64: one element may be the sum of a term per (query, key) pair, one after the
    other, which in float32 loses two digits.

    `operands` holds one flat buffer for every operand slot in `needs`; `sinks` is [H] or None.
    """

    def __init__(self, facts: Facts, inputs: Inputs, needs: Collection[int]) -> None:
        self._inputs = inputs
        self._terms = facts.gradient.of_slots(needs) if needs else ()
        captured = inputs.captured.operands
        self.operands = {slot: torch.zeros(captured[slot].numel(), dtype=torch.float64) for slot in needs}
        self.sinks = None if inputs.sinks is None else torch.zeros(inputs.sinks.shape, dtype=torch.float64)

    def result(self) -> tuple[tuple[Tensor | None, ...], Tensor | None]:
        """Gradients by slot, and of the sinks, in the shapes and dtypes of what they belong to."""
        operands = tuple(
            self.operands[slot].view(operand.shape).to(operand.dtype) if slot in self.operands else None
            for slot, operand in enumerate(self._inputs.captured.operands)
        )
        if self.sinks is None or self._inputs.sinks is None:
            return operands, None
        return operands, self.sinks.to(self._inputs.sinks.dtype)

    def add(self, block: Block, span: Span, scores: Tensor, dscores: Tensor) -> None:
        """Take in a tile [groups, ratio, rows, keys]: raw scores, and gradients of the modified scores."""
        for term in self._terms:
            for point in term.points():
                axes: dict[str, Value] = {**point}
                share = dscores
                if term.value is not ONE:
                    (value,) = block.evaluate([term.value], span, {**axes, "score": scores})
                    share = dscores * value
                    # The value may be infinite or NaN where the mask hides the score, and 0 * inf is NaN.
                    block.hide(share, span, 0)
                self._scatter(term, _places(term, block, span, axes), share)

    def _scatter(self, term: CapturedGradient, places: Sequence[Value], share: Tensor) -> None:
        if term.pattern == "diagonal":
            share = diagonal_sums(share).unsqueeze(-2)
        place = flat_index(places, self._inputs.captured.operands[term.slot].shape)
        place = place.view((1,) * (share.ndim - place.ndim) + tuple(place.shape))
        constant = [d for d in range(share.ndim) if place.shape[d] == 1 and share.shape[d] != 1]
        if constant:
            share = share.sum(constant, keepdim=True, dtype=torch.float64)
        total, place, share = self.operands[term.slot], place.expand_as(share).flatten(), share.flatten()
        if total.is_cuda:  # where index_add_ adds in any order, and index_put_ sorts first
            total.index_put_((place,), share.double(), accumulate=True)
        else:
            total.index_add_(0, place, share.double())


def _places(term: CapturedGradient, block: Block, span: Span, axes: dict[str, Value]) -> list[Value]:
    """The index of a term over a tile, or over its diagonals where it depends on q - kv alone."""
    if term.pattern != "diagonal":
        return block.evaluate(term.index, span, axes)
    diagonals: dict[str, Value] = {
        "q": torch.arange(block.rows.start - span.stop + 1, block.rows.stop - span.start),
        "kv": 0,
    }
    return block.evaluate(term.index, span, axes | diagonals)


def flat_index(index: Sequence[Value], shape: torch.Size) -> Tensor:
    """Positions in a contiguous tensor of `shape`; negative indices count from the end, as in torch.

    Positions outside the tensor can only come from masked scores, whose gradient is zero, because reading
    them for any other score has already failed: they are moved to an end.
    """
    flat = torch.zeros((), dtype=torch.int64)
    for i, extent in zip(index, shape, strict=True):
        i = torch.as_tensor(i)
        i = torch.where(i < 0, i + extent, i).clamp(0, max(extent - 1, 0))
        flat = flat * extent + i
    return flat


def diagonal_sums(x: Tensor) -> Tensor:
    """Sums of x [..., R, C] along its diagonals: [..., R + C - 1], entry d for row - column = d - (C - 1)."""
    rows, columns = x.shape[-2:]
    skewed = x.new_zeros(*x.shape[:-1], columns + rows)
    skewed[..., :columns] = x.flip(-1)
    # Read with rows one element shorter than written, row r starts r further right: diagonals are columns.
    width = rows + columns - 1
    return skewed.flatten(-2)[..., : rows * width].unflatten(-1, (rows, width)).sum(-2, dtype=torch.float64)
