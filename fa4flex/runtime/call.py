"""One call of a program: queries, the source of its keys and values, and all that it brings besides."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fa4flex.codegen.analyze.domain import Ragged, Shape
from fa4flex.kernels.plan.inputs import Inputs
from fa4flex.kernels.plan.keys import Keys
from fa4flex.primitives.heads import Shares
from fa4flex.primitives.varlen import Varlen
from fa4flex.runtime.key_sources import MOST_WIDTH, Contiguous, KeySource
from fa4flex.runtime.key_sources import Results as Results

Statistics = tuple[str, ...]
"""Statistics wanted of "lse", "max_scores", "max_logit" and "entropy", in this order."""


LSE: Statistics = ("lse",)
"""Statistics of a call that asks for its log-sum-exp alone."""


def results_of(made: tuple[Any, ...], statistics: Statistics) -> Results:
    """Results of what computed a call: of programs.Forward, or results themselves."""
    return (*made[:3], *made[-2:]) if more_than_rows(statistics) else made[:3]


def more_than_rows(statistics: Statistics) -> bool:
    """True if results have "max_logit" and "entropy" beside them: see Results."""
    return "max_logit" in statistics or "entropy" in statistics


def largest_of_heads(largest: Tensor) -> Tensor:
    """max_logit [H] of max_scores [B, H, S], or packed [H, T]."""
    rows = largest.detach()
    rows = rows.transpose(0, 1).flatten(1) if rows.ndim == 3 else rows
    return rows.amax(1) if rows.shape[1] else rows.new_full(rows.shape[:1], -torch.inf)


class SequenceLengths(NamedTuple):
    """Lengths of a ragged batch: cumulative ones int [B + 1] of packed sequences, used ones int [B]."""

    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    seqused_q: Tensor | None = None
    seqused_k: Tensor | None = None


NO_LENGTHS = SequenceLengths()


def lengths_of(varlen: Varlen | None, kv: KeySource) -> SequenceLengths:
    """The lengths of a call: a source with lengths of its own has those of queries besides."""
    if varlen is None:
        return NO_LENGTHS
    if kv.seqused_k is not None:
        return SequenceLengths(varlen.cu_seqlens_q, None, varlen.seqused_q)
    return SequenceLengths(varlen.cu_seqlens_q, varlen.cu_k, varlen.seqused_q, varlen.seqused_k)


class Call(NamedTuple):
    """One call.

    q            [B, H, S, D] if `heads_first`, else [B, S, H, D]; packed [T, H, D]
    kv           source of keys and values, with heads where those of q are: see key_sources.py
    operands     captured tensors by slot
    lengths      those of a ragged batch
    scalars      captured numbers by slot
    scale        multiplies q.k
    statistics   which are wanted
    """

    q: Tensor
    kv: KeySource
    operands: tuple[Tensor, ...]
    sinks: Tensor | None
    lengths: SequenceLengths
    scalars: tuple[int | float, ...]
    scale: float
    heads_first: bool
    statistics: Statistics

    @property
    def packed(self) -> bool:
        return self.lengths.cu_seqlens_q is not None

    @property
    def kv_heads(self) -> int:
        """Heads of k and v; where these differ, KV heads as `shares` counts them."""
        return common_heads(*self._heads)

    @property
    def shares(self) -> Shares:
        """KV heads that share a head of k, and of v."""
        return Shares.of(*self._heads)

    @property
    def _heads(self) -> tuple[int, int]:
        """Heads of k, and of v."""
        k, v = self.kv.k, self.kv.v
        at = 1 if k.ndim == 3 or self.heads_first else 2
        return k.shape[at], v.shape[at]

    @property
    def keys(self) -> Keys:
        """Source of keys as kernels are specialised to it."""
        return self.kv.keys(2 if self.heads_first else 1)

    @property
    def latent(self) -> bool:
        """True if values are the first columns of the one head of keys in memory, and wider than heads of
        other keys are on a GPU."""
        k, v = self.kv.k, self.kv.v
        if k.shape[-1] <= MOST_WIDTH or k.shape[:-1] != v.shape[:-1] or self.kv_heads != 1:
            return False
        return k.stride() == v.stride() and k.data_ptr() == v.data_ptr()

    @property
    def wide(self) -> bool:
        """True if heads are wider than those of most kernels."""
        return max(self.q.shape[-1], self.kv.v.shape[-1]) > MOST_WIDTH

    @property
    def wants_gradients(self) -> bool:
        """True if a tensor of the call requires gradients."""
        tensors = self.q, self.kv.k, self.kv.v, self.sinks, *self.operands
        return any(x is not None and x.requires_grad for x in tensors)

    @property
    def empty(self) -> bool:
        """True without entries, queries or keys: there is nothing to launch."""
        return not (self.q.numel() and self.kv.k.numel())

    @property
    def swapped(self) -> bool:
        """True if queries come before heads."""
        return not self.heads_first and self.lengths.cu_seqlens_q is None

    def turned(self) -> Call:
        """The call with heads first, if it is no packed one, of contiguous keys."""
        if not self.swapped:
            return self
        k, v = self.kv.k.transpose(1, 2), self.kv.v.transpose(1, 2)
        return Call(self.q.transpose(1, 2), Contiguous(k, v), *self[2:7], True, self.statistics)

    def turn(self, x: Tensor) -> Tensor:
        """A tensor of heads in the layout of `turned`, or one of those in the layout of this call."""
        return x.transpose(1, 2) if self.swapped else x

    def extents(self) -> Shape:
        """Upper bounds of all lengths; the batch is the number of sequences."""
        q, kv, cu_q = self.q.shape, self.kv, self.lengths.cu_seqlens_q
        heads, rows = (1, 2) if self.heads_first else (2, 1)
        if cu_q is not None:
            return Ragged(cu_q.shape[0] - 1, q[1], q[0], kv.longest(0 if kv.k.ndim == 3 else rows))
        kind = Shape if self.lengths is NO_LENGTHS and kv.seqused_k is None else Ragged
        return kind(q[0], q[heads], q[rows], kv.longest(rows))

    def inputs(self, out_dtype: torch.dtype, skip: float = 0.0) -> Inputs:
        """Inputs of all calls that look like this one, from tensors alone, and of their precision."""
        dense, kv = self.lengths is NO_LENGTHS, self.kv
        paged = kv.seqused_k is not None
        return Inputs(
            extents=self.extents(),
            kv_heads=self.kv_heads,
            head_dim=self.q.shape[-1],
            head_dim_v=kv.v.shape[-1],
            dtype=name_of(self.q.dtype),
            out_dtype=name_of(out_dtype),
            lengths="packed" if self.packed else "used" if paged or not dense else "dense",
            keys_used=paged or self.lengths.seqused_k is not None,
            keys=self.keys,
            sinks=self.sinks is not None,
            statistics=self.statistics,
            positive_scale=self.scale > 0,
            skip=skip,
            captured=tuple((name_of(x.dtype), tuple(x.shape)) for x in self.operands),
            shares=self.shares,
        )


def common_heads(k_heads: int, v_heads: int) -> int:
    """Number of KV heads of keys and values with so many heads each."""
    return k_heads if k_heads == v_heads else k_heads * Shares.of(k_heads, v_heads).k


def name_of(dtype: torch.dtype) -> str:
    """Name of a dtype as plans have it: "bfloat16"."""
    return str(dtype).removeprefix("torch.")
