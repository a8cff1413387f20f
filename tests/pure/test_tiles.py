"""Tile classes against brute force: none is ever empty or full wrongly, and none is left undecided."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mask_zoo import KV, B, H, Q, both, dense, near, op, tile_classes, zoo
from torch import Tensor

from fa4flex.codegen.analyze import squares
from fa4flex.codegen.analyze.intervals import key_intervals
from fa4flex.codegen.analyze.tiles import Proof, Shape, TileMap, tile_map
from fa4flex.codegen.evaluate import Captured
from fa4flex.codegen.expr import Expr, const, load, scalar, search

TILES = [(64, 64), (128, 128), (128, 96), (16, 8), (37, 5)]
SHAPES = [
    Shape(2, 3, 256, 256),
    Shape(2, 3, 201, 256),
    Shape(2, 3, 256, 77),
    Shape(2, 1, 1, 256),
    Shape(2, 3, 130, 131, b=1),
]
NAMES = [case.name for case in zoo()]


def check(
    mask: Expr, shape: Shape, captured: Captured, tile: tuple[int, int], allowed: Tensor | None = None
) -> list[TileMap]:
    """Maps with and without key intervals, both found equal to brute force."""
    expected = tile_classes(dense(mask, shape, captured) if allowed is None else allowed, tile)
    found = []
    for keys in {key_intervals(mask), None}:
        tiles = tile_map(mask, keys, shape, captured, tile)
        classes = tiles.classes()
        same = classes.expand_as(expected) == expected
        assert same.all(), (str(mask), shape, tile, keys, (~same).nonzero()[:5].tolist())
        found.append(tiles)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_zoo(name: str) -> None:
    case = zoo()[NAMES.index(name)]
    for shape in SHAPES:
        allowed = dense(case.mask, shape, case.captured)
        for tile in TILES if shape is SHAPES[0] else random.sample(TILES, 1):
            for tiles in check(case.mask, shape, case.captured, tile, allowed):
                check_views(tiles)


def check_views(tiles: TileMap) -> None:
    classes = tiles.classes()
    maps, heads, rows, columns = classes.shape
    b, h, row = random.randrange(maps), random.randrange(heads), random.randrange(rows)
    from_runs = torch.zeros(columns, dtype=torch.uint8)
    stop = 0
    for start, next_stop, full in tiles.runs(b, h, row):
        assert stop <= start < next_stop, "runs are in order, not empty, and disjoint"
        stop = next_stop
        from_runs[start:stop] = 1 + full
    assert from_runs.tolist() == classes[b, h, row].tolist()
    assert tiles.counts() == tuple(int((classes == c).sum()) for c in range(3))
    assert tiles.density == pytest.approx(float((classes > 0).float().mean()))
    turned = tiles.transposed()
    assert torch.equal(turned.classes(), classes)
    assert turned.runs(b, h, 0) == tile_runs(classes[b, h, :, 0].tolist())
    assert torch.equal(turned.transposed().classes(), classes)
    decided = (
        tiles.proof.by_intervals + tiles.proof.by_bounds + tiles.proof.by_witness + tiles.proof.by_evaluation
    )
    assert decided == classes.numel()


def tile_runs(classes: list[int]) -> list[tuple[int, int, bool]]:
    runs: list[tuple[int, int, bool]] = []
    for i, c in enumerate(classes):
        if c and runs and runs[-1][1] == i and runs[-1][2] == (c == 2):
            runs[-1] = (runs[-1][0], i + 1, c == 2)
        elif c:
            runs.append((i, i + 1, c == 2))
    return runs


# --- random compositions ----------------------------------------------------------------------------------

number = st.integers(-40, 120)
step = st.integers(1, 50)
side = st.sampled_from([Q, KV])


def compare(name: str, a: Expr, b: Expr | int) -> Expr:
    return op(name, a, b)


comparison = st.sampled_from(["lt", "le", "gt", "ge", "eq", "ne"])
term = st.recursive(
    st.one_of(
        side,
        side,
        number.map(const),
        st.builds(lambda x: load(0, (x,), "int"), side),
        st.builds(lambda x: load(1, (x,), "int"), side),
        st.just(scalar(0, "int")),
    ),
    lambda x: st.one_of(
        st.builds(lambda f, a, b: op(f, a, b), st.sampled_from(["add", "sub", "minimum", "maximum"]), x, x),
        st.builds(lambda f, a, m: op(f, a, m), st.sampled_from(["floordiv", "mod"]), x, step),
        st.builds(lambda a, m: op("mul", a, m), x, st.integers(-3, 3)),
        st.builds(lambda f, a: op(f, a), st.sampled_from(["abs", "neg"]), x),
        st.builds(lambda f, a, b: op(f, a, b), st.sampled_from(["bitand", "bitor", "bitxor"]), x, x),
        st.builds(lambda a, b, c, d: op("where", op("lt", a, b), c, d), x, x, x, x),
    ),
    max_leaves=5,
)
atom = st.one_of(
    st.builds(compare, comparison, term, term),
    st.builds(lambda r, d: both(near(Q, KV, r), op("eq", op("mod", op("sub", Q, KV), d), 0)), step, step),
    st.builds(lambda w: op("le", op("sub", Q, KV), w), number),
    st.just(op("ge", Q, KV)),
    st.just(op("eq", load(0, (Q,), "int"), load(0, (KV,), "int"))),
    st.builds(lambda x: load(2, (x,), "bool"), side),
)
composition = st.recursive(
    atom,
    lambda x: st.one_of(
        st.builds(lambda f, a, b: op(f, a, b), st.sampled_from(["and_", "or_", "xor"]), x, x),
        st.builds(lambda a: op("not_", a), x),
    ),
    max_leaves=4,
)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    mask=composition,
    lengths=st.tuples(st.integers(1, 150), st.integers(1, 150)),
    tile=st.tuples(st.sampled_from([1, 8, 16, 31, 64]), st.sampled_from([4, 16, 33, 64])),
    window=number,
    ids_seed=st.integers(0, 2**20),
)
def test_compositions(
    mask: Expr, lengths: tuple[int, int], tile: tuple[int, int], window: int, ids_seed: int
) -> None:
    random_ids = torch.Generator().manual_seed(ids_seed)
    ids = torch.randint(0, 5, (150,), generator=random_ids)
    marks = torch.rand(150, generator=random_ids) < 0.1
    captured = Captured((ids.sort().values.int(), ids, marks), (window,))
    check(mask, Shape(1, 1, *lengths), captured, tile)


# --- single properties --------------------------------------------------------------------------------------


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
    (tiles, other) = check(same, Shape(1, 1, 64, 64), Captured((unsorted,)), (16, 16))
    assert tiles.proof.by_intervals == other.proof.by_intervals == 0
    assert any("not sorted" in reason for t in (tiles, other) for reason in t.proof.reasons)
    chunked = op("eq", op("floordiv", Q, scalar(0, "int")), op("floordiv", KV, scalar(0, "int")))
    for tiles in check(chunked, Shape(1, 1, 64, 64), Captured((), (-5,)), (16, 16)):
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
    monkeypatch.setattr(squares._Looker, "certain", lambda self, boxes: nothing_certain(boxes))
    mask = both(op("ge", Q, KV), op("ne", op("mod", KV, 7), 2))
    tiles = tile_map(mask, None, Shape(1, 1, 200, 210), Captured(), (32, 48))
    assert torch.equal(
        tiles.classes(), tile_classes(dense(mask, Shape(1, 1, 200, 210), Captured()), (32, 48))
    )
    assert tiles.proof.by_bounds == 0


def test_search_with_a_row_per_batch() -> None:
    starts = torch.tensor([[0, 20, 30, 90], [0, 50, 60, 70]])
    same = op("eq", *(search(0, "right", x, (B,)) for x in (Q, KV)))
    check(same, Shape(2, 1, 100, 100), Captured((starts,)), (16, 16))


def test_integers_beyond_int64_do_not_wrap() -> None:
    """q * 2**60 is never negative, though in int64 it would be from q = 8 on."""
    far = op("mul", Q, 2**60)
    for mask, counts in ((op("lt", far, 0), (16, 0, 0)), (op("ge", op("mul", far, far), 0), (0, 0, 16))):
        assert tile_map(mask, None, Shape(1, 1, 64, 64), Captured(), (16, 16)).counts() == counts


@pytest.mark.parametrize("blind", [True, False])
def test_one_element_is_enough(blind: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A single element that differs is found wherever it is, whether bounds point to it or not."""
    if blind:
        monkeypatch.setattr(squares._Looker, "certain", lambda self, boxes: nothing_certain(boxes))
    shape = Shape(1, 1, 128, 192)
    for _ in range(40):
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
