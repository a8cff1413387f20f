"""Short tiles of Hopper forward kernels: divisors, sections of short heads, tiles for few queries."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import cutlass
import pytest
import torch
from cases import Size
from cutlass import Int32, cute
from cutlass.cute.runtime import from_dlpack
from own_forward import TIMINGS, captured_forward

from fa4flex.codegen.analyze.domain import Ragged, Shape
from fa4flex.codegen.analyze.extents import Reach
from fa4flex.codegen.analyze.facts import Facts
from fa4flex.codegen.analyze.prove import Proved
from fa4flex.kernels.common import work
from fa4flex.kernels.common.work import Grid
from fa4flex.kernels.dispatch import plan_forward
from fa4flex.kernels.plan.inputs import Inputs
from fa4flex.kernels.plan.problem import Problem
from fa4flex.kernels.plan.sizes import Sizes
from fa4flex.kernels.plan.specialize import forward_problem
from fa4flex.kernels.plan.target import SM90A

HEAD = 512 * 2 * 16
"""Bytes of 512 keys and values, 8 wide each."""

CASES = {
    "few queries": (Size(batch=2, heads=3, q_len=250, kv_len=250, dim=64), False),
    "few queries, causal": (Size(batch=2, heads=3, q_len=250, kv_len=250, dim=64), True),
    "narrow": (Size(batch=2, heads=3, q_len=400, kv_len=300, dim=64), False),
    "narrow, sections": (Size(batch=2, heads=3, q_len=600, kv_len=600, dim=48), True),
    "short heads": (Size(batch=2, heads=3, q_len=300, kv_len=300, dim=128), True),
    "queries ahead": (Size(batch=2, heads=3, q_len=300, kv_len=300, dim=96), True),
}
"""Launches of blocks that take several tiles each, and whether their mask is causal."""


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_short_tiles_one_after_another(name: str) -> None:
    own = captured_forward("sm_90a", *CASES[name])
    for timing, seed in TIMINGS[:3]:
        assert own.clean(timing, seed), (timing, seed)


# --- divisors ---------------------------------------------------------------------------------------------


@cute.jit
def place_all(places: cute.Tensor, given: Grid, k: cute.Tensor, ordered: cutlass.Constexpr) -> None:
    """(tile, head, batch) of each number, as `given` has them and by divisors."""
    prepared = work.with_divisors(given, SimpleNamespace(k=k), ordered)
    for number in cutlass.range(given.total, unroll=1):
        for way, grid in ((0, given), (1, prepared)):
            found = *work.locate(number, grid, True), *work.by_heads(number, grid)
            for i in cutlass.range_constexpr(5):
                places[way, number, i] = found[i]


@pytest.mark.parametrize("ordered", [False, True])
def test_divisors_find_the_same_tiles(ordered: bool, seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(5):
        tiles, heads, batch = (draw.randint(1, most) for most in (30, 7, 5))
        group = draw.randint(1, heads * batch) if ordered else 1
        places = torch.full((2, tiles * heads * batch, 5), -1, dtype=torch.int32)
        grid = Grid(*map(Int32, (tiles, heads, batch, group)))
        place_all(from_dlpack(places), grid, from_dlpack(torch.empty(1, 1, heads, 8)), ordered)
        assert torch.equal(*places)
        assert len({tuple(place[:3].tolist()) for place in places[1]}) == tiles * heads * batch


# --- sections ---------------------------------------------------------------------------------------------


@cute.jit
def put_width(found: cute.Tensor, q: cute.Tensor, kv: cute.Tensor, least: cutlass.Constexpr) -> None:
    given = SimpleNamespace(q=q, k=kv, v=kv, loader=None)
    found[0] = work.dense_grid(given, 128, True, least).group


@pytest.mark.parametrize(
    ("kv_heads", "keys", "room", "least", "width"),
    [
        (16, 512, 1 << 30, 0, 512),
        (16, 512, 40 * HEAD, 0, 512),
        (16, 512, 40 * HEAD, 1, 32),
        (16, 512, 64 * HEAD, 1, 64),
        (16, 512, 1, 1, 1),
        (16, 512, 1, 198, 32),
        (16, 512, 64 * HEAD, 198, 64),
        (4, 512, 1, 198, 32),
        (16, 513, 1, 1, 1),
        (16, 513, 1, 198, 32),
        (16, 4096, 128 * HEAD, 1, 32),
        (16, 4096, 128 * HEAD, 0, 256),
        (16, 4097, 1, 198, 128),
        (16, 512 << 10, 1, 198, 2),
    ],
)
def test_a_section_has_so_many_heads(
    kv_heads: int, keys: int, room: int, least: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """32 x 16 heads with four tiles each, halved until L2 holds the keys of all; where heads are short and
    `least` tiles are told, until `room` does, or there are no more tiles than these. Of up to 4,096 keys,
    until twice the room does."""
    monkeypatch.setattr(work, "SHORT_BYTES", room)
    monkeypatch.setattr(work, "MIDDLE_BYTES", 2 * room)
    found = torch.zeros(1, dtype=torch.int32)
    q = torch.empty(32, 512, 16, 8, dtype=torch.bfloat16)
    kv = torch.empty(1, 1, kv_heads, 8, dtype=torch.bfloat16).expand(32, keys, kv_heads, 8)
    put_width(from_dlpack(found), from_dlpack(q), from_dlpack(kv), least)
    assert int(found) == width


# --- plans --------------------------------------------------------------------------------------------------


def inputs(q_len: int, width: int = 64, lengths: Any = "dense") -> Inputs:
    shape = (Shape if lengths == "dense" else Ragged)(2, 4, q_len, 300)
    return Inputs(shape, 4, width, width, lengths=lengths)


def planned(given: Inputs) -> tuple[tuple[int, int], Reach]:
    """The tile, and extents for which the plan is valid."""
    problem, sizes = forward_problem(Facts(), given, Proved("none", False, True)), Sizes(given)
    plan = plan_forward(Facts(), problem, SM90A, sizes=sizes)
    return plan.tile, sizes.valid


def test_few_queries_have_the_tiles_with_fewest_rows_past_the_end(seed: int) -> None:
    """And lengths with other tiles share no launch with them."""
    draw = random.Random(seed)
    for first, last, rows in ((65, 256, 128), (257, 9999, 192)):
        given = inputs(draw.randint(first, last))
        tile, reach = planned(given)
        assert tile == (rows, 128)
        for length in (first - 1, first, last, last + 1):
            assert reach.holds((2, length, 300)) == (first <= length <= last or length > last == 9999)


def test_nothing_else_is_planned_by_its_queries() -> None:
    for given in (inputs(250, 128), inputs(250, 64, "packed")):
        assert planned(given)[1].holds((2, 9999, 300))


def test_narrow_heads_have_queries_ahead_and_divisors() -> None:
    for width, stages, masked, divisors in (
        (64, 2, 2, True), (48, 2, 2, True), (80, 1, 2, False), (128, 1, 1, False), (256, 1, 1, False),
    ):  # fmt: skip
        for form, queries in (("none", stages), ("spans", masked)):
            found = plan_forward(Facts(), Problem(width, width, mask_form=form), SM90A)
            found.check()
            config = found.config()
            assert (config.q_stages, config.divisors, config.short_tiles) == (queries, divisors, 198)
