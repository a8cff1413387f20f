"""Block tables for torch's BlockMask, from bounds of the mask over tiles: O(blocks) work, on the device.

A tile is full where bounds prove that all of its pairs take part, empty where none can, else partial. A
partial tile evaluates the mask, so one that bounds leave open is right and costs time alone. Nothing is as
large as the mask, tiles are decided TILES_AT_ONCE at a time, and the host reads no contents.

Source of the lists' meaning: torch.nn.attention.flex_attention.BlockMask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fa4flex.codegen.analyze.domain import Shape
from fa4flex.codegen.analyze.tile_bounds import TileBounds, tile_bounds
from fa4flex.codegen.emit.source import Source
from fa4flex.codegen.evaluate import Captured
from fa4flex.codegen.expr import Expr
from fa4flex.primitives.blocks import FULL, PARTIAL
from fa4flex.runtime.flex.mods import INDICES, Buffer, Function, Setting, function

BLOCK = 128, 128
"""Queries and keys of a block: what torch's kernels are tuned for, and a multiple of all of their tiles."""

TILES_AT_ONCE = 1 << 17
"""Tiles that are decided in one step: a temporary tensor takes a megabyte."""

_WIDE = frozenset((torch.int32, torch.int64, torch.uint32, torch.uint64))

Find = Callable[[Buffer], Tensor]
"""Function that gives the tensor of a buffer."""


class Blocks(NamedTuple):
    """int32 lists of blocks, in the order and with the names of BlockMask's fields: counts [B, H, rows] and
    indices [B, H, rows, columns], of partial and of full blocks, by queries and by keys. B and H are 1 where
    the mask does not depend on them."""

    kv_num_blocks: Tensor
    kv_indices: Tensor
    full_kv_num_blocks: Tensor
    full_kv_indices: Tensor
    q_num_blocks: Tensor
    q_indices: Tensor
    full_q_num_blocks: Tensor
    full_q_indices: Tensor


@dataclass(frozen=True, eq=False)
class Classifier:
    """Functions that tell the classes of a mask's tiles.

    bounds  expressions over tiles, and over the tokens of a tile
    decide  (b, h, first queries, first keys, buffers) -> whether tiles certainly are full, may hold a pair
    ranges  one function per range of `bounds`, of (b, h, queries, keys, buffers)
    """

    bounds: TileBounds
    decide: Function
    ranges: tuple[Function, ...]
    names: dict[str, Any]

    @property
    def functions(self) -> tuple[Function, ...]:
        """All functions."""
        return self.decide, *self.ranges

    def classes(self, shape: Shape, find: Find, device: torch.device) -> Tensor:
        """uint8 [B or 1, H or 1, query blocks, key blocks] of a mask over `shape`."""
        free = self.bounds.free
        maps = shape.batch if "b" in free else 1, shape.heads if "h" in free else 1
        counts = -(-shape.q_len // BLOCK[0]), -(-shape.kv_len // BLOCK[1])
        ranges = self._tables(shape, find, device)

        def found(buffer: Buffer) -> Tensor:
            at = buffer.which - self.bounds.first if buffer.kind == "tensor" else -1
            return ranges[at] if at >= 0 else find(buffer)

        buffers = [found(buffer) for buffer in self.decide.buffers]
        columns = torch.arange(counts[1], device=device)
        made = torch.empty(*maps, *counts, dtype=torch.uint8, device=device)
        rows = max(TILES_AT_ONCE // max(counts[1], 1), 1)
        index = torch.arange(max(*maps, 1), device=device)
        for b in range(maps[0]):
            for h in range(maps[1]):
                for start in range(0, counts[0], rows):
                    row = torch.arange(start, min(start + rows, counts[0]), device=device)[:, None]
                    place = index[b], index[h], row * BLOCK[0], columns * BLOCK[1]
                    certain, possible = self.names["decide"](*place, *buffers)
                    # Kernels do not look at the ends of sequences in full blocks.
                    whole = (row < shape.q_len // BLOCK[0]) & (columns < shape.kv_len // BLOCK[1])
                    some = possible.to(torch.uint8) + (possible & certain & whole).to(torch.uint8)
                    made[b, h, start : start + len(row)] = some
        return made

    def _tables(self, shape: Shape, find: Find, device: torch.device) -> list[Tensor]:
        """Least and greatest value of each range over each tile, int64 [B or 1, H or 1, tiles]."""
        made: list[Tensor] = []
        for i, argument in enumerate(self.ranges):
            side = 0 if self.bounds.side(i) == "q" else 1
            length = (shape.q_len, shape.kv_len)[side]
            tiles = -(-length // BLOCK[side])
            token = torch.arange(tiles * BLOCK[side], device=device).clamp(max=length - 1)
            sizes = (shape.batch, shape.heads)
            maps = tuple(n if varies else 1 for n, varies in zip(sizes, self.bounds.varies(i), strict=True))
            b, h = (
                torch.arange(n, device=device).view(shape_) for n, shape_ in zip(maps, ((-1, 1, 1), (-1, 1)))
            )
            value = self.names[argument.name](b, h, token, token, *(find(x) for x in argument.buffers))
            value = torch.as_tensor(value).expand(*maps, len(token)).unflatten(2, (tiles, BLOCK[side]))
            made += [value.amin(3), value.amax(3)]
        return made


def classifier(mask: Expr, operands: Sequence[Tensor], setting: Setting) -> Classifier:
    """The classifier of a mask that reads `operands`, tensors of which only dtypes are looked at."""
    large = frozenset(slot for slot, x in enumerate(operands) if x.dtype in _WIDE)
    bounds = tile_bounds(mask, BLOCK, len(operands), large=large)
    sizes = setting.sizes
    if sizes is not None:  # tables of ranges lie beside; their tiles are all there
        sizes = sizes + ((1 << 62,) * 3,) * (2 * len(bounds.ranges))
    wide = Setting(setting.floats, "torch.int64", sizes)
    roots = [(bounds.certain, "torch.bool"), (bounds.possible, "torch.bool")]
    decide = function("decide", INDICES, roots, wide)
    ranges = tuple(
        function(f"range_{i}", INDICES, [(x, "torch.int64")], wide) for i, x in enumerate(bounds.ranges)
    )
    names = Source("block mask", _text(decide, ranges)).namespace()
    return Classifier(bounds, decide, ranges, names)


def finder(shape: Shape, captured: Captured, device: torch.device) -> Find:
    """Tensors of buffers: captured ones, and numbers and lengths on a device."""
    values = {"q_len": shape.q_len, "kv_len": shape.kv_len, "num_heads": shape.heads}

    def find(buffer: Buffer) -> Tensor:
        if buffer.kind == "tensor":
            return captured.operands[buffer.which]
        number = values[buffer.which] if buffer.kind == "length" else captured.scalars[buffer.which]
        return torch.tensor(number, device=device)

    return find


def classifier_of(mask: Expr, captured: Captured) -> Classifier:
    """The classifier of a mask with what it captured, whose indices are clamped."""
    sizes = tuple(tuple(x.shape) for x in captured.operands)
    return classifier(mask, captured.operands, Setting(sizes=sizes))


def classes_of(mask: Expr, shape: Shape, captured: Captured) -> Tensor:
    """uint8 [B or 1, H or 1, query blocks, key blocks] of a mask, on the device of the captured tensors, or
    on the CPU."""
    device = captured.operands[0].device if captured.operands else torch.device("cpu")
    return classifier_of(mask, captured).classes(shape, finder(shape, captured, device), device)


def _text(decide: Function, ranges: Sequence[Function]) -> str:
    return "import torch\n\n" + "\n\n".join(x.text for x in (decide, *ranges))


def blocks_of(classes: Tensor) -> Blocks:
    """Lists of the partial and the full blocks of uint8 classes [B, H, rows, columns]."""
    by_keys = classes.transpose(2, 3)
    lists = [_listed(x == kind) for x in (classes, by_keys) for kind in (PARTIAL, FULL)]
    return Blocks(*(tensor for pair in lists for tensor in pair))


def _listed(present: Tensor) -> tuple[Tensor, Tensor]:
    """Counts, and the columns that are present in rising order, then those that are not; int32."""
    count = present.sum(3, dtype=torch.int32)
    here = present.cumsum(3, dtype=torch.int32)
    columns = torch.arange(present.shape[3], dtype=torch.int32, device=present.device)
    place = torch.where(present, here - 1, count[..., None] + columns - here)
    indices = torch.empty(present.shape, dtype=torch.int32, device=present.device)
    indices.scatter_(3, place.long(), columns.expand(present.shape))
    return count, indices
