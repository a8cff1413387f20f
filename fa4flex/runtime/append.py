"""The operator `fa4flex::append`: what it checks and computes on a CPU, and its shapes. What it
does on a GPU is in runtime/cuda/append.py."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fa4flex.default_device import on_the_host
from fa4flex.errors import InputError
from fa4flex.operators import OPERATORS
from fa4flex.primitives.rotary import Rotary
from fa4flex.primitives.varlen import Varlen
from fa4flex.runtime.cuda import append as on_gpu
from fa4flex.runtime.cuda.append import New, Pool
from ptxsim.active import simulating

_APPEND = OPERATORS["append"]


@on_the_host
def append(*arguments: Any) -> tuple[Tensor, Tensor]:
    """(lengths afterwards, rotated queries, which are empty without q)."""
    value = _APPEND.named(arguments)
    cos, sin = value["cos"], value["sin"]
    rotary = None if cos is None or sin is None else Rotary(cos, sin, value["interleaved"])
    k, v, q, cu_seqlens, seqused = (value[name] for name in ("k", "v", "q", "cu_seqlens", "seqused"))
    new = New(k, v, q, rotary, cu_seqlens, seqused)
    pool = Pool(*(value[name] for name in ("k_pool", "v_pool", "page_table", "seqused_k")))
    if k.is_cuda or simulating():
        lengths, rotated = on_gpu.append(new, pool, lambda: check_contents(new, pool))
    else:
        lengths, rotated = _on_cpu(new, pool)
    return lengths, k.new_empty(0) if rotated is None else rotated


def append_fake(*arguments: Any) -> tuple[Tensor, Tensor]:
    value = _APPEND.named(arguments)
    q, used = value["q"], value["seqused_k"]
    rotated = value["k"].new_empty(0) if q is None else q.new_empty(q.shape)
    return used.new_empty(used.shape), rotated


class Places(NamedTuple):
    """Destinations of tokens. sequence, position [tokens]: of each that takes part, `token` being its number;
    lengths [B]: new ones."""

    token: Tensor
    sequence: Tensor
    position: Tensor
    lengths: Tensor


def places_of(new: New, pool: Pool) -> Places:
    """The places of tokens, whose lengths are right."""
    used, device = pool.seqused_k.long(), new.k.device
    if new.cu_seqlens is None:
        batch, length = new.k.shape[0], new.k.shape[2]
        count = torch.full((batch,), length, device=device)
        first = torch.arange(batch, device=device) * length
    else:
        cu = new.cu_seqlens.long()
        first, count = cu[:-1], cu[1:] - cu[:-1]
    if new.seqused is not None:
        count = new.seqused.long()
    sequence = torch.repeat_interleave(torch.arange(count.numel(), device=device), count)
    before = torch.cumsum(count, 0) - count
    i = torch.arange(sequence.numel(), device=device) - before[sequence]
    return Places(first[sequence] + i, sequence, used[sequence] + i, used + count)


def check_contents(new: New, pool: Pool) -> None:
    """Raise InputError for lengths and pages with which something would be written nowhere. This waits for a
    device."""
    table, rotary = pool.page_table, new.rotary
    pages, page_size = pool.k.shape[:2]
    _check_lengths(new, pool.seqused_k)
    places = places_of(new, pool)
    capacity = table.shape[1] * page_size
    for value, after in zip(pool.seqused_k.tolist(), places.lengths.tolist(), strict=True):
        if after > capacity:
            raise InputError(
                f"seqused_k of {value} and {after - value} tokens to append",
                f"at most max_pages * page_size = {capacity} tokens together",
                "give the page table more columns",
            )
    page = table[places.sequence, places.position // page_size]
    wrong = page[(page < 0) | (page >= pages)]
    if wrong.numel():
        raise InputError(
            f"page {int(wrong[0])} in the page table",
            f"0 to {pages - 1}: the cache has {pages} pages",
            "give each sequence pages for its new tokens before they are appended",
        )
    if rotary is not None and places.position.numel():
        last = int(places.position.max())
        if last >= rotary.cos.shape[0]:
            raise InputError(
                f"position {last}",
                f"one of the {rotary.cos.shape[0]} rows of cos and sin",
                "make these tables longer",
            )


def _check_lengths(new: New, used: Tensor) -> None:
    if int(used.min()) < 0:
        raise InputError(f"seqused_k of {int(used.min())}", "lengths >= 0", "use 0 for an empty sequence")
    if new.cu_seqlens is None and new.seqused is None:
        return
    varlen = Varlen(new.cu_seqlens, seqused_q=new.seqused)
    varlen.check_contents()
    if varlen.packed:
        varlen.check_tokens(new.k.shape[0])
    else:
        varlen.check_used(new.k.shape[2], 0)


def _on_cpu(new: New, pool: Pool) -> tuple[Tensor, Tensor | None]:
    check_contents(new, pool)
    places, size = places_of(new, pool), pool.k.shape[1]
    page = pool.page_table[places.sequence, places.position // size].long()
    slot = places.position % size

    def rows(x: Tensor) -> Tensor:
        tokens = x if new.cu_seqlens is not None else x.transpose(1, 2).flatten(0, 1)
        return tokens[places.token]

    def turned(x: Tensor) -> Tensor:
        return rows(x) if new.rotary is None else new.rotary.turned(rows(x), places.position)

    pool.k[page, slot] = turned(new.k)
    pool.v[page, slot] = rows(new.v)
    lengths = places.lengths.to(pool.seqused_k.dtype)
    if new.q is None:
        return lengths, None
    rotated = new.q.clone(memory_format=torch.contiguous_format)
    if new.cu_seqlens is None:
        number = places.token - places.sequence * new.k.shape[2]
        rotated.transpose(1, 2)[places.sequence, number] = turned(new.q)
    else:
        rotated[places.token] = turned(new.q)
    return lengths, rotated
