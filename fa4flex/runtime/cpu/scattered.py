"""Attention over scattered tiles: those of a block map, gathered and multiplied many rows of tiles at a time.

A block map of small blocks leaves few keys to each row of tiles, others to each row and head. Walking over
them makes one small product after the other, and in tiles larger than the blocks nearly all are asked for.
Here an item is a row of tiles of the map's own size: its tiles of keys are copied side by side, and items of
about equally many tiles are one batch of products.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fa4flex.codegen.analyze.blocks import block_size
from fa4flex.codegen.analyze.facts import SCORE, Facts
from fa4flex.codegen.analyze.tiles import Shape, TileMap, tile_map
from fa4flex.codegen.evaluate import Captured, DividedByZero, PastTheEnd, Value, evaluate
from fa4flex.codegen.expr import Expr
from fa4flex.primitives.schedule import Contents
from fa4flex.runtime.cpu.softmax import finite, with_sinks
from fa4flex.runtime.cpu.tiles import SCORES, Inputs, exponential

LARGEST, DENSEST = 64, 0.5
"""Larger blocks, and denser maps, are walked over: there is little to gain."""

FEW, ALIKE = 8, 0.75
"""Batches of fewer items take shorter ones too, which are padded, but none shorter than this share."""


@dataclass(frozen=True)
class Lists:
    """Tiles of keys of each row of tiles, one row after another: columns first[i] .. first[i] + count[i] of
    `tile` are those of row i of the map. partial: whether the mask is needed there."""

    tile: Tensor
    partial: Tensor
    first: Tensor
    count: Tensor

    @staticmethod
    def of(tiles: TileMap) -> Lists:
        length = (tiles.stop - tiles.start).long()
        before = length.cumsum(0) - length
        tile = torch.repeat_interleave(tiles.start.long() - before, length) + torch.arange(int(length.sum()))
        runs = tiles.row_ptr.long()
        ends = torch.cat([before, length.sum().view(1)])
        return Lists(tile, torch.repeat_interleave(~tiles.full, length), ends[runs[:-1]], ends[runs].diff())


@dataclass(frozen=True)
class Items:
    """Some rows of tiles of equal height: row `row` of batch entry `b` and head `h`, whose list is `at`. The
    head is one of keys, with all its query heads, where the map has one for all; else a query head."""

    b: Tensor
    h: Tensor
    row: Tensor
    at: Tensor

    def take(self, which: Tensor | slice) -> Items:
        return Items(self.b[which], self.h[which], self.row[which], self.at[which])

    def __len__(self) -> int:
        return len(self.b)


class Scattered:
    """One attention call over a map of small tiles."""

    def __init__(self, facts: Facts, inputs: Inputs, tiles: TileMap) -> None:
        self.facts, self.inputs, self.tiles = facts, inputs, tiles
        self.lists = Lists.of(tiles)
        self.plain = facts.score is SCORE
        self.shared = tiles.map_heads == 1
        self.ratio = inputs.ratio if self.shared else 1
        self.height = self.ratio * tiles.tile[0]

    @cached_property
    def items(self) -> Items:
        """All items, in order of batch, head and row."""
        batch, heads = self.inputs.q.shape[0], self.inputs.q.shape[1] // self.ratio
        rows = self.tiles.grid[0]
        b, h, row = (
            x.flatten() for x in torch.meshgrid(*map(torch.arange, (batch, heads, rows)), indexing="ij")
        )
        of_batch = b if self.tiles.map_batch > 1 else torch.zeros_like(b)
        of_head = torch.zeros_like(h) if self.shared else h
        return Items(b, h, row, (of_batch * self.tiles.map_heads + of_head) * rows + row)

    @cached_property
    def sinks(self) -> Tensor | None:
        """Logits of the sinks, [items, height]."""
        if self.inputs.sinks is None:
            return None
        of_heads = self.inputs.sinks.to(self.inputs.precision).view(-1, self.ratio)[self.items.h]
        return of_heads.repeat_interleave(self.tiles.tile[0], 1)

    def batches(self) -> Iterator[tuple[Tensor, Items]]:
        """(numbers among all items, items) of batches: those with most tiles first."""
        count = self.lists.count[self.items.at]
        order = count.argsort(descending=True, stable=True)
        counts = count[order].tolist()
        keys, width = self.tiles.tile[1], max(self.inputs.q.shape[3], self.inputs.v.shape[3], self.height)
        start = 0
        while start < len(counts) and counts[start]:
            most = min(len(counts), start + max(1, SCORES // (width * keys * counts[start])))
            stop = start + 1
            while stop < most and _joins(counts[start], counts[stop], stop - start):
                stop += 1
            yield order[start:stop], self.items.take(order[start:stop])
            start = stop

    # --- tensors in tiles -----------------------------------------------------------------------------------

    def of_rows(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """[B, H, Sq, ...] as [items, height, ...], with zeros past the end."""
        rows, tall = self.tiles.grid[0], self.tiles.tile[0]
        batch, heads, length = x.shape[:3]
        whole = x.new_zeros(batch, heads, rows * tall, *x.shape[3:], dtype=dtype)
        whole[:, :, :length] = x
        parts = whole.view(batch, heads // self.ratio, self.ratio, rows, tall, *x.shape[3:]).transpose(2, 3)
        return parts.reshape(len(self.items), self.height, *x.shape[3:])

    def to_rows(self, parts: Tensor, into: Tensor) -> None:
        """The reverse of `of_rows`."""
        rows, tall = self.tiles.grid[0], self.tiles.tile[0]
        batch, heads, length = into.shape[:3]
        result = parts.view(batch, heads // self.ratio, rows, self.ratio, tall, *into.shape[3:]).transpose(
            2, 3
        )
        into.copy_(result.reshape(batch, heads, rows * tall, *into.shape[3:])[:, :, :length])

    def of_keys(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """[B, Hkv, Skv, D] as [tiles of all heads, keys * D], with zeros past the end."""
        columns, keys = self.tiles.grid[1], self.tiles.tile[1]
        batch, heads, length, width = x.shape
        if length < columns * keys or x.dtype != dtype:
            whole = x.new_zeros(batch, heads, columns * keys, width, dtype=dtype)
            whole[:, :, :length] = x
            x = whole
        return x.reshape(batch * heads * columns, keys * width)


def _joins(longest: int, count: int, items: int) -> bool:
    """True if an item of so many tiles joins a batch of so many items."""
    return count == longest or (items < FEW and count >= ALIKE * longest)


@dataclass(frozen=True)
class Batch:
    """Items with their tiles of keys, padded to as many as the longest has: `tile` [items, tiles], of which
    `there` says what is no padding."""

    whole: Scattered
    items: Items
    tile: Tensor
    there: Tensor
    masked: bool

    @staticmethod
    def of(whole: Scattered, items: Items) -> Batch:
        lists = whole.lists
        first, count = lists.first[items.at, None], lists.count[items.at, None]
        number = torch.arange(int(count.max()))
        there = number < count
        place = torch.where(there, first + number, first)
        masked = bool((lists.partial[place] & there).any())
        return Batch(whole, items, lists.tile[place], there, masked)

    @cached_property
    def places(self) -> Tensor:
        """Numbers of the tiles of keys among those of all heads."""
        inputs, columns = self.whole.inputs, self.whole.tiles.grid[1]
        of_keys = self.items.h if self.whole.shared else self.items.h // inputs.ratio
        head = self.items.b * inputs.k.shape[1] + of_keys
        return (head[:, None] * columns + self.tile).flatten()

    def gathered(self, tiles: Tensor) -> Tensor:
        """Keys of the items [items, tiles * keys, D], from tiles of all heads."""
        keys = self.whole.tiles.tile[1]
        return tiles.index_select(0, self.places).view(len(self.items), self.tile.shape[1] * keys, -1)

    @cached_property
    def symbols(self) -> dict[str, Value]:
        """Indices of pairs [items, query heads, queries, keys]; those past the ends repeat the last."""
        whole, items = self.whole, self.items
        inputs, (tall, keys) = whole.inputs, whole.tiles.tile
        q_len, kv_len = inputs.q.shape[2], inputs.k.shape[2]
        rows = items.row[:, None] * tall + torch.arange(tall)
        columns = (self.tile[..., None] * keys + torch.arange(keys)).flatten(1)
        heads = items.h[:, None] * whole.ratio + torch.arange(whole.ratio)
        return {
            "b": items.b.view(-1, 1, 1, 1) if inputs.sequence is None else inputs.sequence,
            "h": heads[:, :, None, None],
            "q": rows.clamp(max=q_len - 1)[:, None, :, None],
            "kv": columns.clamp(max=kv_len - 1)[:, None, None],
            "q_len": q_len,
            "kv_len": kv_len,
            "num_heads": inputs.q.shape[1],
        }

    def hidden(self) -> Tensor | None:
        """True at pairs of a tile [items, query heads, queries, keys] that do not count; None if all do."""
        whole = self.whole
        columns, keys = whole.tiles.grid[1], whole.tiles.tile[1]
        kv_len = whole.inputs.k.shape[2]
        result: Tensor | None = None
        if not bool(self.there.all()) or (kv_len < columns * keys and bool((self.tile == columns - 1).any())):
            index = (self.tile[..., None] * keys + torch.arange(keys)).flatten(1)
            padding = (~self.there)[..., None].expand(-1, -1, keys).flatten(1)
            result = (padding | (index >= kv_len))[:, None, None]
        if self.masked:
            (allowed,) = self.evaluate([whole.facts.mask])
            banned = ~torch.as_tensor(allowed)
            result = banned if result is None else result | banned
        return result

    def evaluate(self, roots: list[Expr], **extra: Value) -> list[Value]:
        inputs = self.whole.inputs
        return evaluate(roots, {**self.symbols, **extra}, inputs.captured, inputs.precision)


def scattered(facts: Facts, inputs: Inputs) -> Scattered | None:
    """The call over the tiles of a block map, None where there is none, or walking does as well."""
    if inputs.tile is not None or facts.kept is not None or inputs.entropy:
        return None
    tiles = scattered_tiles(facts, inputs.shape, inputs.captured, inputs.precision, inputs.contents)
    return None if tiles is None else Scattered(facts, inputs, tiles)


def scattered_tiles(
    facts: Facts, shape: Shape, captured: Captured, precision: torch.dtype, contents: Contents
) -> TileMap | None:
    """Tiles of a block map that is gathered; None where the mask has none, or walking does as well."""
    size = block_size(facts.mask, captured.scalars)
    if size is None or not all(0 < x <= LARGEST for x in size):
        return None
    with torch.device("cpu"):
        tiles = tile_map(facts.mask, facts.keys, shape, captured, size, precision, contents)
    return tiles if tiles.density <= DENSEST else None


def attend(call: Scattered) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """(out, lse, max_scores, total) of all items, [items, height, Dv] and [items, height]; None where a mod
    cannot be evaluated at some pair: the mask may hide it, and walking knows that."""
    try:
        return _attend(call)
    except (PastTheEnd, DividedByZero):
        return None


def _attend(call: Scattered) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    inputs, dtype = call.inputs, call.inputs.precision
    queries = call.of_rows(inputs.q, dtype).mul_(inputs.scale)
    keys, values = (call.of_keys(x, dtype) for x in (inputs.k, inputs.v))
    out = queries.new_zeros(len(call.items), call.height, inputs.v.shape[3])
    largest = queries.new_full(out.shape[:2], -torch.inf)
    total = torch.zeros_like(largest)
    for numbers, items in call.batches():
        batch = Batch.of(call, items)
        scores = torch.bmm(queries[numbers], batch.gathered(keys).mT)
        hidden = _modify(call, batch, scores)
        maximum = scores.amax(-1, keepdim=True)
        scores.sub_(finite(maximum))
        weights = exponential(scores) if hidden or not call.plain else scores.exp_()
        sums = weights.sum(-1, keepdim=True)
        result = torch.bmm(weights, batch.gathered(values))
        out[numbers] = result.div_(sums.masked_fill(sums == 0, 1.0))
        largest[numbers], total[numbers] = maximum.squeeze(-1), sums.squeeze(-1)
    return _with_sinks(call, out, largest, total)


def _modify(call: Scattered, batch: Batch, scores: Tensor) -> bool:
    """Apply score mod and mask to scores [items, height, keys]; True if some are hidden."""
    pairs = scores.unflatten(1, (call.ratio, -1))
    if not call.plain:
        (modified,) = batch.evaluate([call.facts.score], score=pairs.clone())
        pairs.copy_(modified) if isinstance(modified, Tensor) else pairs.fill_(modified)
    hidden = batch.hidden()
    if hidden is not None:
        pairs.masked_fill_(hidden, -torch.inf)
    return hidden is not None


def _with_sinks(
    call: Scattered, out: Tensor, largest: Tensor, total: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    shift, sinks = finite(largest), call.sinks
    if sinks is not None:
        own = total
        shift, rescale, total = with_sinks(largest, own, sinks)
        out.mul_((own * rescale / total.masked_fill(total == 0, 1.0)).unsqueeze(-1))
    return out, total.log().add_(shift), largest, total
