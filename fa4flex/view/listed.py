"""Pairs that lists of keys and a mask select, beside those in the tiles that a kernel gathers for them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fa4flex.codegen.analyze.domain import Shape
from fa4flex.codegen.analyze.overflow import fitted
from fa4flex.codegen.build import Program
from fa4flex.codegen.evaluate import Value, evaluate
from fa4flex.primitives.block_parts import listed
from fa4flex.primitives.lists import LEAST_UNIT, Lists
from fa4flex.view import sparsity


@dataclass(frozen=True)
class Tiling:
    """Tiles of a kernel for listed keys: `rows` rows (queries and heads) x `keys` keys, with the queries of
    `united` rows of the lists, for `kv_heads` KV heads."""

    rows: int
    keys: int
    united: int
    kv_heads: int


@dataclass(frozen=True)
class Counted:
    """Selected pairs, and tiles of keys of all tiles of rows, over all heads and entries of the batch.

    share  share of the rows of the lists that were looked at, at even distances; the others are taken to be
           alike
    """

    selected: int
    tiles: int
    share: float


@dataclass(frozen=True)
class _Rows:
    """Some tiles of rows of the lists: `rows` int64 [tiles * united], of which some are past the end."""

    lists: Lists
    rows: Tensor
    united: int

    @property
    def exist(self) -> Tensor:
        return self.rows < self.lists.ids.shape[2]

    @property
    def classes(self) -> Tensor:
        """bool [B, H, rows, units]: what rows list."""
        lists, at = self.lists, self.rows.clamp(max=self.lists.ids.shape[2] - 1)
        counts = None if lists.counts is None else lists.counts[:, :, at].cpu()
        units = -(-lists.kv_len // lists.unit)
        return listed(lists.ids[:, :, at].cpu(), counts, units) & self.exist.unsqueeze(1)

    @property
    def queries(self) -> Tensor:
        """int64 [rows * queries]; those that do not exist are q_len or more."""
        assert self.lists.q_len is not None
        every = self.rows.unsqueeze(1) * self.lists.queries + torch.arange(self.lists.queries)
        return every.masked_fill(~self.exist.unsqueeze(1), self.lists.q_len).flatten()

    @property
    def beside(self) -> Tensor:
        """bool [rows * queries, kv_len]: keys beside the lists."""
        lists, queries = self.lists, self.queries.unsqueeze(1)
        assert lists.q_len is not None
        position, keys = queries + (lists.kv_len - lists.q_len), torch.arange(lists.kv_len)
        first = (torch.div(position + 1, lists.unit, rounding_mode="floor") + 1 - lists.tail) * lists.unit
        near = (keys > position - lists.window) | ((keys >= first) & bool(lists.tail))
        return ((near & (keys <= position)) | (keys < lists.sinks)) & (queries < lists.q_len)

    def selected(self, program: Program, shape: Shape) -> int:
        """Pairs that the lists and the mask select, over all heads and entries of the batch."""
        lists, mask, keys = self.lists, program.facts.mask, torch.arange(self.lists.kv_len)
        seen = self.classes.repeat_interleave(lists.queries, 2)
        seen = seen[..., torch.div(keys, lists.unit, rounding_mode="floor")] | self.beside
        seen = seen & (self.queries < shape.q_len).unsqueeze(1)
        entries, heads = (
            size if name in mask.free else own
            for name, size, own in zip("bh", (shape.batch, shape.heads), seen.shape, strict=False)
        )
        seen = seen.expand(entries, -1, -1, -1).repeat_interleave(heads // seen.shape[1], 1)
        symbols: dict[str, Value] = {
            "b": torch.arange(entries).view(-1, 1, 1, 1), "h": torch.arange(heads).view(-1, 1, 1),
            "q": self.queries.clamp(max=shape.q_len - 1).view(-1, 1), "kv": keys,
            "q_len": shape.q_len, "kv_len": shape.kv_len, "num_heads": shape.heads,
        }  # fmt: skip
        captured = program.captured().signed()
        (inside,) = evaluate(fitted([mask], shape, captured), symbols, captured)
        count = int((seen & torch.as_tensor(inside)).sum())
        return count * (shape.batch // entries) * (shape.heads // heads)

    def tiles(self, keys: int) -> int:
        """Tiles of so many keys, of all tiles of rows, heads of the lists and entries of their batch."""
        units = self.classes.unflatten(2, (-1, self.united)).any(3).sum(-1)
        listed_tiles = torch.div(units * self.lists.unit + keys - 1, keys, rounding_mode="floor").sum()
        near = self.beside.unflatten(0, (-1, self.united * self.lists.queries)).any(1).sum(-1)
        near_tiles = torch.div(near + keys - 1, keys, rounding_mode="floor").sum()
        return int(listed_tiles) + int(near_tiles) * units.shape[0] * units.shape[1]


def counted(program: Program, shape: Shape, lists: Lists, tiling: Tiling) -> Counted:
    """Selected pairs, and tiles of keys; of large problems, by some tiles of rows."""
    assert lists.q_len is not None
    batch, own, rows, _ = lists.ids.shape
    tiles = -(-rows // tiling.united)
    free = program.facts.mask.free
    planes = (shape.batch if "b" in free else batch) * (shape.heads if "h" in free else own)
    step = max(-(-planes * shape.q_len * shape.kv_len // sparsity.MOST_EVALUATED), 1)
    chosen = torch.arange(min(step, tiles) // 2, tiles, step)
    some = _Rows(
        lists, (chosen.unsqueeze(1) * tiling.united + torch.arange(tiling.united)).flatten(), tiling.united
    )
    share = len(chosen) / tiles
    groups = max(tiling.kv_heads, own)
    of_tile = max(shape.heads // groups, 1) * min(lists.queries, lists.q_len) * tiling.united
    repeats = -(-of_tile // tiling.rows) * (groups // own) * (shape.batch // batch)
    found = some.selected(program, shape), some.tiles(tiling.keys) * repeats
    return Counted(round(found[0] / share), round(found[1] / share), share)


def without_kernel(lists: Lists | bool) -> str:
    """Treatment of lists on a GPU where no kernel gathers what they list, in words."""
    if lists is True:
        kept = f"units of {LEAST_UNIT} keys or more are a map of blocks, as blocks=lists.map() is"
        return f"{kept}; shorter ones are refused"
    assert isinstance(lists, Lists)
    how = "how it runs: explain() of compile(..., blocks=lists.map())"
    if lists.unit >= LEAST_UNIT:
        return f"the lists are a map of blocks, as blocks=lists.map() is; {how}"
    return (
        f"lists of units of {lists.unit} keys are refused; blocks=lists.map() is a table of all rows and "
        f"units, by which tiles are masked; {how}"
    )
