"""Blackwell plans: tensor memory; what is chosen, explained and refused."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import networkx
import pytest
from blackwell_plans import (
    CAUSAL,
    TILES,
    WIDTHS,
    every_plan,
    fault_of,
    planned,
    sound,
    with_columns,
    with_role,
)
from checked_plans import plan_forward, sizes_of

from fa4flex.codegen.analyze.facts import Facts
from fa4flex.errors import UnsupportedError
from fa4flex.kernels.fwd_sm100.columns import first_columns, lay_out_columns
from fa4flex.kernels.fwd_sm100.config import Exponential, Registers
from fa4flex.kernels.fwd_sm100.exponential import TABLE, share
from fa4flex.kernels.fwd_sm100.plan import FWD_SM100, BlackwellPlan
from fa4flex.kernels.fwd_sm100.registers import NARROW, SPLITS, WIDE
from fa4flex.kernels.plan.counts import check_counts
from fa4flex.kernels.plan.errors import PlanError
from fa4flex.kernels.plan.keys import in_pages
from fa4flex.kernels.plan.problem import Problem
from fa4flex.kernels.plan.sharing import lifetimes
from fa4flex.kernels.plan.target import SM90A, SM100A, SM103A
from fa4flex.kernels.plan.tensor_memory import WHOLE, Range
from fa4flex.primitives.schedule import Schedule

# --- tensor memory -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("q_tiles", "dv"), tuple(product((1, 2), (32, 64, 96, 128))))
def test_what_shares_columns_never_lives_at_once(q_tiles: int, dv: int) -> None:
    tiles = replace(TILES, q_tiles=q_tiles, head_dim_v=dv)
    columns = lay_out_columns(tiles, SM100A)
    columns.check()
    owner: dict[int, set[str]] = {}
    for r in columns.ranges:
        for column in range(r.first, r.end):
            owner.setdefault(column, set()).add(r.name)
    shared = {frozenset(names) for names in owner.values() if len(names) > 1}
    expected = {frozenset((f"S {i}", f"P {i} {part}")) for i in range(q_tiles) for part in ("early", "late")}
    assert shared == expected == {frozenset(pair) for pair in columns.overlaps if WHOLE not in pair}
    graph = lifetimes(sound(tiles, columns=columns), columns)
    assert networkx.is_directed_acyclic_graph(graph)
    assert graph.nodes["S 0", 1] == {
        "written": ("the product S 0 tile 1",),
        "read": tuple(f"warp {w} of softmax 0" for w in range(4)),
    }
    assert graph.nodes["P 0 late", 0]["read"] == ("the product O 0 late tile 0",)
    for i, j in product(range(q_tiles), range(5)):  # S, P over it, and the next S over both
        for part in ("early", "late"):
            assert graph.has_edge((f"S {i}", j), (f"P {i} {part}", j))
            assert graph.has_edge((f"P {i} {part}", j), (f"S {i}", j + 1))


@pytest.mark.parametrize(
    ("name", "first"),
    (
        ("P 0 early", 128),  # over the other query tile's scores
        ("P 0 late", 64),  # over the first probabilities
        ("O 1", 320),  # over the other output
        ("O 0", 128),  # over scores
        ("P 0 late", 400),  # over an output
    ),
)
def test_sharing_that_the_pipeline_does_not_order_is_found(name: str, first: int) -> None:
    columns = with_columns(lay_out_columns(TILES, SM100A), name, first)
    columns.check()
    pipeline = sound(columns=columns)
    check_counts(pipeline)  # no count is wrong
    fault = fault_of(pipeline)
    assert "while" in fault or "nobody has read" in fault or "written over it" in fault, fault
    wrong = replace(planned(128, 128))
    wrong.__dict__["columns"] = columns
    with pytest.raises(PlanError):
        wrong.check()


def test_columns_that_are_not_there_are_refused() -> None:
    columns = lay_out_columns(TILES, SM100A)
    for bad in (with_columns(columns, "O 1", 400), replace(columns, ranges=(Range("S 0", 0, 0),))):
        with pytest.raises(PlanError, match=r"in columns .*\n.*some of 0 .. 512"):
            bad.check()
    assert first_columns(planned(128, 128).columns) == planned(128, 128).config().memory
    assert planned(128, 128).config().memory.probabilities == (64, 192)
    assert planned(64, 64, 128).config().memory.outputs == (256,)


# --- plans ---------------------------------------------------------------------------------------------


def test_few_queries_take_one_tile() -> None:
    for d, dv in WIDTHS:
        few, many = planned(d, dv, 128), planned(d, dv, 129)
        assert (few.tiles.q_tiles, few.tile) == (1, (128, 128)) and many.tiles.q_tiles == 2
        assert few.config().q_tiles == 1 and few.config().tile_m == 128
        assert sum(few.tiles.kv_stages) >= sum(many.tiles.kv_stages)  # room that other queries leave
    problem, tile = Problem(64, 64), Schedule(tile=(256, 128))
    wanted = plan_forward(Facts(), problem, SM100A, tile, sizes=sizes_of(100))
    assert wanted.tile == (256, 128)  # the schedule has the last word
    few, many = (plan_forward(Facts(), problem, SM100A, sizes=sizes_of(n)) for n in (100, 200))
    assert few.tile != many.tile


def test_many_queries_take_pairs_of_ctas() -> None:
    """Pairs are taken if every tile of queries visits every key, and V splits into whole blocks of
    columns."""
    for (d, dv), ctas in {(64, 64): 1, (96, 96): 1, (128, 128): 2, (192, 128): 2}.items():
        plan = planned(d, dv, 257)
        assert plan.config().ctas == ctas and plan.tile == (256 * ctas, 128)
        assert planned(d, dv, 257, mask_form="spans").config().ctas == 1
    alone, paired = planned(128, 128, 256), planned(128, 128, 257)
    assert sum(paired.tiles.kv_stages) > sum(alone.tiles.kv_stages)  # room that half of K and V leaves


def test_pages_that_can_be_read_in_place_are() -> None:
    """One CTA for each tile of queries, even where all are many and see every key."""
    for rows, (d, least) in product((1, 2, 16, 128), ((128, 1), (64, 1), (96, 2), (192, 1))):
        problem = Problem(d, min(d, 128), lengths="used", keys=in_pages(rows))
        assert FWD_SM100.accepts(problem, SM100A, sizes_of()) == (rows >= least)
        if rows >= least:
            plan = planned(d, min(d, 128), 5000, lengths="used", keys=in_pages(rows))
            config = plan.config()
            assert config.paged and (config.box_rows, config.ctas) == (rows, 1)
            assert f"brought in {128 // rows} x {rows} keys" in plan.explain()
    assert FWD_SM100.accepts(replace(problem, mask_form="tables"), SM100A, sizes_of())
    for refused in ({"mask_form": "pairs"}, {"head_dim": 200}, {"head_dim_v": 136}):  # wide ones are gathered
        assert not FWD_SM100.accepts(replace(problem, **refused), SM100A, sizes_of())  # type: ignore[arg-type]
    assert not planned(128, 128).config().paged and planned(128, 128).box_rows == 0
    with pytest.raises(UnsupportedError, match="sorted by their keys"):
        plan_forward(Facts(), problem, SM100A, Schedule(order="longest_first"))


@pytest.mark.parametrize(("ctas", "mask_form"), [(1, "spans"), (2, "none")])
def test_a_schedule_asks_for_launch_control(ctas: int, mask_form: str) -> None:
    """Pairs of CTAs stay pairs; those that count do not, as each would take a number of its own."""
    problem = Problem(128, 128, mask_form=mask_form)  # type: ignore[arg-type]
    facts = Facts() if mask_form == "none" else CAUSAL
    plan = plan_forward(facts, problem, SM100A, Schedule(next_tile="launch_control"), sizes=sizes_of())
    assert isinstance(plan, BlackwellPlan) and plan.tiles.ctas == ctas
    assert plan.cancel and not plan.dynamic and "not started" in plan.explain()
    assert plan.memory["next"].size == 16 and plan.memory["next"].offset % 16 == 0
    counted = plan_forward(facts, problem, SM100A, Schedule(next_tile="counter"), sizes=sizes_of())
    assert isinstance(counted, BlackwellPlan) and counted.tiles.ctas == 1 and counted.dynamic
    in_turn = plan_forward(facts, problem, SM100A, Schedule(next_tile="in_turn"), sizes=sizes_of())
    assert isinstance(in_turn, BlackwellPlan) and not in_turn.dynamic and not in_turn.cancel
    with pytest.raises(UnsupportedError, match="cannot cancel"):
        plan_forward(facts, problem, SM90A, Schedule(next_tile="launch_control"))


def test_the_share_of_polynomials_is_by_width_and_topology() -> None:
    paired = planned(128, 128, 257)
    assert paired.exponential == Exponential(degree=3, every=5, count=2, skip=1)
    assert planned(128, 128).exponential == Exponential(3, 8, 2, 1)
    assert [row.head_dim for row in TABLE] == [64, 128, 192, 256]
    # by hand: two fragments of four; 2 of 8 pairs, or of 16 pairs in groups of 5 the last two of three groups
    assert share(Exponential(3, 8, 2, 1), 128) == 2 * 4 / 64
    assert share(Exponential(3, 5, 2, 1), 128) == 2 * 6 / 64
    for plan in every_plan():
        assert 0.05 < share(plan.exponential, plan.tiles.tile_n) < 0.25  # FlashAttention-4: 10 to 25 %
    assert plan_forward(Facts(), Problem(128, 128), SM103A).config().exponential.count == 0


def test_the_share_of_polynomials_may_be_replaced() -> None:
    plan = planned(128, 128)
    other = replace(plan, exponential=Exponential(degree=5, every=4, count=1, skip=0))
    other.check()
    assert other.config().exponential == Exponential(5, 4, 1, 0)
    assert "18.8% of the exponentials by a polynomial of degree 5" in other.explain()
    off = replace(plan, exponential=Exponential(count=0))
    off.check()
    assert "all exponentials on special-function units" in off.explain()
    for bad in (Exponential(degree=2), Exponential(count=9), Exponential(every=17), Exponential(skip=5)):
        with pytest.raises(PlanError):
            replace(plan, exponential=bad).check()


@pytest.mark.parametrize(
    ("registers", "words"),
    (
        (Registers(200, 80, 48), "528 registers per thread"),
        (Registers(190, 80, 48), "190 registers per softmax thread"),
        (Registers(120, 80, 48), "120 registers per softmax thread"),  # raised, from 128
        (Registers(128, 136, 48), "136 registers per correction thread"),  # lowered
        (Registers(192, 80, 16), "16 registers per other thread"),
        (Registers(264, 80, 48), "264 registers per softmax thread"),
    ),
)
def test_registers_that_no_launch_has_are_refused(registers: Registers, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        replace(planned(64, 64), registers=registers).check()


def test_splits_use_the_whole_register_file() -> None:
    for split in (*SPLITS, *NARROW, WIDE):
        assert 128 * (2 * split.softmax + split.correction + split.other) == SM100A.registers


def test_a_changed_plan_is_checked_anew() -> None:
    plan = planned(128, 128)
    for changes, kind in (
        ({"tiles": replace(plan.tiles, kv_stages=(4, 4))}, UnsupportedError),
        ({"target": replace(SM100A, named_barriers=2)}, PlanError),
        ({"target": replace(SM100A, tensor_columns=256)}, PlanError),
        ({"rescale_threshold": 100.0}, UnsupportedError),
    ):
        with pytest.raises(kind):
            replace(plan, **changes).check()
    replace(plan, dynamic=True).check()
    role = plan.topology.role("correction")
    late = (*role.body[:2], role.body[3], role.body[2], *role.body[4:])
    broken = with_role(plan.topology, replace(role, body=late))
    check_counts(broken)  # no count is wrong, so only the simulation tells
    hasty = replace(plan)
    hasty.__dict__["topology"] = broken
    with pytest.raises(PlanError, match="O 0 tile"):
        hasty.check()


def test_explain_says_what_will_run() -> None:
    text = planned(128, 128, lengths="packed").explain()
    for words in (
        "sm_100a", "2 x 128 queries x 128 keys", "takes the next tile from a counter", "P 0 early",
        "512 columns of 512", "S 0 tile 0 has ended when P 0 early tile 0 begins", "p_early 0: 8 arrivals",
        "empty after 14 arrivals", "scheduler:", "publish the next tile's number", "softmax 0:",
        "clear the end of v_j-1", "start O 0 early_j-1", "limited by",
    ):  # fmt: skip
        assert words in text, words
    assert "softmax 1:" not in text and max(map(len, text.splitlines())) <= 125
    assert "idle" in planned(64, 64, 128).explain()
