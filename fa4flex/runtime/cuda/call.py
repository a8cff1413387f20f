"""What a call of a program consists of, and what its kernel is compiled for besides the problem."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from fa4flex.codegen.analyze.domain import Ragged, Shape

Lengths = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]
"""cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k."""

NO_LENGTHS: Lengths = (None, None, None, None)


class Call(NamedTuple):
    """One call. q, k, v [B, H, S, D] if `heads_first`, else [B, S, H, D]; packed ones [T, H, D]."""

    q: Tensor
    k: Tensor
    v: Tensor
    operands: tuple[Tensor, ...]
    sinks: Tensor | None
    lengths: Lengths
    scalars: tuple[int | float, ...]
    scale: float
    heads_first: bool
    statistics: tuple[str, ...]

    @property
    def packed(self) -> bool:
        return self.lengths[0] is not None

    def extents(self) -> Shape:
        """Upper bounds of all lengths; the batch is the number of sequences."""
        q, k, cu_q = self.q.shape, self.k.shape, self.lengths[0]
        if cu_q is not None:
            return Ragged(cu_q.shape[0] - 1, q[1], q[0], k[0])
        heads, rows = (1, 2) if self.heads_first else (2, 1)
        kind = Shape if self.lengths is NO_LENGTHS else Ragged
        return kind(q[0], q[heads], q[rows], k[rows])


@dataclass(frozen=True)
class Signature:
    """What the arguments of a launch look like, besides what the problem says.

    heads_first   q, k, v and out come as [B, H, S, D] rather than [B, S, H, D]; packed ones are [T, H, D]
    used_q, used_k   seqused_q and seqused_k are given
    scalars       the kind of each run-time number, "int", "bool" or "float"
    unit_strides  per captured tensor, whether its last stride is 1
    dlse          of backward passes: the log-sum-exp has a gradient
    even_rows     per captured tensor, whether its address and all strides but the last are even in elements
    ordered       of a ragged batch: tiles come in a given order
    """

    heads_first: bool = True
    used_q: bool = False
    used_k: bool = False
    scalars: tuple[str, ...] = ()
    unit_strides: tuple[bool, ...] = ()
    even_rows: tuple[bool, ...] = ()
    dlse: bool = False
    ordered: bool = False
