"""Scattered tiles by PyTorch's fused kernel: tiles of keys side by side, rows of equally many at once.

Keys are gathered into a buffer that stays in a core's cache until the kernel has read them; rows are in order
of their number of tiles, so that none is padded.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fa4flex.codegen.evaluate import DividedByZero, PastTheEnd
from fa4flex.runtime.cpu.scattered import Batch, Scattered
from fa4flex.runtime.cpu.softmax import INFINITY, beside_sinks
from fa4flex.torch_internals import fused_kernel

BUFFER = 1 << 17
"""Elements of gathered keys at once, of each thread: with the values 1 MB."""


class _Chunk(NamedTuple):
    """Items `start` .. `stop` in order, of `each` tiles each: tiles `first` .. `last` of all of theirs."""

    start: int
    stop: int
    each: int
    first: int
    last: int


def attend(call: Scattered, out: Tensor, lse: Tensor) -> bool:
    """Write the results of a call; False where a mod cannot be evaluated at some pair."""
    views = [_in_place(call, x) for x in (out, lse)]
    shape = len(call.items), call.height
    shapes = (*shape, out.shape[3]), shape
    results = [torch.empty(y) if x is None else x for x, y in zip(views, shapes, strict=True)]
    try:
        _attend(call, results[0], results[1])
    except (PastTheEnd, DividedByZero):
        return False
    for view, parts, into in zip(views, results, (out, lse), strict=True):
        if view is None:
            call.to_rows(parts, into)
    return True


def _in_place(call: Scattered, x: Tensor) -> Tensor | None:
    """x [B, H, Sq, ...] as [items, height, ...] without a copy; None where that takes one, or x is no
    float32."""
    rows, tall = call.tiles.grid[0], call.tiles.tile[0]
    whole = call.ratio == 1 and x.shape[2] == rows * tall
    if not whole or x.dtype is not torch.float32 or not x.is_contiguous():
        return None
    return x.view(-1, tall, *x.shape[3:])


def _attend(call: Scattered, out: Tensor, lse: Tensor) -> None:
    """Write the results of all items, [items, height, Dv] and [items, height]."""
    inputs, lists, dtype = call.inputs, call.lists, torch.float32
    count = lists.count[call.items.at]
    order = count.argsort(descending=True, stable=True)
    counts = count[order].tolist()
    view = _in_place(call, inputs.q)
    queries = call.of_rows(inputs.q, dtype) if view is None else view
    keys, values = (call.of_keys(x, dtype) for x in (inputs.k, inputs.v))
    read = _Read(keys, values, _places(call, order, count[order]))
    masked = bool(lists.partial.any()) or inputs.k.shape[2] % call.tiles.tile[1] > 0
    most = BUFFER * torch.get_num_threads() // read.keys.shape[1]
    for chunk in _chunks(counts, most):
        own = order[chunk.start : chunk.stop]
        mask = _mask(Batch.of(call, call.items.take(own))) if masked else None
        parts, sums = read.attend(chunk, queries.index_select(0, own), mask, inputs.scale)
        if call.sinks is not None:
            parts, sums = beside_sinks(parts, sums, call.sinks.index_select(0, own))
        out.index_copy_(0, own, parts)
        lse.index_copy_(0, own, sums)
    nothing = order[len(counts) - counts.count(0) :]
    out.index_fill_(0, nothing, 0.0)
    lse.index_copy_(0, nothing, _of_nothing(call, nothing))


def _of_nothing(call: Scattered, items: Tensor) -> Tensor:
    """lse of items without tiles, [items, height]."""
    if call.sinks is None:
        return torch.full((len(items), call.height), -INFINITY)
    return call.sinks.index_select(0, items)


class _Read:
    """Keys and values of all heads in tiles, and which of them items read, in order; what is read at once."""

    def __init__(self, keys: Tensor, values: Tensor, places: Tensor) -> None:
        self.keys, self.values, self.places = keys, values, places
        self.buffers = [x.new_empty(0, x.shape[1]) for x in (keys, values)]

    def attend(
        self, chunk: _Chunk, queries: Tensor, mask: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        """(out, lse) of the items of a chunk; values are as wide as keys."""
        assert fused_kernel is not None
        items = chunk.stop - chunk.start
        some = self.places[chunk.first : chunk.last]
        k, v = (
            self._gathered(i, x, some).view(items, 1, -1, queries.shape[-1])
            for i, x in enumerate((self.keys, self.values))
        )
        out, lse = fused_kernel(queries.unsqueeze(1), k, v, 0.0, False, attn_mask=mask, scale=scale)
        lse = lse.squeeze(1)
        if mask is not None:  # the kernel gives rows without keys 0
            lse = lse.masked_fill((mask.amax(-1) == -INFINITY).squeeze(1), -INFINITY)
        return out.squeeze(1), lse

    def _gathered(self, number: int, tiles: Tensor, places: Tensor) -> Tensor:
        size = places.shape[0]
        if self.buffers[number].shape[0] < size:
            self.buffers[number] = tiles.new_empty(size, tiles.shape[1])
        return torch.index_select(tiles, 0, places, out=self.buffers[number][:size])


def _places(call: Scattered, order: Tensor, counts: Tensor) -> Tensor:
    """Numbers, among the tiles of keys of all heads, of the tiles of all items in order."""
    inputs, items, lists = call.inputs, call.items.take(order), call.lists
    of_keys = items.h if call.shared else items.h // inputs.ratio
    heads = (items.b * inputs.k.shape[1] + of_keys) * call.tiles.grid[1]
    before = counts.cumsum(0) - counts
    steps = torch.arange(int(counts.sum())) + torch.repeat_interleave(lists.first[items.at] - before, counts)
    return lists.tile[steps] + torch.repeat_interleave(heads, counts)


def _chunks(counts: list[int], most: int) -> Iterator[_Chunk]:
    """Items of equally many tiles, at most so many tiles at once unless it is one item alone."""
    start = first = 0
    while start < len(counts) and counts[start]:
        count = counts[start]
        stop, end = start + 1, min(len(counts), start + max(1, most // count))
        while stop < end and counts[stop] == count:
            stop += 1
        last = first + count * (stop - start)
        yield _Chunk(start, stop, count, first, last)
        start, first = stop, last


def _mask(batch: Batch) -> Tensor | None:
    """Terms that are added to the scores of items [items, 1, height, keys]; None where that is 0."""
    hidden = batch.hidden()
    if hidden is None:
        return None
    shape = *hidden.shape[:1], batch.whole.ratio, batch.whole.tiles.tile[0], hidden.shape[-1]
    mask = torch.zeros(shape).masked_fill_(hidden, -INFINITY)
    return mask.flatten(1, 2).unsqueeze(1)
