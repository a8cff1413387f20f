"""Common part of the serving engines: new tokens written to their slots, and one step over paged caches.

A step's queries are packed, sequence after sequence. Those that decode one token stand first, where an engine
orders them so: they are a launch of their own where no kernel has both kinds.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fa4flex.api import Attention
from fa4flex.appending import append
from fa4flex.errors import UnsupportedError
from fa4flex.kernels import dispatch
from fa4flex.kernels.plan.keys import in_pages
from fa4flex.kernels.plan.problem import Problem
from fa4flex.primitives.latent import Latent
from fa4flex.primitives.paging import Paging
from fa4flex.primitives.varlen import Varlen
from fa4flex.runtime.call import name_of
from fa4flex.runtime.compute import on_gpu
from fa4flex.runtime.cuda.device.device import target_like, target_of

__all__ = ["Batch", "attend", "write"]

Caches = tuple[Tensor, Tensor]
"""Keys and values, [pages, page_size, Hkv, D] each, of any strides."""


def write(caches: Caches, new: tuple[Tensor, Tensor], slots: Tensor) -> None:
    """Write new keys and values [T, Hkv, D] to `slots` [T], integers page * page_size + place in the page.

    A slot below 0 belongs to a token that only pads the batch: nothing is written. The host waits for
    nothing, so that a CUDA graph may capture it.
    """
    if not slots.numel():
        return
    page_size, count = caches[0].shape[1], (slots >= 0).int()
    k, v = (x.unsqueeze(2).to(caches[0].dtype) for x in new)
    paging = Paging((slots // page_size).unsqueeze(1), slots % page_size)  # a token is a sequence of one page
    append(k, v, *caches, paging, varlen=Varlen(seqused_q=count))


def serves_width(width: int) -> bool:
    """True if heads of this width have kernels over pages."""
    return width % 8 == 0 and width <= 256


def check_widths(*widths: int) -> None:
    """Raise for heads that have no kernel over pages."""
    if not all(map(serves_width, widths)):
        raise UnsupportedError(
            f"heads of {' and '.join(map(str, dict.fromkeys(widths)))}",
            "widths that are multiples of 8, 256 at most",
            "choose another attention backend for this model",
        )


def reads_pages() -> bool:
    """True if a decoding step over pages waits for no device: on a CPU, and where a kernel reads them in
    place."""
    if not torch.cuda.is_available():
        return True
    try:
        target_of(torch.device("cuda"))
    except UnsupportedError:  # a GPU without kernels, beside a model on a CPU
        return False
    return True


@dataclass(frozen=True, eq=False)
class Batch:
    """Sequences of one step, whose keys lie in pages.

    table    [N, max_pages] integers, the pages of each sequence
    lengths  [N] integers, tokens of each sequence with its new ones
    singles  number of sequences at the front that have one query each
    tokens   number of queries
    starts   [N + 1] integers: where each sequence starts in the queries; None where all decode
    others   [N - singles + 1] integers: where each of the other sequences starts in the queries that follow
             those of the singles; None where they have no queries
    """

    table: Tensor
    lengths: Tensor
    singles: int
    tokens: int
    starts: Tensor | None = None
    others: Tensor | None = None

    @staticmethod
    def decoding(table: Tensor, lengths: Tensor) -> Batch:
        """One query each."""
        return Batch(table, lengths, len(lengths), len(lengths))

    @staticmethod
    def of_starts(table: Tensor, lengths: Tensor, starts: Tensor, on_host: Tensor) -> Batch:
        """Cumulative query lengths `starts` [N + 1], which are also given on the host."""
        single = on_host.diff() == 1
        singles = len(single) if bool(single.all()) else int(single.int().argmin())
        tokens = int(on_host[-1])
        if tokens == singles:
            return Batch(table, lengths, singles, tokens)
        return Batch(table, lengths, singles, tokens, starts, starts[singles:] - singles)


def attend(attn: Attention, q: Tensor, caches: Caches | Latent, batch: Batch, **options: Any) -> Tensor:
    """Output [T, Hq, Dv] of the packed queries [T, Hq, D] over the caches, or over latent rows, of one call
    where a launch has sequences of both kinds, else of one for each. Rows past the batch's tokens are
    padding: zeros. `options` go to each call."""
    n, tokens, parts = batch.singles, batch.tokens, []
    kv: tuple[Any, ...] = (caches,) if isinstance(caches, Latent) else caches
    width = caches.value_dim if isinstance(caches, Latent) else caches[1].shape[-1]
    if batch.starts is not None and n and _mixes(attn, q, caches):
        paging = Paging(batch.table, batch.lengths)
        parts.append(attn(q[:tokens], *kv, varlen=Varlen(batch.starts), paging=paging, **options))
        return _padded(parts, q, width)
    if n:
        paging = Paging(batch.table[:n], batch.lengths[:n])
        parts.append(attn(q[:n].unsqueeze(2), *kv, paging=paging, **options).squeeze(2))
    if batch.others is not None:
        paging = Paging(batch.table[n:], batch.lengths[n:])
        lengths = Varlen(batch.others)
        parts.append(attn(q[n:tokens], *kv, varlen=lengths, paging=paging, **options))
    return _padded(parts, q, width)


def _padded(parts: list[Tensor], q: Tensor, width: int) -> Tensor:
    """All parts, and zeros for the rest of q."""
    missing = len(q) - sum(map(len, parts))
    if missing or not parts:
        parts.append(q.new_zeros(missing, q.shape[1], width))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _mixes(attn: Attention, q: Tensor, caches: Caches | Latent) -> bool:
    """True if a launch for chunks has the heads of single queries packed. Where the schedule fixes the keys
    of a part, single queries keep a launch of their own: their bits do not depend on chunks beside them."""
    if isinstance(caches, Latent) or not on_gpu(q) or attn.variant.schedule.split is not None:
        return False
    widths = q.shape[-1], caches[1].shape[-1]
    capability = torch.cuda.get_device_capability(q.device)
    out = attn.variant.precision.output or q.dtype
    return _has_mixed(widths, (name_of(q.dtype), name_of(out)), caches[0].shape[1], capability)


@functools.lru_cache(maxsize=256)
def _has_mixed(
    widths: tuple[int, int], dtypes: tuple[Any, Any], page_size: int, capability: tuple[int, int]
) -> bool:
    """True if packed queries over such pages have such a kernel; it follows from these alone. dtypes: those
    of q and of the output."""
    target = target_like(capability)
    if target is None:
        return False
    try:
        problem = Problem(*widths, *dtypes, lengths="packed", keys=in_pages(page_size))
        return dispatch.choose("forward", problem, target).mixes
    except UnsupportedError:
        return False
