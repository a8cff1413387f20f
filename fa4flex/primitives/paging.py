"""Paged KV caches: fixed-size pages in one pool, and a page table with the pages of each sequence."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fa4flex.contents import checked_here
from fa4flex.errors import InputError
from fa4flex.primitives.base import check_device, check_integers, show
from fa4flex.torch_internals import assert_async


@dataclass(frozen=True, eq=False, repr=False)
class Paging:
    """`page_table` [B, max_pages] and `seqused_k` [B], int32 or int64 (FlashAttention's names and layout).

    Sequence b's key t lives in page `page_table[b, t // page_size]`, slot `t % page_size`, of caches
    [pages, page_size, Hkv, D]. Any page size works. Only the first ceil(seqused_k[b] / page_size)
    entries of a row are read; sequences may share pages. Raises InputError; contents of the tensors are
    checked here on a CPU, and by the kernels on a GPU.
    """

    page_table: Tensor
    seqused_k: Tensor

    def __post_init__(self) -> None:
        for name, tensor, rank in (("page_table", self.page_table, 2), ("seqused_k", self.seqused_k, 1)):
            check_integers(name, tensor)
            if tensor.ndim != rank or 0 in tensor.shape:
                raise InputError(
                    f"{name} of shape {list(tensor.shape)}",
                    "page_table [B, max_pages] and seqused_k [B]",
                    "one row of pages and one length per sequence",
                )
        if self.page_table.shape[0] != self.seqused_k.shape[0]:
            raise InputError(
                f"page_table has {self.page_table.shape[0]} sequences, seqused_k {self.seqused_k.shape[0]}",
                "one length per row of the page table",
                "pass both for the same batch",
            )
        device, fix = self.seqused_k.device, "move them with .to(q.device)"
        check_device("page_table", self.page_table, "seqused_k", device, fix)
        if not torch.compiler.is_compiling() and checked_here(self.seqused_k):
            self._check_lengths()

    def _check_lengths(self) -> None:
        if not (self.seqused_k >= 0).all():
            raise InputError(
                f"seqused_k of {int(self.seqused_k.min())}", "lengths >= 0", "use 0 for an empty sequence"
            )

    @property
    def sequences(self) -> int:
        return self.page_table.shape[0]

    def check(self, k_cache: Tensor, v_cache: Tensor) -> None:
        """Raise InputError unless the caches fit, k [pages, page_size, Hkv, D] and v [.., Dv], and have the
        pages of the table. This waits for a device."""
        self.fits(k_cache, v_cache)
        self.check_contents(k_cache)

    def fits(self, k_cache: Tensor, v_cache: Tensor) -> None:
        """Raise InputError unless caches of these shapes fit."""
        for name, cache in (("k", k_cache), ("v", v_cache)):
            if cache.ndim != 4:
                raise InputError(
                    f"{name} cache of shape {list(cache.shape)}",
                    "[pages, page_size, Hkv, head_dim]",
                    "split a flat cache with .unflatten(0, (pages, page_size))",
                )
            device, fix = self.page_table.device, "move the page table to the cache"
            check_device(f"{name} cache", cache, "page_table", device, fix)
        if k_cache.shape[:2] != v_cache.shape[:2] or k_cache.dtype != v_cache.dtype:
            raise InputError(
                f"k cache {k_cache.dtype} {list(k_cache.shape)}, "
                f"v cache {v_cache.dtype} {list(v_cache.shape)}",
                "the same dtype, pages and page size",
                "allocate both caches alike; only heads and the last dimension may differ",
            )

    def check_contents(self, cache: Tensor) -> None:
        """Raise InputError unless the lengths and the pages of the table exist in this cache."""
        if torch.compiler.is_compiling():
            for condition, message in conditions_of(self, cache):
                assert_async(condition.all(), message)
            return
        self._check_lengths()
        pages, page_size = cache.shape[:2]
        capacity = self.page_table.shape[1] * page_size
        if not (self.seqused_k <= capacity).all():
            raise InputError(
                f"seqused_k of {int(self.seqused_k.max())} tokens",
                f"at most max_pages * page_size = {self.page_table.shape[1]} * {page_size} = {capacity}",
                "give the page table more columns",
            )
        if not self._known(cache).all():
            live = self.page_table[self._live(page_size)]
            wrong = int(live.min()) if int(live.min()) < 0 else int(live.max())
            raise InputError(
                f"page {wrong} in the page table",
                f"0 to {pages - 1}: the cache has {pages} pages",
                "name pages of this cache; entries behind a sequence's last page may hold anything",
            )

    def _known(self, cache: Tensor) -> Tensor:
        """bool [B, max_pages]: entries that are pages of the cache, or hold no keys."""
        known = (self.page_table >= 0) & (self.page_table < cache.shape[0])
        return known | ~self._live(cache.shape[1])

    def gather(self, cache: Tensor) -> tuple[Tensor, Tensor]:
        """The used keys (or values) of `cache` [pages, page_size, Hkv, D], packed.

        Returns ([T, Hkv, D], cu_seqlens int32 [B + 1]) with T = sum(seqused_k). Differentiable; memory is
        that of the T tokens.
        """
        page_size = cache.shape[1]
        used = self.seqused_k.long()
        cu_seqlens = torch.nn.functional.pad(used.cumsum(0), (1, 0))
        sequence = torch.repeat_interleave(torch.arange(self.sequences, device=used.device), used)
        token = torch.arange(sequence.numel(), device=used.device) - cu_seqlens[sequence]
        page = self.page_table[sequence, token // page_size].long()
        # Two index tensors rather than a flattened cache: flattening would copy a strided pool whole.
        return cache[page, token % page_size], cu_seqlens.to(torch.int32)

    def spread(self, cache: Tensor) -> Tensor:
        """All pages of each sequence, [B, max_pages * page_size, Hkv, D]: what follows `seqused_k` tokens, or
        lies in pages that do not exist, is arbitrary. Nothing is read on the host, so compiled graphs use it.
        Differentiable."""
        exists = self._live(cache.shape[1]) & (self.page_table >= 0) & (self.page_table < cache.shape[0])
        pages = torch.where(exists, self.page_table, 0)
        return cache[pages.long()].flatten(1, 2)

    def _live(self, page_size: int) -> Tensor:
        """bool [B, max_pages]: entries that hold keys."""
        pages = (self.seqused_k + page_size - 1) // page_size
        return torch.arange(self.page_table.shape[1], device=pages.device) < pages.unsqueeze(1)

    def __repr__(self) -> str:
        return f"Paging({show(self.page_table)}, {show(self.seqused_k)})"


def conditions_of(paging: Paging, cache: Tensor) -> list[tuple[Tensor, str]]:
    """Conditions that contents must meet, as bool tensors, and messages for those that are not true."""
    capacity = paging.page_table.shape[1] * cache.shape[1]
    return [
        (paging.seqused_k >= 0, "Paging: seqused_k holds a negative length"),
        (paging.seqused_k <= capacity, "Paging: seqused_k exceeds max_pages * page_size"),
        (paging._known(cache), "Paging: a page of page_table does not exist"),
    ]
