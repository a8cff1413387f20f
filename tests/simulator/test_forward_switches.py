"""Hopper forward kernels as comparisons set them: right on the simulator, and planned as they are told."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import cutlass
import pytest
import torch
from cases import Size
from cutlass import Int32, cute
from cutlass.cute.runtime import from_dlpack
from own_forward import TIMINGS, Own, captured_forward

from fa4flex import lower
from fa4flex.codegen.analyze.domain import Ragged, Shape
from fa4flex.codegen.analyze.facts import Facts
from fa4flex.codegen.analyze.prove import Proved
from fa4flex.codegen.plan import specialize
from fa4flex.codegen.plan.inputs import Inputs
from fa4flex.codegen.plan.problem import Problem
from fa4flex.codegen.plan.target import SM90A
from fa4flex.kernels.common import work
from fa4flex.kernels.common.work import Grid
from fa4flex.kernels.dispatch import plan_forward
from fa4flex.kernels.fwd_sm90 import plan, tiles
from fa4flex.runtime.cuda import engine

HEAD = 512 * 2 * 16
"""Bytes of 512 keys and values, 8 wide each."""

MODULES = (plan, tiles, specialize)


@dataclass(frozen=True)
class Case:
    """Constants of plans by name, and a launch that they matter to."""

    settings: dict[str, Any]
    size: Size
    masked: bool = False

    def capture(self) -> Own:
        with switched(self.settings):
            return captured_forward("sm_90a", self.size, self.masked)


@contextmanager
def switched(settings: dict[str, Any]) -> Iterator[None]:
    """Constants of plans, as a process of its own sets them; looks of ready launches contain them."""
    look = engine.Engine.look

    def with_settings(self: engine.Engine, call: Any) -> Any:
        found = look(self, call)
        return None if found is None else ((*found[0], *settings.items()), found[1])

    with ExitStack() as stack:
        stack.enter_context(patch.object(lower, "_forward", lower._forward.__wrapped__))
        stack.enter_context(patch.object(engine.Engine, "look", with_settings))
        for name, value in settings.items():
            (owner,) = (module for module in MODULES if hasattr(module, name))
            stack.enter_context(patch.object(owner, name, value))
        yield


SHORT = Size(batch=2, heads=3, q_len=250, kv_len=250, dim=64)
HEADS = Size(batch=2, heads=3, q_len=300, kv_len=300, dim=128)
WIDE = Size(batch=1, heads=1, q_len=200, kv_len=330, dim=256)
CASES = {
    "divisors": Case({"DIVISORS": True}, SHORT),
    "divisors, causal": Case({"DIVISORS": True}, HEADS, True),
    "divisors of sections": Case({"DIVISORS": True, "SECTION_BYTES": 4 * 300 * 512}, HEADS, True),
    "sections": Case({"SECTION_BYTES": 4 * 300 * 512}, HEADS, True),
    "sections of tiles": Case({"SECTION_BYTES": 1, "SECTION_WAVES": 8.0}, HEADS, True),
    "short": Case({"QUERIES_APART": True}, SHORT),
    "short, causal": Case({"QUERIES_APART": True}, SHORT, True),
    "queries ahead": Case({"QUERY_STAGES": 2}, SHORT),
    "queries ahead, causal": Case({"QUERY_STAGES": 2}, HEADS, True),
    "short and deep": Case({"QUERIES_APART": True, "NARROW_STAGES": 4, "DIVISORS": True}, SHORT),
    "a row settled": Case({"SETTLED_ROWS": 1}, WIDE, True),
    "both rows settled": Case({"SETTLED_ROWS": 2}, WIDE, True),
    "wide turns": Case({"PINGPONG_WIDEST": 256}, WIDE, True),
    "wide turns and a row settled": Case({"PINGPONG_WIDEST": 256, "SETTLED_ROWS": 1}, WIDE),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_switched_kernel_is_right(name: str) -> None:
    own = CASES[name].capture()
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
def put_width(
    found: cute.Tensor, q: cute.Tensor, kv: cute.Tensor, most: cutlass.Constexpr, least: cutlass.Constexpr
) -> None:
    given = SimpleNamespace(q=q, k=kv, v=kv, page_table=None)
    found[0] = work.dense_grid(given, 128, True, most, least).group


@pytest.mark.parametrize(
    ("kv_heads", "keys", "most", "least", "width"),
    [
        (16, 512, work.L2_BYTES, 0, 512),
        (16, 512, 40 * HEAD, 0, 32),
        (16, 512, 64 * HEAD, 0, 64),
        (16, 512, 1, 0, 1),
        (16, 512, 1, 198, 32),
        (16, 512, 64 * HEAD, 198, 64),
        (4, 512, 1, 198, 32),
        (16, 512 << 10, 1, 1980, 2),
    ],
)
def test_a_section_has_so_many_heads(kv_heads: int, keys: int, most: int, least: int, width: int) -> None:
    """Of 32 x 16 with four tiles each, halved until they are at most as many as have `most` bytes of keys and
    values, or `least` tiles, of which L2 may hold fewer."""
    found = torch.zeros(1, dtype=torch.int32)
    q = torch.empty(32, 512, 16, 8, dtype=torch.bfloat16)
    kv = torch.empty(1, 1, kv_heads, 8, dtype=torch.bfloat16).expand(32, keys, kv_heads, 8)
    put_width(from_dlpack(found), from_dlpack(q), from_dlpack(kv), most, least)
    assert int(found) == width


# --- plans --------------------------------------------------------------------------------------------------


def inputs(q_len: int, width: int = 64, lengths: Any = "dense") -> Inputs:
    shape = (Shape if lengths == "dense" else Ragged)(2, 4, q_len, 300)
    return Inputs(shape, 4, width, width, lengths=lengths)


def test_short_queries_have_the_tiles_with_fewest_rows_past_the_end(seed: int) -> None:
    """And lengths with other tiles share no launch with them."""
    draw = random.Random(seed)
    with switched({"QUERIES_APART": True}):
        for first, last, rows in ((65, 128, 128), (129, 192, 192), (193, 256, 128), (257, 9999, 192)):
            given = inputs(draw.randint(first, last))
            problem = specialize.forward_problem(given, Proved("none", False, True), SM90A)
            assert plan_forward(Facts(), problem, SM90A).tile == (rows, 128)
            reach = specialize.same_problem(given, SM90A)
            for length in (first - 1, first, last, last + 1):
                assert reach.holds((2, length, 300)) == (first <= length <= last or length > last == 9999)


def test_nothing_else_is_planned_by_its_queries() -> None:
    for given, settings in (
        (inputs(250), {}),
        (inputs(250, 128), {"QUERIES_APART": True}),
        (inputs(250, 64, "packed"), {"QUERIES_APART": True}),
    ):
        with switched(settings):
            assert specialize.forward_problem(given, Proved("none", False, True), SM90A).query_class == 0
            assert specialize.same_problem(given, SM90A).holds((2, 9999, 300))


def test_plans_have_what_was_set() -> None:
    narrow, wide = Problem(64, 64), Problem(256, 256)
    with switched({"NARROW_STAGES": 4, "QUERY_STAGES": 2, "PINGPONG_WIDEST": 256, "SETTLED_ROWS": 1}):
        plans = [plan_forward(Facts(), problem, SM90A) for problem in (narrow, wide)]
        one, two = (found.config() for found in plans)
        for found in plans:
            found.check()
    assert (one.kv_stages, one.q_stages, one.pingpong, one.settled_rows) == (4, 2, True, 0)
    assert (two.kv_stages, two.q_stages, two.pingpong, two.settled_rows) == (2, 1, True, 1)
    config = plan_forward(Facts(), wide, SM90A).config()
    assert (config.kv_stages, config.q_stages, config.pingpong, config.settled_rows) == (2, 1, False, 0)
