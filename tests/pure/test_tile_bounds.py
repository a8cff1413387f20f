"""Bounds of masks over tiles, against every element: what they say of a tile is true of all of its pairs."""

from __future__ import annotations

import random

import pytest
import torch
from mask_zoo import KV, Q, both, dense, op, tile_classes, zoo
from torch import Tensor

from fa4flex.codegen.analyze.tile_bounds import TileBounds, tile_bounds
from fa4flex.codegen.analyze.tiles import Shape
from fa4flex.codegen.evaluate import Captured, evaluate
from fa4flex.codegen.expr import Expr, load, scalar, sym

NAMES = [case.name for case in zoo()]
SHAPES = [Shape(2, 3, 256, 256), Shape(2, 3, 201, 77), Shape(1, 1, 1, 130)]


def with_ranges(found: TileBounds, shape: Shape, captured: Captured) -> Captured:
    """The captured tensors, and the least and greatest value of every range by tile."""
    tables: list[Tensor] = []
    for i, x in enumerate(found.ranges):
        side = found.side(i)
        size, length = (found.tile[0], shape.q_len) if side == "q" else (found.tile[1], shape.kv_len)
        symbols = {
            "b": torch.arange(shape.batch if "b" in x.free else 1)[:, None, None],
            "h": torch.arange(shape.heads if "h" in x.free else 1)[:, None],
            side: torch.arange(length),
            "q_len": shape.q_len,
            "kv_len": shape.kv_len,
            "num_heads": shape.heads,
        }
        (values,) = evaluate([x], symbols, captured)
        sizes = [n if name in x.free else 1 for name, n in (("b", shape.batch), ("h", shape.heads))]
        tiles = torch.as_tensor(values).expand(*sizes, length).split(size, -1)
        tables += [torch.stack([fold(tile, -1) for tile in tiles], -1) for fold in (torch.amin, torch.amax)]
    return Captured((*captured.operands, *tables), captured.scalars)


def bounded(found: TileBounds, shape: Shape, captured: Captured) -> tuple[Tensor, Tensor]:
    """Bounds of each tile: true if all pairs, and if some pair may take part, bool [B, H, q tiles, kv
    tiles]."""
    grid = [-(-n // size) for n, size in zip((shape.q_len, shape.kv_len), found.tile)]
    symbols = {
        "b": torch.arange(shape.batch)[:, None, None, None],
        "h": torch.arange(shape.heads)[:, None, None],
        "q": torch.arange(grid[0])[:, None] * found.tile[0],
        "kv": torch.arange(grid[1]) * found.tile[1],
        "q_len": shape.q_len,
        "kv_len": shape.kv_len,
        "num_heads": shape.heads,
    }
    read = with_ranges(found, shape, captured)
    both_ends = evaluate([found.certain, found.possible], symbols, read)
    certain, possible = (
        torch.as_tensor(x, dtype=torch.bool).expand(shape.batch, shape.heads, *grid) for x in both_ends
    )
    return certain, possible


def undecided(mask: Expr, shape: Shape, captured: Captured, tile: tuple[int, int]) -> tuple[int, int]:
    """Tiles that bounds leave open, and tiles that are truly partial; what they decide must be true."""
    found = tile_bounds(mask, tile, len(captured.operands))
    certain, possible = bounded(found, shape, captured)
    classes = tile_classes(dense(mask, shape, captured), tile)
    assert not (certain & (classes != 2)).any(), "a tile that is not full is called full"
    assert not (~possible & (classes != 0)).any(), "a tile that is not empty is called empty"
    return int((possible & ~certain).sum()), int((classes == 1).sum())


@pytest.mark.parametrize("name", NAMES)
def test_what_bounds_say_is_true(name: str) -> None:
    case = zoo()[NAMES.index(name)]
    for shape in SHAPES:
        tile = random.choice([(64, 64), (128, 128), (128, 64), (80, 128), (16, 8)])
        undecided(case.mask, shape, case.captured, tile)


def documents(shape: Shape, unsorted: bool = False) -> Tensor:
    ids = torch.randint(0, 5, (shape.batch, max(shape.q_len, shape.kv_len)))
    return ids if unsorted else ids.sort(-1).values


@pytest.mark.parametrize("name", ["documents", "blocks", "blocks of 256", "padding", "clips"])
def test_masks_of_captured_tensors_are_decided(name: str) -> None:
    """For these, tiles left open are truly partial."""
    shape, tile, b, h = Shape(2, 3, 512, 512), (128, 128), sym("b"), sym("h")
    causal = op("le", KV, Q)
    if name == "documents":
        ids = documents(shape)
        mask = both(op("eq", load(0, (b, Q), "int"), load(0, (b, KV), "int")), causal)
    elif name == "padding":
        ids = torch.rand(2, 512) < 0.99
        mask = both(load(0, (b, KV), "bool"), causal)
    elif name == "clips":
        ids = torch.randint(0, 512, (2,))
        mask = both(op("lt", KV, load(0, (b,), "int")), causal)
    else:
        size = 256 if name.endswith("256") else 128
        ids = torch.randint(0, 3, (2, 3, 512 // size, 512 // size), dtype=torch.uint8)
        at = b, h, op("floordiv", Q, size), op("floordiv", KV, size)
        block = load(0, at, "int")
        mask = op("or_", op("eq", block, 2), both(op("eq", block, 1), op("ne", block, 1)))
    captured = Captured((ids,), ())
    open_tiles, partial = undecided(mask, shape, captured, tile)
    if name.startswith("blocks"):
        assert partial == 0
    else:
        assert open_tiles == partial


def test_blocks_smaller_than_tiles_are_read_one_by_one() -> None:
    shape = Shape(1, 1, 256, 256)
    blocks = torch.randint(0, 2, (4, 4)).bool()
    mask = load(0, (op("floordiv", Q, 64), op("floordiv", KV, 64)), "bool")
    open_tiles, partial = undecided(mask, shape, Captured((blocks,), ()), (128, 128))
    assert open_tiles == partial


@pytest.mark.parametrize("size", [32, 64, 100, 128, 300])
def test_blocks_of_any_size_are_decided(size: int) -> None:
    """Their size is a captured number. Bounds leave open what is truly partial, and what has many blocks."""
    shape, by = Shape(1, 2, 512, 600), scalar(0, "int")
    blocks = torch.randint(0, 3, (2, 600 // size + 1, 600 // size + 1), dtype=torch.uint8)
    place = sym("h"), op("floordiv", Q, by), op("floordiv", KV, by)
    mask = op("ne", load(0, place, "int"), 0)
    open_tiles, partial = undecided(mask, shape, Captured((blocks,), (size,)), (128, 128))
    assert open_tiles == partial


def test_what_no_rule_bounds_is_left_open() -> None:
    table = torch.randint(0, 2, (512,)).bool()
    mask = load(0, (op("add", op("sub", Q, KV), 256),), "bool")
    found = tile_bounds(mask, (128, 128), 1)
    assert (found.certain.value, found.possible.value, found.ranges) == (False, True, ())
    assert undecided(mask, Shape(1, 1, 256, 256), Captured((table,), ()), (128, 128))[0] == 4
