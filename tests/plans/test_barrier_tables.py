"""Tables of barriers: what is made of their rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
from barrier_counts import counts_of

from fa4flex.kernels.plan.barriers import BarrierTable, NamedRow, Per, Row, tile_ring
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
