"""Tile classes by interval arithmetic on squares of tiles, split until decided; then by evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fa4flex.codegen.analyze.bounds import bounds
from fa4flex.codegen.analyze.domain import Shape
from fa4flex.codegen.analyze.rules import Bounds
from fa4flex.codegen.analyze.tables import Tables
from fa4flex.codegen.analyze.tilemap import FULL, PARTIAL, Proof
from fa4flex.codegen.evaluate import evaluate
from fa4flex.codegen.expr import Expr, walk

SPLIT = 4
"""A square that is not decided becomes SPLIT x SPLIT smaller ones."""
FIRST_SQUARES = 4096
BOXES_AT_ONCE = 1 << 14
TILES_AT_ONCE = 1 << 12
ELEMENTS_AT_ONCE = 1 << 19
PARTS = 8
"""An undecided tile is bounded in up to PARTS x PARTS parts, of at least LEAST_PART indices a side."""
LEAST_PART = 8
ROUNDS = (1, 8, PARTS * PARTS)
"""Parts are evaluated in rounds, for most tiles that look uniform at first prove partial after one part."""


@dataclass(frozen=True)
class Boxes:
    """Index boxes, one per element: maps m, and first and last q and kv; int64 [n] each."""

    m: Tensor
    q_lo: Tensor
    q_hi: Tensor
    kv_lo: Tensor
    kv_hi: Tensor

    def __len__(self) -> int:
        return len(self.m)

    def select(self, which: Tensor) -> Boxes:
        return Boxes(*(x[which] for x in (self.m, self.q_lo, self.q_hi, self.kv_lo, self.kv_hi)))


@dataclass(frozen=True)
class Squares:
    """`classes`: uint8 [maps, q tiles, kv tiles]."""

    classes: Tensor
    by_bounds: int
    by_witness: int
    by_evaluation: int

    def proof(self, reason: str) -> Proof:
        reasons = (reason,) if reason else ()
        return Proof(0, self.by_bounds, self.by_witness, self.by_evaluation, reasons)


def classify_squares(
    mask: Expr,
    maps: tuple[int, int],
    shape: Shape,
    tile: tuple[int, int],
    tables: Tables,
    known: Mapping[Expr, Bounds],
    dtype: torch.dtype,
) -> Squares:
    """Classes of all tiles of a mask whose lengths and captured numbers are bound to constants."""
    return _Classifier(_Evaluator(mask, maps[1], shape, tables, known, dtype), maps, shape, tile).run()


class _Evaluator:
    """Evaluates the mask on boxes: what is certain, what is possible, what is."""

    def __init__(
        self,
        mask: Expr,
        map_heads: int,
        shape: Shape,
        tables: Tables,
        known: Mapping[Expr, Bounds],
        dtype: torch.dtype,
    ) -> None:
        self.mask, self.map_heads, self.shape = mask, map_heads, shape
        self.tables, self.known, self.dtype = tables, known, dtype
        # A search in rows that differ compares each needle with its whole row.
        searches = [n.value[0] for n in walk(mask) if n.op == "search" and len(n.args) > 1]
        row = max((tables.captured.operands[slot].shape[-1] for slot in searches), default=1)
        self.elements_at_once = max(ELEMENTS_AT_ONCE // row, 1)

    def certain(self, boxes: Boxes) -> tuple[Tensor, Tensor]:
        """Proofs that each box is full, and that it is empty; bool [n] each."""
        full, empty = torch.zeros(2, len(boxes), dtype=torch.bool)
        for part in torch.arange(len(boxes)).split(BOXES_AT_ONCE):
            some = boxes.select(part)
            b, h = some.m // self.map_heads, some.m % self.map_heads
            symbols = {**self.shape.ranges(), "b": Bounds(b, b), "h": Bounds(h, h)}
            symbols["q"] = Bounds(some.q_lo, some.q_hi)
            symbols["kv"] = Bounds(some.kv_lo, some.kv_hi)
            (result,) = bounds([self.mask], symbols, self.tables, self.known)
            full[part] = torch.as_tensor(result.lo)
            empty[part] = ~torch.as_tensor(result.hi)
        return full, empty

    def points(self, m: Tensor, q: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
        """True where the mask is true anywhere, and false anywhere, on q [n, i] x kv [n, j]; bool [n]
        each."""
        true, false = torch.zeros(2, len(m), dtype=torch.bool)
        for part in torch.arange(len(m)).split(max(self.elements_at_once // (q.shape[1] * kv.shape[1]), 1)):
            b, h = ((x[part])[:, None, None] for x in (m // self.map_heads, m % self.map_heads))
            symbols = {"b": b, "h": h, "q": q[part].unsqueeze(2), "kv": kv[part].unsqueeze(1)}
            (value,) = evaluate([self.mask], symbols, self.tables.captured, self.dtype)
            value = torch.as_tensor(value)
            true[part] = value.any() if value.ndim == 0 else value.flatten(1).any(1)
            false[part] = ~value.all() if value.ndim == 0 else ~value.flatten(1).all(1)
        return true, false

    def elements(self, boxes: Boxes) -> tuple[Tensor, Tensor]:
        """`points` on all points of boxes; where boxes differ in size, the last point is looked at again."""

        def span(lo: Tensor, hi: Tensor) -> Tensor:
            return (lo[:, None] + torch.arange(int((hi - lo).max()) + 1)).minimum(hi[:, None])

        return self.points(boxes.m, span(boxes.q_lo, boxes.q_hi), span(boxes.kv_lo, boxes.kv_hi))


class _Classifier:
    def __init__(self, mask: _Evaluator, maps: tuple[int, int], shape: Shape, tile: tuple[int, int]) -> None:
        self.mask, self.shape, self.tile = mask, shape, tile
        self.maps = maps[0] * maps[1]
        self.rows, self.columns = -(-shape.q_len // tile[0]), -(-shape.kv_len // tile[1])

    def run(self) -> Squares:
        side = 1
        while self.maps * -(-self.rows // side) * -(-self.columns // side) > FIRST_SQUARES:
            side *= SPLIT
        padded = [-(-n // side) * side for n in (self.rows, self.columns)]
        classes = torch.zeros(self.maps, *padded, dtype=torch.uint8)
        places = torch.cartesian_prod(
            torch.arange(self.maps), torch.arange(padded[0] // side), torch.arange(padded[1] // side)
        ).reshape(-1, 3)
        while side and len(places):
            full, empty = self.mask.certain(self._boxes(places, side))
            m, r, c = places[full].T
            classes.view(self.maps, padded[0] // side, side, padded[1] // side, side)[m, r, :, c, :] = FULL
            places = places[~(full | empty)]
            side //= SPLIT
            if side:
                places = self._split(places, side)
        total = self.maps * self.rows * self.columns
        witnessed = evaluated = 0
        for some in places.split(TILES_AT_ONCE) if len(places) else ():
            result = self._settle(classes, some)
            witnessed, evaluated = witnessed + result[0], evaluated + result[1]
        by_bounds = total - witnessed - evaluated
        return Squares(classes[:, : self.rows, : self.columns], by_bounds, witnessed, evaluated)

    def _boxes(self, places: Tensor, side: int) -> Boxes:
        m, r, c = places.T
        high, wide = self.tile[0] * side, self.tile[1] * side
        q_hi = ((r + 1) * high).clamp(max=self.shape.q_len) - 1
        kv_hi = ((c + 1) * wide).clamp(max=self.shape.kv_len) - 1
        return Boxes(m, r * high, q_hi, c * wide, kv_hi)

    def _split(self, places: Tensor, side: int) -> Tensor:
        step = torch.arange(SPLIT)
        parts = (places * torch.tensor([1, SPLIT, SPLIT]))[:, None] + torch.cartesian_prod(
            torch.zeros(1, dtype=torch.int64), step, step
        )
        parts = parts.reshape(-1, 3)
        return parts[(parts[:, 1] * side < self.rows) & (parts[:, 2] * side < self.columns)]

    def _settle(self, classes: Tensor, places: Tensor) -> tuple[int, int]:
        """Decide single tiles: how many by two witnesses, by evaluation; others by their parts."""
        tiles = self._boxes(places, 1)
        true, false = self.mask.points(
            tiles.m, _probes(tiles.q_lo, tiles.q_hi), _probes(tiles.kv_lo, tiles.kv_hi)
        )
        witnessed = int((true & false).sum())
        owner, parts = self._parts(tiles, (~(true & false)).nonzero().squeeze(1))
        evaluated = 0
        if len(parts):
            full, empty = self.mask.certain(parts)
            true[owner[full]] = True
            false[owner[empty]] = True
            left = ~(full | empty) & ~(true & false)[owner]
            owner, parts = owner[left], parts.select(left)
            evaluated = len(owner.unique())
        place = torch.arange(len(owner)) - torch.searchsorted(owner, owner)  # of a part among its tile's
        for first, stop in zip((0, *ROUNDS), ROUNDS):
            now = (place >= first) & (place < stop) & ~(true & false)[owner]
            if now.any():
                some_true, some_false = self.mask.elements(parts.select(now))
                true[owner[now][some_true]] = True
                false[owner[now][some_false]] = True
        result = torch.where(true & false, PARTIAL, torch.where(true, FULL, 0)).to(torch.uint8)
        classes[tuple(places.T)] = result
        return witnessed, evaluated

    def _parts(self, tiles: Boxes, which: Tensor) -> tuple[Tensor, Boxes]:
        """Each tile in `which`, cut into parts; and to which tile each part belongs."""
        sizes = [max(-(-side // PARTS), LEAST_PART) for side in self.tile]
        counts = [-(-side // size) for side, size in zip(self.tile, sizes, strict=True)]
        steps = torch.cartesian_prod(*(torch.arange(n) for n in counts)).reshape(-1, 2)
        owner = which.repeat_interleave(len(steps))
        q_lo = tiles.q_lo[owner] + (steps[:, 0] * sizes[0]).repeat(len(which))
        kv_lo = tiles.kv_lo[owner] + (steps[:, 1] * sizes[1]).repeat(len(which))
        q_hi = (q_lo + sizes[0] - 1).minimum(tiles.q_hi[owner])
        kv_hi = (kv_lo + sizes[1] - 1).minimum(tiles.kv_hi[owner])
        parts = Boxes(tiles.m[owner], q_lo, q_hi, kv_lo, kv_hi)
        exists = (q_lo <= q_hi) & (kv_lo <= kv_hi)
        return owner[exists], parts.select(exists)


def _probes(lo: Tensor, hi: Tensor) -> Tensor:
    """Indices at which to try a tile, int64 [n, 6]: corners, their neighbours (for strides), and inside."""
    inside = lo + (hi - lo) * 3 // 8
    return torch.stack((lo, (lo + 1).minimum(hi), inside, (lo + hi) // 2, (hi - 1).maximum(lo), hi), 1)
