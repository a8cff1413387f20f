"""Calls whose keys lie in pages of pools that end where memory ends, and whose other pages are poisoned."""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import fa4flex
from fa4flex import Paging, Varlen

HOLES = (-1, 10**9, -(1 << 31), 1 << 20)
"""Entries of a page table that stand for no page."""


@dataclass(frozen=True)
class Size:
    """Heads of queries and of keys, queries, lengths of the sequences, widths of keys and of values, slots of
    a page."""

    heads: int = 4
    kv_heads: int = 1
    q_len: int = 2
    lengths: tuple[int, ...] = (150, 33)
    d: int = 64
    dv: int = 64
    page_size: int = 16


@dataclass(frozen=True)
class Drawn:
    """A call: caches are poisoned where no sequence has a key."""

    q: Tensor
    k: Tensor
    v: Tensor
    paging: Paging
    varlen: Varlen | None = None

    def __call__(self, attn: fa4flex.Attention, exactly: bool = False, **more: Any) -> Any:
        given = (x.double() if exactly else x for x in (self.q, self.k, self.v))
        return attn(*given, paging=self.paging, varlen=self.varlen, **more)


def drawn(size: Size, spare: int = 2, dtype: torch.dtype = torch.bfloat16) -> Drawn:
    """Pages in any order, two columns and some pages more than there have to be."""
    columns = -(-max(max(size.lengths), 1) // size.page_size) + spare
    live = [-(-n // size.page_size) for n in size.lengths]
    pages = torch.randperm(sum(live) + 3)[: sum(live)].split(live)
    holes = torch.tensor(HOLES)[torch.randint(len(HOLES), (len(live), columns))]
    table = holes.to(torch.int32)
    shape = sum(live) + 3, size.page_size, size.kv_heads
    k, v = (torch.full((*shape, width), torch.nan, dtype=dtype) for width in (size.d, size.dv))
    for b, (mine, length) in enumerate(zip(pages, size.lengths)):
        table[b, : len(mine)] = mine
        token = torch.arange(length)
        for cache in (k, v):
            filled = torch.randn(length, size.kv_heads, cache.shape[-1]).to(dtype)
            cache[mine[token // size.page_size], token % size.page_size] = filled
    q = torch.randn(len(live), size.heads, size.q_len, size.d).to(dtype)
    used = torch.tensor(size.lengths, dtype=torch.int32)
    return Drawn(q, guarded(k), guarded(v), Paging(guarded(table), guarded(used)))


GUARD = 64 << 10
"""Bytes behind a tensor that nobody may read."""


def guarded(x: Tensor) -> Tensor:
    """A copy that ends where memory does: the simulator tells of every access past it."""
    size = -(-x.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, size + GUARD)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    none = 0
    assert not ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + size), ctypes.c_size_t(GUARD), none)
    copied = torch.frombuffer(memory, dtype=x.dtype, count=x.numel(), offset=size - x.nbytes).view(x.shape)
    return copied.copy_(x)


def compare(attn: fa4flex.Attention, given: Drawn, out: Tensor, lse: Tensor) -> None:
    exact, exact_lse = given(attn, exactly=True, return_lse=True)
    rounding = torch.finfo(given.q.dtype).eps / 2
    assert (out.double() - exact).abs().max().item() <= 2 * rounding * exact.abs().max().item()
    torch.testing.assert_close(lse.double(), exact_lse, atol=1e-4, rtol=0)
    none = exact_lse == -torch.inf
    assert not out[none.mT if none.ndim == 2 else none].any()


WRONG: dict[str, tuple[Any, str]] = {
    "negative page": (lambda p: p.page_table[0].__setitem__(1, -7), "page -7 in the page table"),
    "page past the pool": (lambda p: p.page_table[0].__setitem__(1, 10**9), "page 1000000000 in the page"),
    "negative length": (lambda p: p.seqused_k.__setitem__(0, -3), "seqused_k of -3"),
    "length past the table": (lambda p: p.seqused_k.__setitem__(1, 5000), "seqused_k of 5000 tokens"),
}
"""Faults of a paging: a function that plants one, and the words that tell of it."""
