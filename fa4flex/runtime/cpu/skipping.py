"""Tiles of keys that `Precision(skip=...)` leaves out of a forward pass.

A key whose score lies log(n / skip) below some score of its row, of n keys that the row's tiles have, holds a
probability of at most skip / n; so all keys that are left out, of which there are at most n, hold at most
skip. A tile is left out where that is so of every score of every row: docs/primitives.md has the proof.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fa4flex.runtime.cpu.tiles import Block


def depth(skip: float, keys: int) -> float:
    """Least distance of each score of a tile that is left out below some other score of its row."""
    return math.log(max(keys, 1)) - math.log(skip)


@dataclass
class Skipping:
    """The rule for a block of query rows, and what it has left out: `left` counts keys, [groups, ratio]."""

    depth: float
    keys: int
    left: Tensor = field(repr=False)

    @staticmethod
    def of(block: Block) -> Skipping | None:
        """None where nothing may be left out."""
        skip = block.walk.inputs.skip
        if not skip:
            return None
        keys = sum(span.stop - span.start for span in block.spans)
        return Skipping(depth(skip, keys), keys, torch.zeros(block.heads.groups, block.heads.ratio))

    def leaves_out(self, scores: Tensor, largest: Tensor, before: Tensor) -> bool:
        """True if no head takes in a tile of scores [groups, ratio, rows, keys], of which `largest` are those
        of each row, and `before` the largest of the row so far. Where only some heads leave it out, their
        scores become -inf."""
        # NaN is below nothing, and before a row's first key only -inf is.
        out = (largest <= before - self.depth).all(2, keepdim=True)
        self.left += out[:, :, 0, 0] * scores.shape[3]
        if bool(out.all()):
            return True
        if bool(out.any()):
            scores.masked_fill_(out, -math.inf)
        return False

    @property
    def share(self) -> Tensor:
        """Share of the keys that each head left out, to broadcast over [groups, ratio, rows]."""
        return (self.left / max(self.keys, 1)).unsqueeze(-1)
