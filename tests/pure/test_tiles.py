"""Single properties of tile maps, each small enough to know on paper."""

from __future__ import annotations

import random

import pytest
import torch
from mask_zoo import KV, B, H, Q, both, check_classes, dense, near, op, tile_classes
from torch import Tensor

from fa4flex.codegen.analyze import squares
from fa4flex.codegen.analyze.intervals import key_intervals
from fa4flex.codegen.analyze.tiles import Proof, Shape, tile_map
from fa4flex.codegen.evaluate import Captured
from fa4flex.codegen.expr import const, load, scalar, search


def test_empty_problems() -> None:
    for q_len, kv_len in ((0, 0), (0, 300), (300, 0)):
        for tiles in (
            tile_map(op("ge", Q, KV), k, Shape(1, 2, q_len, kv_len), Captured(), (64, 64))
            for k in (None, key_intervals(op("ge", Q, KV)))
        ):
            assert tiles.counts() == (0, 0, 0)
            assert tiles.transposed().counts() == (0, 0, 0)
            assert tiles.classes().shape == (1, 1, -(-q_len // 64), -(-kv_len // 64))


def test_everything_is_one_full_run() -> None:
    tiles = tile_map(const(True), key_intervals(const(True)), Shape(4, 8, 300, 500), Captured(), (128, 128))
    assert (tiles.map_batch, tiles.map_heads) == (1, 1)
    assert [tiles.runs(3, 7, r) for r in range(3)] == [[(0, 4, True)]] * 3


def test_maps_only_where_the_mask_depends_on_them() -> None:
    per_head = near(Q, KV, load(0, (op("sub", 2, H),), "int"))
    tiles = tile_map(
        per_head,
        key_intervals(per_head),
        Shape(4, 3, 100, 100),
        Captured((torch.tensor([1, 50, 100]),)),
        (32, 32),
    )
    assert (tiles.map_batch, tiles.map_heads) == (1, 3)


@pytest.mark.parametrize("with_keys", [True, False])
def test_causal_long_is_runs_not_tiles(with_keys: bool) -> None:
    """Row r of causal attention is one full run and one partial tile, by arithmetic on paper."""
    n, tile = 131_072, 128
    mask = op("ge", Q, KV)
    tiles = tile_map(
        mask, key_intervals(mask) if with_keys else None, Shape(1, 1, n, n), Captured(), (tile, tile)
    )
    for r in (0, 1, 517, n // tile - 1):
        assert tiles.runs(0, 0, r) == [(0, r, True)] * (r > 0) + [(r, r + 1, False)]
    rows = n // tile
    assert tiles.counts() == (rows * (rows - 1) // 2, rows, rows * (rows - 1) // 2)
    assert len(tiles.start) == 2 * rows - 1


def test_intervals_that_do_not_hold_are_not_used() -> None:
    unsorted = torch.tensor([2, 1, 0, 1] * 16)
    same = op("eq", load(0, (Q,), "int"), load(0, (KV,), "int"))
    (tiles, other) = check_classes(same, Shape(1, 1, 64, 64), Captured((unsorted,)), (16, 16))
    assert tiles.proof.by_intervals == other.proof.by_intervals == 0
    assert any("not sorted" in reason for t in (tiles, other) for reason in t.proof.reasons)
    chunked = op("eq", op("floordiv", Q, scalar(0, "int")), op("floordiv", KV, scalar(0, "int")))
    for tiles in check_classes(chunked, Shape(1, 1, 64, 64), Captured((), (-5,)), (16, 16)):
        assert tiles.proof.by_intervals == 0


def test_bounds_prove_without_looking_where_boxes_suffice() -> None:
    """Linear masks and sorted documents need no evaluation at all: only tiles on a border are looked at."""
    n = 2048
    ids = torch.arange(n) // 300
    masks = [op("ge", Q, KV), near(Q, KV, 300), op("eq", load(0, (Q,), "int"), load(0, (KV,), "int"))]
    for mask in [*masks, both(*masks)]:
        proof = tile_map(mask, None, Shape(1, 1, n, n), Captured((ids,)), (128, 128)).proof
        expected = tile_classes(dense(mask, Shape(1, 1, n, n), Captured((ids,))), (128, 128))
        assert proof.by_evaluation <= 2
        assert proof.by_bounds >= int((expected != 1).sum())


def test_looking_alone_settles(monkeypatch: pytest.MonkeyPatch) -> None:
    """With nothing but evaluation the classes stay right: bounds are for speed, looking settles."""
    monkeypatch.setattr(squares._Evaluator, "certain", lambda self, boxes: nothing_certain(boxes))
    mask = both(op("ge", Q, KV), op("ne", op("mod", KV, 7), 2))
    tiles = tile_map(mask, None, Shape(1, 1, 200, 210), Captured(), (32, 48))
    assert torch.equal(
        tiles.classes(), tile_classes(dense(mask, Shape(1, 1, 200, 210), Captured()), (32, 48))
    )
    assert tiles.proof.by_bounds == 0


def test_search_with_a_row_per_batch() -> None:
    starts = torch.tensor([[0, 20, 30, 90], [0, 50, 60, 70]])
    same = op("eq", *(search(0, "right", x, (B,)) for x in (Q, KV)))
    check_classes(same, Shape(2, 1, 100, 100), Captured((starts,)), (16, 16))


def test_integers_beyond_int64_do_not_wrap() -> None:
    """q * 2**60 is never negative, though in int64 it would be from q = 8 on."""
    far = op("mul", Q, 2**60)
    for mask, counts in ((op("lt", far, 0), (16, 0, 0)), (op("ge", op("mul", far, far), 0), (0, 0, 16))):
        assert tile_map(mask, None, Shape(1, 1, 64, 64), Captured(), (16, 16)).counts() == counts


@pytest.mark.parametrize("blind", [True, False])
def test_one_element_is_enough(blind: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A single element that differs is found wherever it is, whether bounds point to it or not."""
    if blind:
        monkeypatch.setattr(squares._Evaluator, "certain", lambda self, boxes: nothing_certain(boxes))
    shape = Shape(1, 1, 128, 192)
    for _ in range(15):
        needle = both(op("eq", Q, random.randrange(128)), op("eq", KV, random.randrange(192)))
        for mask in (needle, op("not_", needle)):
            tiles = tile_map(mask, None, shape, Captured(), (64, 96))
            assert torch.equal(tiles.classes(), tile_classes(dense(mask, shape, Captured()), (64, 96))), str(
                mask
            )


def nothing_certain(boxes: squares.Boxes) -> tuple[Tensor, ...]:
    return torch.zeros(2, len(boxes), dtype=torch.bool).unbind()


def test_proof_counts() -> None:
    assert Proof() == Proof(0, 0, 0, 0, ())
    mask = op("ge", Q, KV)
    tiles = tile_map(mask, key_intervals(mask), Shape(1, 1, 300, 300), Captured(), (64, 64))
    assert tiles.proof == Proof(by_intervals=25)
