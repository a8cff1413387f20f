"""One application of an output function, as host code hands it on."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from fa4flex.runtime.call import SequenceLengths


class OutputCall(NamedTuple):
    """One application of an output function.

    out          the output before it: [B, H, S, D] if `heads_first`, else [B, S, H, D]; packed [T, H, D]
    operands     captured tensors by slot
    lengths      cumulative and used ones of the queries of a ragged batch
    positions    int [S]: the q_idx of each row; None where rows are counted from 0
    whole        q_len that the function is told, of a batch that is not ragged; the h of the first head of
                 out; num_heads
    scalars      captured numbers by slot
    """

    out: Tensor
    operands: tuple[Tensor, ...]
    lengths: SequenceLengths
    positions: Tensor | None
    whole: tuple[int, int, int]
    scalars: tuple[int | float, ...]
    heads_first: bool

    @property
    def packed(self) -> bool:
        return self.out.ndim == 3

    @property
    def wants_gradients(self) -> bool:
        """True if a tensor of the call requires gradients."""
        return any(x.requires_grad for x in (self.out, *self.operands))
