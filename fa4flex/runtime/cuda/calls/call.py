"""Arguments of a call of a program."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fa4flex.codegen.analyze.domain import Ragged, Shape
from fa4flex.kernels.plan.inputs import Inputs
from fa4flex.kernels.plan.lengths import Scaling
from fa4flex.kernels.plan.problem import page_rows
from fa4flex.primitives.kv_scales import E4M3


class SequenceLengths(NamedTuple):
    """Lengths of a ragged batch: cumulative ones int [B + 1] of packed sequences, used ones int [B]."""

    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    seqused_q: Tensor | None = None
    seqused_k: Tensor | None = None


NO_LENGTHS = SequenceLengths()


class Tensors(NamedTuple):
    """Tensors of one call as operators have them: q, k, v [B, H, S, D], or [T, H, D] with cu_seqlens."""

    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None
    lengths: SequenceLengths
    operands: tuple[Tensor, ...]


class Pages(NamedTuple):
    """Pages of each sequence [B, columns], and its number of keys [B]."""

    page_table: Tensor | None = None
    paged_keys: Tensor | None = None


NO_PAGES = Pages()


class Scales(NamedTuple):
    """Scales of the keys and values of an 8-bit cache, [sequences or pages, heads] or [sequences or pages,
    heads, tokens], and their granularity (primitives/kv_scales.py)."""

    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    k_per: Scaling = ""
    v_per: Scaling = ""


NO_SCALES = Scales()


class Call(NamedTuple):
    """One call. q, k, v [B, H, S, D] if `heads_first`, else [B, S, H, D]; packed ones [T, H, D]. Of paged
    keys and values B is the number of pages, and S their size; beside packed queries, heads are not first."""

    q: Tensor
    k: Tensor
    v: Tensor
    operands: tuple[Tensor, ...]
    sinks: Tensor | None
    lengths: SequenceLengths
    scalars: tuple[int | float, ...]
    scale: float
    heads_first: bool
    statistics: tuple[str, ...]
    pages: Pages = NO_PAGES
    scales: Scales = NO_SCALES

    @property
    def packed(self) -> bool:
        return self.lengths.cu_seqlens_q is not None

    @property
    def kv_heads(self) -> int:
        """Heads of k and v."""
        return self.k.shape[1 if self.k.ndim == 3 or self.heads_first else 2]

    def extents(self) -> Shape:
        """Upper bounds of all lengths; the batch is the number of sequences."""
        q, k, cu_q, table = self.q.shape, self.k.shape, self.lengths.cu_seqlens_q, self.pages.page_table
        heads, rows = (1, 2) if self.heads_first else (2, 1)
        if cu_q is not None:
            keys = k[0] if table is None else table.shape[1] * k[rows]
            return Ragged(cu_q.shape[0] - 1, q[1], q[0], keys)
        if table is not None:
            return Ragged(q[0], q[heads], q[rows], table.shape[1] * k[rows])
        kind = Shape if self.lengths is NO_LENGTHS else Ragged
        return kind(q[0], q[heads], q[rows], k[rows])

    def inputs(self, out_dtype: torch.dtype) -> Inputs:
        """Inputs of all calls that look like this one, from tensors alone."""
        dense, paged = self.lengths is NO_LENGTHS, self.pages is not NO_PAGES
        return Inputs(
            extents=self.extents(),
            kv_heads=self.kv_heads,
            kv_dtype=name_of(self.k.dtype) if self.k.dtype == E4M3 else "",
            k_scales=self.scales.k_per,
            v_scales=self.scales.v_per,
            head_dim=self.q.shape[-1],
            head_dim_v=self.v.shape[-1],
            dtype=name_of(self.q.dtype),
            out_dtype=name_of(out_dtype),
            lengths="packed" if self.packed else "used" if paged or not dense else "dense",
            keys_used=paged or self.lengths.seqused_k is not None,
            page_rows=page_rows(self.k.shape[2 if self.heads_first else 1]) if paged else 0,
            sinks=self.sinks is not None,
            statistics=self.statistics,
            positive_scale=self.scale > 0,
            captured=tuple((name_of(x.dtype), tuple(x.shape)) for x in self.operands),
        )


def name_of(dtype: torch.dtype) -> str:
    """Name of a dtype as plans have it: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


ALIGNMENT = 16
"""Bytes that addresses and strides of what the tensor memory accelerator reads are multiples of."""


def heads_look(x: Tensor) -> tuple[Any, ...]:
    """Properties that a kernel is told of a tensor of heads, of any extents: dtype, device, and whether the
    tensor memory accelerator can read it (`tma_able` in conversions.py)."""
    *steps, unit = x.stride()
    size, places = x.element_size(), x.data_ptr()
    for step in steps:
        places |= step * size
    return x.dtype, x.get_device(), unit == 1 and places % ALIGNMENT == 0


def array_look(x: Tensor) -> tuple[Any, ...]:
    """Properties that a kernel is told of lengths and statistics, of any extents: dtype, device, whether the
    last stride is 1."""
    return x.dtype, x.get_device(), x.stride()[-1:] == (1,)


def layout_key(x: Tensor | None) -> Any:
    """Key of a tensor's layout: two tensors with the same one can take each other's place."""
    return None if x is None else (x.shape, x.stride(), x.dtype, x.get_device(), x.data_ptr() % ALIGNMENT)
