"""The operator `fa4flex::append`: what it checks and computes on a CPU, and its shapes. What it
does on a GPU is in runtime/cuda/append.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fa4flex.default_device import on_the_host
from fa4flex.errors import InputError
from fa4flex.kernels.append.config import E4M3_LARGEST
from fa4flex.operators import OPERATORS
from fa4flex.primitives.kv_scales import E4M3, KVScales
from fa4flex.primitives.qk_norm import QKNorm
from fa4flex.primitives.rotary import Rotary
from fa4flex.primitives.varlen import Varlen
from fa4flex.runtime.cuda import append as on_gpu
from fa4flex.runtime.cuda.append import New, Pool
from ptxsim.active import simulating

_APPEND = OPERATORS["append"]


@on_the_host
def append(*arguments: Any) -> tuple[Tensor, Tensor]:
    """(lengths afterwards, normalised and rotated queries, which are empty without q)."""
    value = _APPEND.named(arguments)
    given = {name: value[name] for name in ("k", "v", "q", "cu_seqlens", "seqused", "positions")}
    new = New(**given, rotary=rotary_of(value), norm=norm_of(value))
    scales = KVScales(value["k_scales"], value["v_scales"])
    pool = Pool(value["k_pool"], value["v_pool"], value["page_table"], value["seqused_k"], scales)
    if new.k.is_cuda or simulating():
        lengths, rotated = on_gpu.append(new, pool, lambda: check_contents(new, pool))
    else:
        lengths, rotated = _on_cpu(new, pool)
    return lengths, new.k.new_empty(0) if rotated is None else rotated


def rotary_of(value: Mapping[str, Any]) -> Rotary | None:
    """Rotary embeddings of an operator's arguments."""
    if value["cos"] is None:
        return None
    return Rotary(value["cos"], value["sin"], value["interleaved"], value["axes"])


def norm_of(value: Mapping[str, Any]) -> QKNorm | None:
    """Norms of an operator's arguments."""
    if value["q_weight"] is None and value["k_weight"] is None:
        return None
    return QKNorm(value["q_weight"], value["k_weight"], value["eps"], value["unit_offset"])


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
        _check_angles(rotary, new, places)


def _check_angles(rotary: Rotary, new: New, places: Places) -> None:
    position, rows = _positions(new, places), rotary.cos.shape[0]
    wrong = position[(position < 0) | (position >= rows)]
    if wrong.numel():
        raise InputError(
            f"position {int(wrong.max())}",
            f"one of the {rows} rows of cos and sin",
            "make these tables longer",
        )
    if rotary.axes is None:
        return
    axes = rotary.axes[(rotary.axes < 0) | (rotary.axes >= position.shape[0])]
    if axes.numel():
        raise InputError(
            f"axis {int(axes[0])} of an angle",
            f"0 up to the number of axes that positions have, {position.shape[0]}",
            "pass positions [axes, ...] with a row for each axis of rotary",
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


def _positions(new: New, places: Places) -> Tensor:
    """Positions by which tokens are rotated: [tokens], or [axes, tokens]."""
    if new.positions is None:
        return places.position
    position = new.positions.long().flatten(1)[:, places.token]
    return position if new.rotary is not None and new.rotary.axes is not None else position[0]


def _on_cpu(new: New, pool: Pool) -> tuple[Tensor, Tensor | None]:
    check_contents(new, pool)
    places, size = places_of(new, pool), pool.k.shape[1]
    slots = pool.page_table[places.sequence, places.position // size].long(), places.position % size
    norm = new.norm

    def rows(x: Tensor) -> Tensor:
        tokens = x if new.cu_seqlens is not None else x.transpose(1, 2).flatten(0, 1)
        return tokens[places.token]

    def turned(x: Tensor, weight: Tensor | None) -> Tensor:
        """Heads of tokens, rounded by whoever stores them."""
        heads = rows(x) if norm is None else norm.normalised(rows(x), weight)
        if new.rotary is None:
            return heads
        wide = torch.float64 if heads.dtype == torch.float64 else torch.float32
        return new.rotary.turned(heads.to(wide), _positions(new, places))

    _store(pool.k, slots, turned(new.k, None if norm is None else norm.k), pool.scales.k)
    _store(pool.v, slots, rows(new.v), pool.scales.v)
    lengths = places.lengths.to(pool.seqused_k.dtype)
    if new.q is None:
        return lengths, None
    rotated = new.q.clone(memory_format=torch.contiguous_format)
    queries = turned(new.q, None if norm is None else norm.q).to(rotated.dtype)
    if new.cu_seqlens is None:
        number = places.token - places.sequence * new.k.shape[2]
        rotated.transpose(1, 2)[places.sequence, number] = queries
    else:
        rotated[places.token] = queries
    return lengths, rotated


def _store(pool: Tensor, slots: tuple[Tensor, Tensor], heads: Tensor, scale: Tensor | None) -> None:
    """Write heads [tokens, H, D] to their slots of a pool; those of e4m3 by scales, which of single tokens
    are found and written, too."""
    if pool.dtype != E4M3:
        pool[slots] = heads.to(pool.dtype)
        return
    wide = heads.float()
    if scale is not None:
        factor = scale
        if scale.ndim == 3:
            largest = wide.abs().amax(-1)
            factor = torch.where(largest > 0, largest / E4M3_LARGEST, 1.0)
            scale[slots] = factor
        elif scale.ndim == 2:
            factor = scale[slots[0]]
        wide = wide / factor[..., None]
    pool.view(torch.uint8)[slots] = wide.clamp(-E4M3_LARGEST, E4M3_LARGEST).to(E4M3).view(torch.uint8)
