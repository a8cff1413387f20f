"""Inputs: what calls that look alike have in common, as far as kernels are specialised to it."""

from __future__ import annotations

from dataclasses import dataclass

from fa4flex.codegen.analyze.domain import Shape
from fa4flex.kernels.plan.keys import CONTIGUOUS, Keys
from fa4flex.kernels.plan.lengths import Lengths
from fa4flex.primitives.heads import ALIKE, Shares


@dataclass(frozen=True)
class Inputs:
    """extents      upper bounds of all lengths; the batch is the number of sequences
    kv_heads        heads of k and v; where these differ, KV heads as primitives/heads.py counts them
    shares          KV heads that share a head of k, and of v
    head_dim, head_dim_v   widths of q and k, and of v
    dtype, out_dtype       of q, k and v, and of the output
    keys            source of keys and values
    lengths         "dense", "packed" (cu_seqlens) or "used" (dense, with lengths per batch element)
    keys_used       the keys of a padded batch have lengths
    sinks           a learnable logit per head joins the denominator
    statistics      which of Problem's STATISTICS are written
    positive_scale  the softmax scale is positive
    skip            probability that each query may leave out
    captured        (dtype name, shape) of each captured tensor
    """

    extents: Shape
    kv_heads: int
    head_dim: int
    head_dim_v: int
    dtype: str = "bfloat16"
    out_dtype: str = "bfloat16"
    lengths: Lengths = "dense"
    keys_used: bool = False
    keys: Keys = CONTIGUOUS
    sinks: bool = False
    statistics: tuple[str, ...] = ("lse",)
    positive_scale: bool = True
    captured: tuple[tuple[str, tuple[int, ...]], ...] = ()
    shares: Shares = ALIKE
    skip: float = 0.0

    @property
    def operands(self) -> tuple[tuple[str, int], ...]:
        """(dtype name, rank) of each captured tensor."""
        return tuple((dtype, len(shape)) for dtype, shape in self.captured)
