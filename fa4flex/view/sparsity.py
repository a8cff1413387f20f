"""Pairs that a block map and its mask select, beside those in the tiles that are computed for them."""

from __future__ import annotations

import torch

from fa4flex.codegen.analyze.overflow import fitted
from fa4flex.codegen.analyze.tiles import Shape, TileMap
from fa4flex.codegen.build import Program
from fa4flex.codegen.evaluate import Value, evaluate
from fa4flex.primitives.base import Mod
from fa4flex.primitives.block_lists import EMPTY
from fa4flex.primitives.blocks import BlockedMask
from fa4flex.primitives.lists import ListedMask
from fa4flex.variant import Variant

MOST_EVALUATED = 1 << 24
"""Pairs that are evaluated one by one to be counted; of more, the count is between two."""


def reads_a_map(variant: Variant) -> bool:
    """True if a block map, as such or within the mask, decides which pairs are allowed."""

    def within(mod: Mod | None) -> bool:
        return mod is not None and (isinstance(mod, (BlockedMask, ListedMask)) or any(map(within, mod.parts)))

    return variant.blocks is not None or within(variant.mask)


def selected(program: Program, shape: Shape, tiles: TileMap) -> tuple[int, int]:
    """Fewest and most pairs of all planes of the tiles that are selected; equal where they are counted."""
    blocks, planes = program.variant.blocks, tiles.map_batch * tiles.map_heads
    if blocks is not None and program.variant.mask is None and type(blocks.mask()) is BlockedMask:
        listed = (blocks.classes != EMPTY).sum((0, 1)).double()
        extents = []
        for size, length, count in zip(blocks.block_size, (shape.q_len, shape.kv_len), listed.shape):
            ends = torch.arange(1, count + 1) * size
            extents.append((ends.clamp(max=length) - ends + size).double())
        of_planes = blocks.classes.shape[0] * blocks.classes.shape[1]
        count = round(float(extents[0] @ listed.cpu() @ extents[1])) * planes // of_planes
        return count, count
    if planes * shape.q_len * shape.kv_len <= MOST_EVALUATED:
        count = sum(
            _plane(program, shape, b, h) for b in range(tiles.map_batch) for h in range(tiles.map_heads)
        )
        return count, count
    _, partial, full = tiles.counts()
    area = tiles.tile[0] * tiles.tile[1]
    return max(full * area - planes * _edge(tiles), 0), (partial + full) * area


def _edge(tiles: TileMap) -> int:
    """Pairs of a plane's tiles that lie past the ends."""
    (rows, columns), shape = tiles.grid, tiles.shape
    return rows * tiles.tile[0] * columns * tiles.tile[1] - shape.q_len * shape.kv_len


def _plane(program: Program, shape: Shape, b: int, h: int) -> int:
    symbols: dict[str, Value] = {
        "b": b, "h": h, "q": torch.arange(shape.q_len).view(-1, 1), "kv": torch.arange(shape.kv_len),
        "q_len": shape.q_len, "kv_len": shape.kv_len, "num_heads": shape.heads,
    }  # fmt: skip
    captured = program.captured().signed()
    (allowed,) = evaluate(fitted([program.facts.mask], shape, captured), symbols, captured)
    return int(torch.broadcast_to(torch.as_tensor(allowed), (shape.q_len, shape.kv_len)).sum())


def in_words(program: Program, shape: Shape, tiles: TileMap) -> str:
    """Selected pairs, and their share of the pairs in tiles that are computed."""
    least, most = selected(program, shape, tiles)
    _, partial, full = tiles.counts()
    sharing = (tiles.map_batch, shape.batch, "entry of the batch"), (tiles.map_heads, shape.heads, "head")
    alike = " and ".join(noun for planes, size, noun in sharing if planes < size)
    each = f" in each {alike}" * bool(alike)
    computed = (partial + full) * tiles.tile[0] * tiles.tile[1]
    whole = tiles.map_batch * tiles.map_heads * shape.q_len * shape.kv_len
    rows, columns = tiles.tile
    if least != most:
        share = f"{percent(least, whole)} to {percent(most, whole)}"
        return (
            f"{least} to {most} pairs selected{each}, {share} of all; "
            f"tiles of {rows} x {columns} compute {computed}"
        )
    return (
        f"{most} pairs selected{each}, {percent(most, whole)} of all; tiles of {rows} x {columns} compute "
        f"{computed}, of which {percent(most, computed)} are selected"
    )


def percent(part: int, whole: int) -> str:
    return f"{100 * part / max(whole, 1):.1f} %"
