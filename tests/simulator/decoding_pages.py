"""Calls with few query rows whose keys lie in pages, on the simulated GPU and beside the oracle."""

from __future__ import annotations

import ctypes
import mmap
import random
from dataclasses import dataclass
from typing import Any

import torch
from decoding import SIMULATED
from torch import Tensor

import fa4flex
from fa4flex import Paging, simulator

HOLES = (-1, 10**9, -(1 << 31), 1 << 20)
"""What entries of a page table hold that stand for no page."""


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

    def __call__(self, attn: fa4flex.Attention, exactly: bool = False, **more: Any) -> Any:
        given = (self.q, self.k, self.v)
        return attn(*(x.double() if exactly else x for x in given), paging=self.paging, **more)


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


def attend(attn: fa4flex.Attention, given: Drawn) -> tuple[Tensor, Tensor]:
    """On the simulated GPU, under a random timing; nothing may be found, and nothing else is launched."""
    timing, seed = random.choice([("eager", 0), ("late", 1), ("random", random.randrange(99))])
    with torch.no_grad(), simulator.device(SIMULATED["chip"], seed, timing) as gpu:
        out, lse = given(attn, return_lse=True)
    kernels = [result.kernel for result in gpu.results]
    assert all("decode" in name or "combine" in name for name in kernels), kernels
    assert any("decode" in name for name in kernels)
    assert not gpu.findings, f"{timing} {seed}: {gpu.report()}"
    return out, lse


def compare(attn: fa4flex.Attention, given: Drawn, out: Tensor, lse: Tensor) -> None:
    exact, exact_lse = given(attn, exactly=True, return_lse=True)
    rounding = torch.finfo(given.q.dtype).eps / 2
    assert (out.double() - exact).abs().max().item() <= 2 * rounding * exact.abs().max().item()
    torch.testing.assert_close(lse.double(), exact_lse, atol=1e-4, rtol=0)
    assert not out[exact_lse == -torch.inf].any()


def check(attn: fa4flex.Attention, given: Drawn) -> None:
    compare(attn, given, *attend(attn, given))
