"""Block maps of ragged batches: over each sequence's own indices, or over packed tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fa4flex.contents import checked_here, on_host
from fa4flex.errors import InputError
from fa4flex.primitives.base import call_with, check_integers, show
from fa4flex.primitives.blocks import BlockMap
from fa4flex.primitives.mask import Around, Mask
from fa4flex.primitives.paging import Paging
from fa4flex.primitives.varlen import Varlen


@dataclass(frozen=True, eq=False, repr=False)
class WithinMap(Around):
    """A mask that reads a map, at pairs for which there is a map; others are masked."""

    blocks: BlockMap

    def __call__(self, b: Any, h: Any, q_idx: Any, kv_idx: Any, **context: Any) -> Any:
        q_len, kv_len = self.blocks.q_len, self.blocks.kv_len
        indices = b, h, torch.clamp(q_idx, max=q_len - 1), torch.clamp(kv_idx, max=kv_len - 1)
        inside = call_with(self.inner, indices, self.inner.context, context)
        return inside & (q_idx < q_len) & (kv_idx < kv_len)

    def __repr__(self) -> str:
        return f"within({self.inner!r})"


@dataclass(frozen=True, eq=False, repr=False)
class PackedMap(Around):
    """A map of packed tokens as a mask over each sequence's own indices."""

    blocks: BlockMap
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor

    def __call__(self, b: Any, h: Any, q_idx: Any, kv_idx: Any, **context: Any) -> Any:
        q, kv = self.cu_seqlens_q[b] + q_idx, self.cu_seqlens_k[b] + kv_idx
        return call_with(self.inner, (0, h, q, kv), self.inner.context, context)

    def __repr__(self) -> str:
        more = "" if self.cu_seqlens_k is self.cu_seqlens_q else f", {show(self.cu_seqlens_k)}"
        return f"{self.blocks!r}.packed({show(self.cu_seqlens_q)}{more})"


def packed(blocks: BlockMap, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None) -> Mask:
    """The mask of `BlockMap.packed`."""
    cu_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    for name, cu, length in (("q", cu_seqlens_q, blocks.q_len), ("k", cu_k, blocks.kv_len)):
        check_integers(f"cu_seqlens_{name}", cu)
        if cu.ndim != 1 or cu.numel() < 2:
            raise InputError(
                f"cu_seqlens_{name} of shape {list(cu.shape)}",
                "[sequences + 1]: 0 and the end of each sequence",
                "e.g. torch.tensor([0, 3, 8], dtype=torch.int32)",
            )
        if not torch.compiler.is_compiling() and checked_here(cu) and int(cu[-1]) != length:
            raise InputError(
                f"cu_seqlens_{name} ends at {int(cu[-1])}, the map is of {length} tokens",
                "a map of all packed tokens",
                "a map over each sequence's own indices is given as blocks=, without packed()",
            )
    if blocks.classes.shape[0] != 1:
        raise InputError(
            f"a map of {blocks.classes.shape[0]} entries of a batch, for packed tokens",
            "one map of all tokens",
            "a map over each sequence's own indices is given as blocks=, without packed()",
        )
    return PackedMap(blocks.mask(), blocks, cu_seqlens_q, cu_k)


def ragged(
    blocks: BlockMap, inner: Mask | None, lengths: tuple[Varlen | None, Paging | None], sizes: tuple[int, int]
) -> Mask:
    """Map and mask of a packed or paged call as one mask over each sequence's own indices.

    sizes  query heads, and queries of each sequence of a dense q (0: packed)

    Raises InputError for a map of another batch or other heads, and for one that is shorter than a sequence,
    where the host knows its length.
    """
    varlen, paging = lengths
    heads, q_len = sizes
    known = varlen if paging is None else paging
    assert known is not None
    blocks.fits(blocks.q_len, blocks.kv_len, known.sequences, heads)
    longest_q, longest_k = q_len, 0
    if not torch.compiler.is_compiling():
        longest_q = q_len or _longest(varlen, "q")
        longest_k = _of(paging.seqused_k) if paging is not None else _longest(varlen, "k")
    for name, longest, own in (("q_len", longest_q, blocks.q_len), ("kv_len", longest_k, blocks.kv_len)):
        if longest > own:
            raise InputError(
                f"a sequence of {longest} tokens with a block map of {name}={own}",
                "a map that covers each sequence; its blocks are of a sequence's own indices",
                f"make it longer, e.g. blocks.grown({name}={longest}); a map of all packed tokens is "
                "mask=blocks.packed(cu_seqlens)",
            )
    return WithinMap(blocks.mask(inner), blocks)


def _longest(varlen: Varlen | None, side: str) -> int:
    """Tokens of the longest sequence; 0 where the host does not know."""
    if varlen is None:
        return 0
    most: int | None = getattr(varlen, f"max_seqlen_{side}")
    used: Tensor | None = getattr(varlen, f"seqused_{side}")
    cu = varlen.cu_seqlens_q if side == "q" else varlen.cu_k
    if used is not None:
        return _of(used) or most or 0
    return (0 if cu is None or not checked_here(cu) else _of(cu[1:] - cu[:-1])) or most or 0


def _of(lengths: Tensor) -> int:
    return int(on_host(lengths).max()) if checked_here(lengths) and lengths.numel() else 0
