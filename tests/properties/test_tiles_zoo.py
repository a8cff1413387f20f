"""Tile classes against brute force: none is ever empty or full wrongly, and none is left undecided."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mask_zoo import KV, Q, both, check_classes, dense, near, op, zoo

from fa4flex.codegen.analyze.tiles import Shape, TileMap
from fa4flex.codegen.evaluate import Captured
from fa4flex.codegen.expr import Expr, const, load, scalar

TILES = [(64, 64), (128, 128), (128, 96), (16, 8), (37, 5)]
SHAPES = [
    Shape(2, 3, 256, 256),
    Shape(2, 3, 201, 256),
    Shape(2, 3, 256, 77),
    Shape(2, 1, 1, 256),
    Shape(2, 3, 130, 131, b=1),
]
NAMES = [case.name for case in zoo()]


@pytest.mark.parametrize("name", NAMES)
def test_zoo(name: str) -> None:
    case = zoo()[NAMES.index(name)]
    for shape in SHAPES:
        allowed = dense(case.mask, shape, case.captured)
        for tile in TILES if shape is SHAPES[0] else random.sample(TILES, 1):
            for tiles in check_classes(case.mask, shape, case.captured, tile, allowed):
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
    check_classes(mask, Shape(1, 1, *lengths), captured, tile)
