"""Tables of barriers: what is made of their rows."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Any
from unittest.mock import patch

import pytest
from barrier_counts import counts_of
from checked_plans import plan_backward, plan_forward, sizes_of

from fa4flex.codegen.analyze.facts import Facts
from fa4flex.kernels.bwd_sm90 import plan as hopper_backward
from fa4flex.kernels.bwd_sm100.two_cta.plan import plan_two_cta
from fa4flex.kernels.plan.barriers import BarrierTable, NamedRow, Per, Row, tile_ring
from fa4flex.kernels.plan.keys import in_pages
from fa4flex.kernels.plan.problem import Problem
from fa4flex.kernels.plan.request import Request
from fa4flex.kernels.plan.sizes import UNKNOWN
from fa4flex.kernels.plan.target import SM90A, SM100A
from fa4flex.kernels.plan.topology import Barrier, NamedBarrier, Ring

TABLE = BarrierTable(
    (
        Row("q_full", 1, "load", "queries have come", Per(units=2, stages=2), "q", first=True),
        Row("q_empty", 4, "consumer", "they are read", Per(units=2, stages=2), "q"),
        Row("go", 8, "consumer", "go on", lanes=32),
        Row("come", 6, "consumer", "rows have come", sent=16, senders=4),
        *tile_ring("k", 3, 2, ("load", "consumer"), gather_warps=4),
        Row("done_full", 1, "load", "all is done", ring="done", exchanged=True),
        Row("spare", 0, "", "nothing", used=False),
        Row("rows_full", 1, "consumer", "rows are there", Per(by_warp=True), "rows"),
        Row("rows_empty", 1, "store", "rows are stored", Per(by_warp=True), "rows"),
    ),
    (NamedRow("turn", 3, 64, "a turn", units=2, stages=2, apart=4),),
)


def test_places_follow_each_other_in_the_order_of_the_table() -> None:
    of_q = ("q 0 full 0", "q 0 full 1", "q 1 full 0", "q 1 full 1")
    assert TABLE.places() == (
        *of_q,
        *(name.replace("full", "empty") for name in of_q),
        *("go", "come", "k full 0", "k full 1", "k full 2", "k empty 0", "k empty 1", "k empty 2"),
        *("done there full", ""),
        *(f"rows {side} of warp {w}" for side in ("full", "empty") for w in range(4)),
    )
    assert TABLE.count == len(TABLE.places()) == 26
    assert [TABLE.offsets[name] for name in ("q_empty", "k_empty", "rows_empty")] == [4, 13, 22]


def test_the_second_cta_has_other_names_and_room_for_what_the_first_one_counts() -> None:
    places = TABLE.places(1)
    assert places[:6] == ("", "", "", "", "q 0 there empty 0", "q 0 there empty 1")
    assert places[8:10] == ("go there", "come there") and places[16] == "done full"
    assert places[18] == "rows there full of warp 0"
    assert TABLE.shared == {"q 0 full 0", "q 0 full 1", "q 1 full 0", "q 1 full 1"}


def test_counts_are_of_lanes_and_one_arrival_announces_what_is_sent() -> None:
    counts = counts_of(TABLE)
    assert counts["go"] == 256 and counts["come"] == 3 and counts["k full 1"] == 128
    assert counts["q 1 empty 0"] == 4 and "spare" not in counts


@pytest.mark.parametrize(
    "paired, order", [(False, [0, 1, 2, 3, 4, 5, 6, 7, 8]), (True, [0, 4, 1, 5, 2, 6, 3, 7, 8])]
)
def test_full_barriers_are_initialised_before_or_beside_empty_ones(paired: bool, order: list[int]) -> None:
    places = [place for place, _ in replace(TABLE, paired=paired).initialised]
    assert places[:9] == order
    assert not set(places) & {10, 11, 12, 13, 14, 15, 17}  # the library's, and what nobody uses


def test_the_graph_has_rings_and_barriers_of_the_rows() -> None:
    assert TABLE.ring("q", 100, (60, 40), unit=1) == Ring("q 1", 2, 100, (60, 40), 100, 4)
    assert TABLE.ring("k", 8) == Ring("k", 3, 8, (), 0, 2, 4, lanes=32)
    assert TABLE.ring("rows", 8) == Ring("rows", 1, 8, (), 0, 1, per_warp=True)
    assert TABLE.ring("done", 8, (8,)).once
    go, come = TABLE.barriers(1)
    assert go == Barrier("go there", 8, "go on", lanes=32, cta=1)
    assert come == Barrier("come there", 6, "rows have come", sent=16, senders=4, cta=1)


def test_named_barriers_are_numbered_by_units_and_stages() -> None:
    first, second = TABLE.named_barriers()
    assert first == NamedBarrier("turn 0", 3, 64, 2, 4) and second.numbers == (4, 8)
    assert TABLE.named[0].at(1, 1) == 8
    assert [b.name for b in TABLE.named_barriers(1)] == ["turn 0 there", "turn 1 there"]
    assert TABLE.named_barriers(1)[0].number == 19


# --- tables of pipelines -------------------------------------------------------------------------------

PACKED = Problem(128, 128, lengths="packed", mask_form="spans")
FEW = Problem(128, 128)
FORWARD = {
    "fwd_sm90": (Problem(128, 128), SM90A),
    "fwd_sm90, next tile": (PACKED, SM90A),
    "fwd_sm90, pages": (replace(PACKED, lengths="used", keys=in_pages(16)), SM90A),
    "fwd_sm90, small pages": (replace(PACKED, lengths="used", keys=in_pages(1)), SM90A),
    "decode_sm90": (FEW, SM90A),
    "decode_sm90, small pages": (replace(FEW, lengths="used", keys=in_pages(1)), SM90A),
    "fwd_sm100": (Problem(128, 128), SM100A),
    "fwd_sm100, next tile": (PACKED, SM100A),
    "decode_sm100": (FEW, SM100A),
}
BACKWARD = {
    "bwd_sm90, persistent": (Problem(64, 64, mask_form="queries"), SM90A),
    "bwd_sm90": (Problem(64, 64, deterministic=True), SM90A),
    "bwd_sm100": (Problem(128, 128), SM100A),
    "bwd_sm100.wide_heads": (Problem(192, 128), SM100A),
}
KINDS = (*FORWARD, *BACKWARD, "bwd_sm90, pairs", "bwd_sm100.two_cta")


def planned(kind: str) -> Any:
    if kind in FORWARD:
        few = FORWARD[kind][0].lengths != "packed" and kind.startswith("decode")
        sizes = sizes_of(64) if few else UNKNOWN
        return plan_forward(Facts(), *FORWARD[kind], sizes=sizes)
    if kind == "bwd_sm100.two_cta":
        return plan_two_cta(Request(Facts(), Problem(128, 128), SM100A))
    if kind == "bwd_sm90, pairs":
        with patch.object(hopper_backward, "PAIRED", 192):
            return plan_backward(Facts(), Problem(192, 192), SM90A)
    return plan_backward(Facts(), *BACKWARD[kind])


def table_of(plan: Any) -> BarrierTable:
    roles, config = import_module(f"{plan.module}.roles"), plan.config()
    if plan.module.endswith(".fwd_sm90"):
        return roles.barrier_table(
            config, config.kv_stages, config.dynamic, config.pingpong, config.producing
        )
    if plan.module.endswith(".fwd_sm100"):
        return roles.barrier_table(config, config.handed)
    if ".decode" in plan.module:
        return roles.barrier_table(config.kv_stages, config.gather_warps)
    return roles.barrier_table(config)


ARRIVING = {"": ("arrive", "commit"), "full": ("load", "fill", "announce"), "empty": ("release", "commit")}
"""Actions that arrive at a barrier, by its side of a ring."""


@pytest.mark.parametrize("kind", KINDS)
def test_those_who_arrive_are_named(kind: str) -> None:
    plan = planned(kind)
    assert plan.module.endswith(kind.split(",")[0])
    pipeline = getattr(plan, "of_one_cta", plan.topology)
    for row in table_of(plan).rows:
        targets = {(row.ring or row.name) + unit for unit in row.per.names}
        found = {
            role.kind
            for role in pipeline.roles
            for event in role.events
            if event.target in targets and event.action in ARRIVING[row.side]
        }
        named = set(row.by.split(", "))
        assert found <= named and bool(found) == row.used, row.name
        # Which warps read the next tile's number depends on which there are.
        assert not row.used or row.name == "next_empty" or found == named, row.name
