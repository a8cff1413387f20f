"""The pipeline of a plan: the graph, its self-checks, and the simulation on sound and on broken ones."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import networkx
import pytest
from blackwell_plans import with_ring

from fa4flex.kernels.fwd_sm90.tiles import Tiles
from fa4flex.kernels.fwd_sm90.topology import forward_topology
from fa4flex.kernels.plan.counts import check_counts
from fa4flex.kernels.plan.errors import PlanError
from fa4flex.kernels.plan.paging import Boxes
from fa4flex.kernels.plan.topology import Event, Role, Staging, Topology
from fa4flex.kernels.plan.verify import Mbarrier, Pick, at_random, round_robin, simulate, trace

TILES = Tiles(128, 128, 128, 64)
WORKS = ([1], [2, 2], [7], [1, 3, 2], [1, 1, 1, 1])


def picks(seed: int, count: int = 6) -> Iterator[Pick]:
    """Orders: roles in turn; the first or the last that can go on (the producer, or a copy); at random."""
    yield round_robin()
    yield lambda n: 0
    yield lambda n: n - 1
    yield from (at_random(seed + i) for i in range(count))


def is_red(pipeline: Topology, seed: int) -> bool:
    """True if some interleaving of the roles fails."""
    for pick in picks(seed):
        for work in WORKS:
            try:
                simulate(pipeline, work, pick)
            except PlanError:
                return True
    return False


def fails_check(pipeline: Topology) -> bool:
    try:
        check_counts(pipeline)
    except PlanError:
        return True
    return False


def sound(
    pingpong: bool = True,
    staging: Staging = "queries",
    stages: int = 2,
    tile_m: int = 128,
    dynamic: bool = False,
) -> Topology:
    return forward_topology(replace(TILES, tile_m=tile_m), stages, pingpong, staging, dynamic)


def every_pipeline() -> Iterator[Topology]:
    """Distinct pipelines: a lone consumer warpgroup takes no turns."""
    stagings: tuple[Staging, ...] = ("queries", "own", "none")
    for staging, stages, tile_m in product(stagings, (1, 2, 3), (64, 128, 192)):
        for pingpong, dynamic in product((True, False) if tile_m > 64 else (False,), (True, False)):
            yield sound(pingpong, staging, stages, tile_m, dynamic)


def test_values_of_a_warp_of_their_own_in_a_random_order(seed: int) -> None:
    """Keys in pages: a second producer brings values, and reads the next tile's number like a consumer."""
    boxes = Boxes(16, (True, False))
    for i, (pingpong, dynamic, tile_m) in enumerate(product((True, False), (True, False), (64, 128))):
        pipeline = forward_topology(
            replace(TILES, tile_m=tile_m), 2, pingpong, "none", dynamic, boxes, "apart"
        )
        check_counts(pipeline)
        assert ("producer of values", "v") in pipeline.graph.edges
        assert ("producer", "v") not in pipeline.graph.edges
        work = random.Random(seed + i).choices((1, 2, 3, 7), k=2)
        assert simulate(pipeline, work, at_random(seed + i)) > 0, work
        deaf = replace(pipeline.roles[1], last=())
        assert fails_check(with_role(pipeline, 1, deaf)) == dynamic


def test_rows_by_four_warps_in_a_random_order(seed: int) -> None:
    """Keys in pages of a few keys: each warp copies its part, and the first one brings queries."""
    for i, (pingpong, dynamic, tile_m) in enumerate(product((True, False), (True, False), (64, 128))):
        tiles = replace(TILES, tile_m=tile_m)
        pipeline = forward_topology(tiles, 2, pingpong, "none", dynamic, Boxes(1), "gathering")
        check_counts(pipeline)
        assert pipeline.ring("k").full_arrivals == pipeline.ring("v").full_arrivals == 4
        work = random.Random(seed + i).choices((1, 2, 3, 7), k=2)
        assert simulate(pipeline, work, at_random(seed + i)) > 0, work
        lead, others, *_ = pipeline.roles
        for number, role in ((0, lead), (1, others)):
            late = replace(role, body=tuple(e for e in role.body if e.action != "acquire"))
            assert fails_check(with_role(pipeline, number, late)), "who does not wait for room overwrites"
        fewer = replace(others, warps=2)
        assert fails_check(with_role(pipeline, 1, fewer)), "a part of a tile that nobody brings"
        with pytest.raises(PlanError, match="deadlock"):  # the last values
            simulate(with_role(pipeline, 1, replace(others, last=())), work, at_random(seed))
        misplaced = with_role(pipeline, 1, replace(others, part=0))
        with pytest.raises(PlanError):  # two warps write the first part, and none the last
            simulate(misplaced, work, at_random(seed))


def test_sound_pipelines_run_in_a_random_order(seed: int) -> None:
    tried = 0
    for i, pipeline in enumerate(every_pipeline()):
        check_counts(pipeline)
        work = random.Random(seed + i).choices((1, 2, 3, 7), k=2)
        assert simulate(pipeline, work, at_random(seed + i)) > 0, work
        tried += 1
    assert tried == 3 * 3 * 5 * 2


@pytest.mark.slow
def test_sound_pipelines_run_in_any_order(seed: int) -> None:
    for pipeline in every_pipeline():
        for pick in picks(seed, count=1):
            for work in WORKS:
                assert simulate(pipeline, work, pick) > 0


def test_every_key_tile_is_multiplied_twice_by_every_consumer() -> None:
    for role in sound().roles[1:]:
        events = role.run([3, 1, 2])
        for result, ring in (("S", "k"), ("O", "v")):
            for action, target in (("issue", result), ("finish", result), ("wait", ring), ("release", ring)):
                assert [e.tile for e in events if (e.action, e.target) == (action, target)] == [*range(6)]


def test_values_follow_keys_one_tile_behind() -> None:
    """The producer brings tiles in the order in which every consumer asks; the last values close a row."""
    producer, *consumers = sound().roles
    for role, action in ((producer, "load"), *((role, "wait") for role in consumers)):
        order = [f"{e.target}{e.tile}" for e in role.run([3, 1]) if e.action == action and e.target in "kv"]
        assert order == ["k0", "k1", "v0", "k2", "v1", "v2", "k3", "v3"], role.name


def test_the_next_tile_is_known_before_it_is_begun() -> None:
    """Published behind the last values; read by every consumer when its output has left; one per tile."""
    producer, *consumers = sound(dynamic=True, tile_m=192).roles
    assert [(e.action, e.target) for e in producer.last] == [
        ("acquire", "v"), ("load", "v"), ("acquire", "next"), ("fill", "next"),
    ]  # fmt: skip
    assert len(consumers) == 3
    for role in consumers:
        assert [e.action for e in role.last if e.target == "next"] == ["wait", "read", "release"]
        assert {e.target for e in role.last[-3:]} == {"next"}
        assert [e.tile for e in role.run([3, 1, 2]) if (e.action, e.target) == ("wait", "next")] == [0, 1, 2]
    ring = sound(dynamic=True, tile_m=192).ring("next")
    assert (ring.stages, ring.stage_bytes, ring.transaction_bytes) == (1, 8 * 4, 0)
    assert (ring.full_arrivals, ring.empty_arrivals) == (1, 12)  # the producer; every consumer warp
    assert not any(ring.name == "next" for ring in sound().rings)


def test_each_step_is_in_the_stated_order() -> None:
    """A turn covers both products and no softmax, which runs under them."""
    _, consumer, other = sound().roles
    body = [
        ("wait", "k", 0), ("take", "turn 0", 0), ("issue", "S", 0), ("wait", "v", -1), ("issue", "O", -1),
        ("give", "turn 1", 0), ("finish", "S", 0), ("release", "k", 0), ("softmax", "S of 0", 0),
        ("finish", "O", -1), ("release", "v", -1),
    ]  # fmt: skip
    assert [(e.action, e.target, e.tile) for e in consumer.body] == body
    assert [e.target for e in other.body if e.action in ("take", "give")] == ["turn 1", "turn 0"]
    alone = sound(pingpong=False).roles[1]
    assert [(e.action, e.target, e.tile) for e in alone.body] == [x for x in body if "turn" not in x[1]]


def test_turns_go_round_one_at_a_time() -> None:
    """Products of different consumers never interleave within a turn, in whatever order the roles run."""
    pipeline = sound(tile_m=192)
    assert {b.threads for b in pipeline.barriers if b.name.startswith("turn")} == {256}
    numbers = [b.number for b in pipeline.barriers]
    assert len(set(numbers)) == len(numbers) == 6 and max(numbers) < 16 and min(numbers) > 0
    graph = pipeline.graph
    turns = {n for n in graph if n.startswith("turn")}
    cycle = graph.subgraph(turns | {role.name for role in pipeline.roles[1:]})
    assert max(map(len, networkx.simple_cycles(cycle))) == 6  # consumer, turn, consumer, turn, consumer, turn


def test_graph_carries_stages_bytes_and_arrivals() -> None:
    graph = sound().graph
    assert isinstance(graph, networkx.DiGraph)
    assert graph.nodes["k"]["stages"] == 2 and graph.nodes["k"]["bytes"] == 128 * 128 * 2
    assert graph.edges["producer", "v"] == {"full": 1, "bytes": 128 * 64 * 2}
    assert graph.edges["consumer 0", "k"] == {"empty": 4} and graph.edges["k", "consumer 1"] == {"stages": 2}
    assert ("q 0", "consumer 0") in graph.edges and ("q 0", "consumer 1") not in graph.edges
    for ring in ("k", "v"):
        assert sum(graph.edges[a, b]["empty"] for a, b in graph.in_edges(ring) if a != "producer") == 8
    for name in ("q 0", "q 1", "k", "v"):  # data flows from the producer to every consumer of it
        assert networkx.has_path(graph, "producer", name)


def test_copies_add_up_to_the_bytes_announced() -> None:
    for width in (64, 96, 128, 192, 256):
        pipeline = forward_topology(Tiles(128, 80, width, width), 2, True, "queries")
        for ring in pipeline.rings:
            rows = 64 if ring.name.startswith("q") else 80
            assert sum(ring.copies) == ring.transaction_bytes == ring.stage_bytes == rows * width * 2


# --- broken pipelines ----------------------------------------------------------------------------------


def with_role(pipeline: Topology, i: int, role: Role) -> Topology:
    return replace(pipeline, roles=(*pipeline.roles[:i], role, *pipeline.roles[i + 1 :]))


def dropped(pipeline: Topology) -> Iterator[tuple[Event, str, Topology]]:
    """Every pipeline with one event left out, and where."""
    for i, role in enumerate(pipeline.roles[:2]):
        for when, part in role.parts.items():
            for at, event in enumerate(part):
                less = replace(role, **{when: part[:at] + part[at + 1 :]})  # type: ignore[arg-type]
                yield event, when, with_role(pipeline, i, less)


@pytest.mark.parametrize("staging", ("queries", "own"))
def test_every_dropped_event_is_found(staging: Staging, seed: int) -> None:
    found = 0
    for event, when, broken in dropped(sound(staging=staging, dynamic=True)):
        # Threads of one warpgroup are one role here; the next tile's number has other readers, too; and where
        # the output was read before its queries were freed, nothing is left to wait for at the end.
        if event.action == "sync" or (event.action, event.target) == ("read", "next"):
            continue
        if when == "closing" and staging == "queries":
            continue
        where = f"{event} of {when}"
        if event.action == "take":  # whether tokens are left over depends on the number of turns
            assert fails_check(broken) or is_red(broken, seed), where
        else:
            assert is_red(broken, seed), where
        found += 1
    assert found > 36


def test_dropped_hand_overs_fail_the_check_of_counts() -> None:
    for event, when, broken in dropped(sound(dynamic=True)):
        if event.action in ("acquire", "load", "fill", "wait", "release", "issue", "finish"):
            assert fails_check(broken), f"{event} of {when}"


@pytest.mark.parametrize(
    ("ring", "changes"),
    (
        ("k", {"empty_arrivals": 4}),  # freed when the first consumer is done
        ("v", {"empty_arrivals": 9}),  # never freed
        ("k", {"full_arrivals": 2}),  # never full
        ("k", {"transaction_bytes": 128 * 128}),  # full before all bytes are there
        ("v", {"transaction_bytes": 128 * 64 * 2 + 16}),  # never full
        ("q 0", {"transaction_bytes": 1 << 20}),
        ("k", {"stages": 0}),
        ("next", {"empty_arrivals": 4}),  # overwritten when the first consumer has read it
        ("next", {"empty_arrivals": 9}),
        ("next", {"full_arrivals": 2}),
        ("next", {"transaction_bytes": 4}),  # no copy brings them
    ),
)
def test_wrong_counts_are_found_by_sums_and_by_simulation(
    ring: str, changes: dict[str, int], seed: int
) -> None:
    broken = with_ring(sound(dynamic=True), ring, **changes)
    assert fails_check(broken)
    assert is_red(broken, seed)


def test_too_small_a_named_barrier_is_found() -> None:
    pipeline = sound()
    barriers = tuple(replace(b, threads=128) if b.name == "turn 1" else b for b in pipeline.barriers)
    assert fails_check(replace(pipeline, barriers=barriers))
    same = tuple(replace(b, number=1) for b in pipeline.barriers)
    assert fails_check(replace(pipeline, barriers=same))


def test_swapping_neighbours_is_found_where_it_matters(seed: int) -> None:
    """A stage freed before its product has read it, a tile copied before the stage is free, ..."""
    wrong = {
        ("finish", "release"),
        ("acquire", "load"),
        ("acquire", "fill"),
        ("wait", "issue"),
        ("wait", "release"),
    }
    tried = 0
    pipeline = sound(dynamic=True)
    for i, role in enumerate(pipeline.roles[:2]):
        for when, part in role.parts.items():
            for at in range(len(part) - 1):
                pair = part[at].action, part[at + 1].action
                related = part[at].target[:1] in (part[at + 1].target[:1], "S", "O", "k", "v", "q", "n")
                if pair not in wrong or not related:
                    continue
                swapped = (*part[:at], part[at + 1], part[at], *part[at + 2 :])
                changed = replace(role, **{when: swapped})  # type: ignore[arg-type]
                assert is_red(with_role(pipeline, i, changed), seed), f"{when}: {pair} swapped"
                tried += 1
    assert tried > 8


def test_a_deadlock_names_who_waits_for_what() -> None:
    broken = with_ring(sound(), "v", empty_arrivals=9)
    with pytest.raises(PlanError, match=r"deadlock: producer: acquire v tile 2; consumer 0: wait v tile 2"):
        simulate(broken, [7], round_robin())


def test_waits_see_the_parity_of_a_phase_and_no_more() -> None:
    barrier = Mbarrier(arrivals=2)
    assert barrier.passed(-1) and not barrier.passed(0)
    barrier.arrive(2, expect_bytes=48)
    barrier.bring(32)
    assert not barrier.passed(0)
    barrier.bring(16)
    assert barrier.passed(0) and not barrier.passed(1)
    barrier.arrive(1)
    assert not barrier.passed(1)
    barrier.arrive(1)
    assert barrier.passed(1) and not barrier.passed(0)  # a waiter that is two phases late sleeps


def test_interleavings_differ_and_are_reproducible(seed: int) -> None:
    def trail(pick: Pick) -> list[int]:
        taken: list[int] = []

        def spy(n: int) -> int:
            taken.append(pick(n))
            return taken[-1]

        simulate(sound(), [5], spy)
        return taken

    assert trail(at_random(seed)) == trail(at_random(seed))
    assert len({tuple(trail(at_random(random.Random(seed + i).randrange(1 << 30)))) for i in range(4)}) > 1


@pytest.mark.parametrize("staging", ("queries", "own", "none"))
def test_one_run_stands_for_all(staging: Staging, seed: int) -> None:
    """Whatever order steps are picked in, the same steps happen, after the same hand-overs."""

    def edges(pick: Pick) -> set[tuple[str, str]]:
        run = trace(sound(staging=staging, dynamic=True), [3, 1], pick)
        return {(str(run.steps[a]), str(run.steps[b])) for a, b in run.graph.edges}

    first = edges(round_robin())
    assert len(first) > 100 and all(edges(pick) == first for pick in picks(seed))
