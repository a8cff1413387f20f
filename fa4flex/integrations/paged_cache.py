"""Common part of the serving engines: new tokens written to their slots, and one step over paged caches.

A step's queries are packed, sequence after sequence. Those that decode one token stand first, where an engine
orders them so: they are a launch of their own where no kernel has both kinds, and where results must not
depend on the batch.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fa4flex.api import Attention
from fa4flex.appending import append
from fa4flex.errors import UnsupportedError
from fa4flex.kernels import dispatch
from fa4flex.kernels.plan.keys import eight_bit, in_pages
from fa4flex.kernels.plan.problem import Problem
from fa4flex.kernels.plan.sizes import Sizes
from fa4flex.primitives.kv_scales import E4M3, KVScales
from fa4flex.primitives.latent import Latent
from fa4flex.primitives.paging import Paging
from fa4flex.primitives.schedule import Schedule
from fa4flex.primitives.varlen import Varlen
from fa4flex.runtime.call import name_of
from fa4flex.runtime.compute import on_gpu
from fa4flex.runtime.cuda.device.device import target_like, target_of

__all__ = ["INVARIANT", "Batch", "attend", "views", "write"]

Caches = tuple[Tensor, Tensor]
"""Keys and values, [pages, page_size, Hkv, D] each, of any strides."""

INVARIANT = Schedule(split=1024)
"""Schedule of engines that are asked for results that do not depend on the batch."""

STEP = 16
"""Bytes of which strides are multiples where the tensor memory accelerator reads a tensor."""


def views(cache: Tensor, heads: int, width: int) -> Caches:
    """Keys and values in one tensor, as views of it: nothing is copied.

    cache  keys and values side by side in the last dimension, [blocks, heads, block_size, width + Dv] or
           [blocks, block_size, heads, width + Dv]; or apart, [blocks, 2, block_size, heads, width],
           [2, blocks, ...], or either with heads before block_size. Any strides. Where a shape can be read in
           two ways, the one that stands first here is meant

    Raises UnsupportedError for other shapes.
    """
    found = next(_readings(cache, heads, width), None)
    if found is None:
        raise UnsupportedError(
            f"a cache of shape {list(cache.shape)} for {heads} heads of {width}",
            "[blocks, heads, block_size, keys and values], or [blocks, 2, block_size, heads, head_size], in"
            " these orders of dimensions or those that docs/serving.md names",
            "use a release of vLLM that docs/serving.md names",
        )
    keys, values = found
    return _stepped(keys), _stepped(values)


def _readings(cache: Tensor, heads: int, width: int) -> Iterator[Caches]:
    """Ways to read a cache, in the order of `views`."""
    if cache.ndim == 4 and cache.shape[3] > width:
        for dim in (1, 2):
            if cache.shape[dim] == heads:
                cells = cache.transpose(1, 2) if dim == 1 else cache
                yield cells[..., :width], cells[..., width:]
    if cache.ndim == 5 and cache.shape[4] == width:
        for heads_at in (3, 2):
            for dim in (1, 0):
                if cache.shape[dim] == 2 and cache.shape[heads_at] == heads:
                    keys, values = cache.unbind(dim)
                    yield (keys, values) if heads_at == 3 else (keys.transpose(1, 2), values.transpose(1, 2))


def _stepped(x: Tensor) -> Tensor:
    """The same view, with a stride that can be read of each dimension of size 1: its stride means nothing,
    and may be anything."""
    units = STEP // x.element_size()
    if all(size != 1 or stride % units == 0 for size, stride in zip(x.shape[:-1], x.stride())):
        return x
    inner = -(-x.shape[-1] // units) * units
    steps = [inner if size == 1 else stride for size, stride in zip(x.shape[:-1], x.stride())]
    return x.as_strided(x.shape, (*steps, x.stride(-1)))


def write(
    caches: Caches, new: tuple[Tensor, Tensor], slots: Tensor, kv_scales: KVScales | None = None
) -> None:
    """Write new keys and values [T, Hkv, D] to `slots` [T], integers page * page_size + place in the page.

    A slot below 0 belongs to a token that only pads the batch: nothing is written. The host waits for
    nothing, so that a CUDA graph may capture it. kv_scales: of caches of 8 bits, as `append` takes them.
    """
    if not slots.numel():
        return
    page_size, count = caches[0].shape[1], (slots >= 0).int()
    k, v = (x.unsqueeze(2) for x in new)
    if kv_scales is None:
        k, v = k.to(caches[0].dtype), v.to(caches[0].dtype)
    paging = Paging((slots // page_size).unsqueeze(1), slots % page_size)  # a token is a sequence of one page
    append(k, v, *caches, paging, varlen=Varlen(seqused_q=count), kv_scales=kv_scales)


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


def on_hopper() -> bool:
    """True on the GPU whose kernels read caches of 8 bits in place."""
    target = target_like(torch.cuda.get_device_capability()) if torch.cuda.is_available() else None
    return target is not None and target.family == "sm90"


def decodes_in_place(
    widths: tuple[int, int], dtype: torch.dtype, page_size: int, group: int, scaled: bool = False
) -> bool:
    """True if a GPU is there whose kernel for one query reads such pages as they are. group: query heads per
    KV head; scaled: keys have 8 bits, and a scale for each head."""
    if not torch.cuda.is_available():
        return False
    target = target_like(torch.cuda.get_device_capability())
    if target is None:
        return False
    keys, sizes = eight_bit(page_size, "head", "head") if scaled else in_pages(page_size), Sizes()
    sizes.extents, sizes.group, sizes.heads = (1, 1, page_size), group, group
    try:
        kind: Any = name_of(dtype)  # Problem refuses what no kernel has
        problem = Problem(*widths, kind, kind, keys=keys)
        dispatch.choose("forward", problem, target, sizes)
    except UnsupportedError:
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
    moved    None where sequences stand as they do in the queries; else [N], the place in the engine's order
             of each sequence, and [tokens], that of each query
    """

    table: Tensor
    lengths: Tensor
    singles: int
    tokens: int
    starts: Tensor | None = None
    others: Tensor | None = None
    moved: tuple[Tensor, Tensor] | None = None

    @staticmethod
    def decoding(table: Tensor, lengths: Tensor) -> Batch:
        """One query each."""
        return Batch(table, lengths, len(lengths), len(lengths))

    @staticmethod
    def of_starts(
        table: Tensor, lengths: Tensor, starts: Tensor, on_host: Tensor, *, invariant: bool = False
    ) -> Batch:
        """Cumulative query lengths `starts` [N + 1], which are also given on the host.

        invariant  all sequences with one query are moved to the front. Which launch computes a sequence then
                   follows from its own number of queries, not from what stands before it
        """
        counts = on_host.diff()
        single = counts == 1
        singles = len(single) if bool(single.all()) else int(single.int().argmin())
        tokens = int(on_host[-1])
        if tokens == singles:
            return Batch(table, lengths, singles, tokens)
        if not invariant or singles == int(single.sum()):
            return Batch(table, lengths, singles, tokens, starts, starts[singles:] - singles)
        order = torch.argsort(~single, stable=True)
        rows = [torch.arange(int(on_host[n]), int(on_host[n + 1])) for n in order]
        ends = torch.nn.functional.pad(counts[order].cumsum(0), (1, 0))
        order, queries, ends = (x.to(starts.device) for x in (order, torch.cat(rows), ends.to(starts.dtype)))
        singles = int(single.sum())
        batch = Batch(table[order], lengths[order], singles, tokens, ends, ends[singles:] - singles)
        return replace(batch, moved=(order, queries))

    def with_table(self, table: Tensor) -> Batch:
        """The same sequences over another pool, whose table [N, max_pages] is in the engine's order."""
        return replace(self, table=table if self.moved is None else table[self.moved[0]])


def attend(attn: Attention, q: Tensor, caches: Caches | Latent, batch: Batch, **options: Any) -> Tensor:
    """Output [T, Hq, Dv] of the packed queries [T, Hq, D] over the caches, or over latent rows, of one call
    where a launch has sequences of both kinds, else of one for each. Rows past the batch's tokens are
    padding: zeros. `options` go to each call."""
    if batch.moved is not None:
        queries = batch.moved[1]
        out = attend(attn, q[queries], caches, replace(batch, moved=None), **options)
        result = out.new_zeros(len(q), *out.shape[1:])
        return result.index_copy_(0, queries, out)
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
    of a part, single queries keep a launch of their own: their bits do not depend on chunks beside them. Of
    caches of 8 bits, too: their kernel reads them as they are, and that for chunks does not. Latent rows have
    no kernel for both."""
    if isinstance(caches, Latent) or not on_gpu(q):
        return False
    if attn.variant.schedule.split is not None or caches[0].dtype == E4M3:
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
