"""Launches over keys in pages, for compute-sanitizer: see sanitize.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import fa4flex
from fa4flex import InputError, KVScales, Paging, Schedule, Varlen
from fa4flex.primitives.kv_scales import E4M3
from fa4flex.variants import alibi, causal, sliding_window, tree
from fa4flex.variants.tree import ancestors_of
from ptxsim.active import simulating

LENGTHS = 300, 0, 77, 1
"""Keys of four sequences. Slots behind them are NaN, and so are pages of nobody."""

HEADS, KV_HEADS = 8, 2

NO_PAGE = 10**9
"""Entry of the table that nobody may follow."""

Composition = Callable[[torch.device], dict[str, Any]]
"""Pieces of a variant, whose tensors lie on a device."""


def biased(_: torch.device) -> dict[str, Any]:
    return {"mask": causal, "score_mod": alibi}


def windowed(_: torch.device) -> dict[str, Any]:
    return {"mask": causal & sliding_window(70)}


def drafted(device: torch.device) -> dict[str, Any]:
    above = ancestors_of([-1, *[i // 2 for i in range(15)]])
    return {"mask": tree(ancestors=above.to(device))}


@dataclass(frozen=True)
class Paged:
    """A call over pages, whose results are those of a CPU.

    counts     of queries of each sequence; packed where they differ
    eight_bit  e4m3 keys and values, with scales by page and head
    wrong      an entry of the table and a length lead outside: the page's keys count as zeros, the length as
               the longest that the table has room for, and the fault is told
    """

    page_size: int
    counts: tuple[int, ...] = (1, 1, 1, 1)
    width: int = 128
    composition: Composition = biased
    schedule: Schedule = Schedule()
    eight_bit: bool = False
    wrong: bool = False

    def __call__(self, device: torch.device) -> list[Tensor]:
        on_gpu = device.type == "cuda" or simulating()
        q, k, v, table, used = self._drawn()
        more: dict[str, Any] = {}
        if self.packed:
            more["varlen"] = Varlen(torch.tensor([0, *self.counts]).cumsum(0).int().to(device))
        if self.eight_bit:
            scales = torch.rand(2, len(k), KV_HEADS) + 0.5
            more["kv_scales"] = KVScales(*scales.to(device))
        if self.wrong:
            table[0, 0], used[2] = (NO_PAGE, NO_PAGE) if on_gpu else (0, table.shape[1] * self.page_size)
            k[0], v[0] = 0.0, 0.0
        attn = fa4flex.compile(**self.composition(device), schedule=self.schedule)
        q, k, v, table, used = (x.to(device) for x in (q, k, v, table, used))
        with torch.no_grad():
            found = attn(q, k, v, paging=Paging(table, used), return_lse=True, **more)
        try:
            fa4flex.synchronize()
        except InputError:
            return list(found) if self.wrong else []
        return [] if self.wrong and on_gpu else list(found)

    @property
    def packed(self) -> bool:
        return len(set(self.counts)) > 1

    def _drawn(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """q, caches, table and lengths, on the CPU. Page 0 is nobody's."""
        batch = len(LENGTHS)
        shape = (sum(self.counts), HEADS) if self.packed else (batch, HEADS, self.counts[0])
        columns = -(-max(LENGTHS) // self.page_size) + 1
        table = torch.full((batch, columns), NO_PAGE, dtype=torch.int32)
        free = iter((torch.randperm(batch * columns + 3) + 1).tolist())
        k, v = torch.full((2, batch * columns + 4, self.page_size, KV_HEADS, self.width), torch.nan)
        lengths = [columns * self.page_size if self.wrong and i == 2 else n for i, n in enumerate(LENGTHS)]
        for sequence, length in enumerate(lengths):
            for column in range(-(-length // self.page_size)):
                page = table[sequence, column] = next(free)
                slots = min(self.page_size, length - column * self.page_size)
                k[page, :slots], v[page, :slots] = torch.randn(2, slots, KV_HEADS, self.width)
        dtype = E4M3 if self.eight_bit else torch.bfloat16
        q, used = torch.randn(*shape, self.width).bfloat16(), torch.tensor(LENGTHS, dtype=torch.int32)
        return q, k.to(dtype), v.to(dtype), table, used


def appended(page_size: int) -> Callable[[torch.device], list[Tensor]]:
    """Five new tokens of each of four sequences, which begin in the middle of pages and at their ends."""

    def launch(device: torch.device) -> list[Tensor]:
        columns = -(-12 // page_size)
        pools = [torch.randn(4 * columns, page_size, 2, 128).bfloat16() for _ in "kv"]
        table = torch.randperm(4 * columns).int().view(4, columns)
        used = torch.tensor([0, 3, 4, 7], dtype=torch.int32)
        new = [torch.randn(4, 2, 5, 128).bfloat16() for _ in "kv"]
        k, v, *there = (x.to(device) for x in (*new, *pools))
        paging = Paging(table.to(device), used.to(device))
        lengths = fa4flex.append(k, v, *there, paging).seqused_k
        return [*there, lengths]

    return launch


CASES: dict[str, Callable[[torch.device], list[Tensor]]] = {
    "pages of one key": Paged(1),
    "pages of 16 keys": Paged(16),
    "pages of 48 keys, two queries": Paged(48, counts=(2, 2, 2, 2)),
    "pages, heads of 64": Paged(16, width=64),
    "pages, a window": Paged(16, composition=windowed),
    "pages, splits of 64 keys": Paged(16, schedule=Schedule(split=64)),
    "pages, a tree of 16": Paged(16, counts=(16, 16, 16, 16), composition=drafted),
    "pages, chunks": Paged(16, counts=(70, 70, 70, 70)),
    "pages of one key, chunks": Paged(1, counts=(70, 70, 70, 70)),
    "pages, packed chunks": Paged(64, counts=(130, 0, 77, 1)),
    "pages, both kinds": Paged(16, counts=(130, 0, 1, 1)),
    "pages of one key, both kinds": Paged(1, counts=(130, 0, 1, 1)),
    "e4m3 pages": Paged(16, eight_bit=True),
    "e4m3 pages of one key": Paged(1, eight_bit=True),
    "wrong pages": Paged(16, wrong=True),
    "wrong pages of one key": Paged(1, wrong=True),
    "wrong pages, both kinds": Paged(16, counts=(130, 0, 1, 1), wrong=True),
    "appended keys": appended(4),
    "appended keys, pages of one": appended(1),
}
