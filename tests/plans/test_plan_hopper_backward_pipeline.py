"""Pipeline of the Hopper backward, proved and broken."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from functools import cache
from itertools import product

import pytest
from barrier_counts import counts_of
from blackwell_plans import broken, dropped, edges, fault_of, find, moved, ordered, wrong_counts
from broken_graphs import with_role
from hopper_backward_plans import BY_DS, FEW_KEYS, FEW_TILES, LARGE, LIGHT, WIDTHS, planned

from fa4flex.kernels.bwd_sm90 import roles
from fa4flex.kernels.bwd_sm90.plan import HopperBackwardPlan
from fa4flex.kernels.plan.problem import Problem
from fa4flex.kernels.plan.signals import arrivals_of
from fa4flex.kernels.plan.target import SM90A
from fa4flex.kernels.plan.topology import Event, Topology
from fa4flex.kernels.plan.verify import at_random, round_robin, simulate, trace

NARROW = Problem(64, 64)
KINDS = {
    "two stages of dQ": NARROW,
    "one stage of dQ": Problem(128, 128),
    "sums cleared": Problem(64, 64, mask_form="queries"),
    "sums cleared, one stage of dQ": LIGHT,
    "a block per tile": Problem(64, 64, long_scores=True),
    "ordered sums": Problem(64, 64, deterministic=True),
    "ordered sums, one stage of dQ": Problem(128, 128, deterministic=True),
    "copies of dS": Problem(64, 64, deterministic=True, gradients=((0, "once"),)),
    "dQ stored": Problem(128, 128),
    "few tiles": Problem(64, 64),
    "few tiles, columns": Problem(128, 128),
    "columns": Problem(256, 256),
    "products": Problem(192, 192),
    "products, K in shared memory": Problem(192, 192, long_scores=True),
    "persistent products": Problem(160, 160),
    "products of pairs": Problem(192, 192),
}
KIND = pytest.mark.parametrize("kind", KINDS)


PAIRS = "products of pairs"
"""Overlaps where dK leaves by the memory of dS."""


SIZES = {"dQ stored": FEW_KEYS, "few tiles": FEW_TILES, "few tiles, columns": FEW_TILES}
"""Sizes of kinds that these decide."""


def of_kind(kind: str) -> HopperBackwardPlan:
    return planned(KINDS[kind], 192 * (kind == PAIRS), SIZES.get(kind, LARGE))


@cache
def sound(kind: str) -> Topology:
    return of_kind(kind).topology


@pytest.mark.parametrize("width", [64, 96, 192, 256])
def test_ragged_batches_have_the_pipeline_of_dense_ones(width: int) -> None:
    """TMA ends what ends within a tile."""
    for paired in (0, 192):
        dense, packed, used = (
            planned(Problem(width, width, lengths=lengths), paired).topology  # type: ignore[arg-type]
            for lengths in ("dense", "packed", "used")
        )
        assert dense == packed == used


def works_of(pipeline: Topology) -> tuple[list[int], ...]:
    """Steps of the tiles of keys that a block takes: few and many, more than rings hold, and none."""
    return ([1], [5], [0]) if pipeline.one_tile else ([1, 0, 5, 2], [0, 3])


@pytest.mark.parametrize("width", WIDTHS)
def test_every_pipeline_runs(width: int, seed: int) -> None:
    for i, width_v in enumerate(WIDTHS):
        for more in ({}, {"lengths": "used", "mask_form": "tables"}, {"gradients": ((0, "once"),)}):
            plan = planned(Problem(width, width_v, **more))  # type: ignore[arg-type]
            plan.check()
            for works in works_of(plan.topology):
                assert simulate(plan.topology, works, at_random(seed + i)) > 0


@KIND
def test_one_run_stands_for_all(kind: str, seed: int) -> None:
    pipeline = sound(kind)
    for works in works_of(pipeline):
        first = edges(trace(pipeline, works, round_robin()))
        assert len(first) > 20 and edges(trace(pipeline, works, at_random(seed))) == first


@pytest.mark.parametrize(
    ("kind", "role", "order"),
    [
        ("two stages of dQ", "consumer 1", "S dP dV dQ dK"),
        ("columns", "consumer 1", "S dP dV dK dQ"),
        ("products", "consumer 0", "S dV dQ"),
        ("products", "consumer 1", "dP dQ dK"),
        ("products of pairs", "consumer 0", "S dV"),
    ],
)
def test_products_are_issued_in_the_stated_order(kind: str, role: str, order: str) -> None:
    events = sound(kind).role(role).run([2])
    issued = [e.target for e in events if e.action == "issue"]
    assert issued == order.split() * 2
    finished = [e.target for e in events if e.action == "finish"]
    assert finished == order.split() * 2


@KIND
def test_counts_are_the_kernels(kind: str) -> None:
    plan = of_kind(kind)
    config, pipeline = plan.config(), plan.of_one_cta
    table = roles.barrier_table(config)
    counts = counts_of(table) | (counts_of(table, 1) if config.ctas > 1 else {})
    assert counts == arrivals_of(plan.topology)
    unused = 0 if plan.persistent else 3  # of K and V, and of the next tile's number
    assert pipeline.mbarrier_count + unused == table.count
    numbers = {n: b.name for b in pipeline.barriers for n in b.numbers}
    for w, stage in product(range(config.dq_parts), range(config.dq_stages)):
        part = f" {w}" if config.ctas == 1 else ""
        assert numbers[roles.DQ_FULL.at(w, stage)] == f"dq_full{part}"
        assert numbers[roles.DQ_EMPTY.at(w, stage)] == f"dq_empty{part}"
    assert all(numbers[roles.STORED.at(w)] == f"stored {w}" for w in range(config.consumers))
    assert max(numbers) < SM90A.named_barriers and len(numbers) == sum(b.stages for b in pipeline.barriers)
    assert plan.memory["dq"].size == 4 * config.dq_room * config.dq_parts * config.dq_stages
    for ring, statistic in (("q", "lse2"), ("dout", "delta")):
        assert pipeline.ring(ring).beside == ((statistic, 4 * config.tile_m),)


def test_barriers_that_the_kernel_does_not_have_are_not_missing() -> None:
    for kind in ("two stages of dQ", "one stage of dQ", "columns"):
        run = trace(sound(kind), [6], round_robin())
        for w, by, j in product((0, 1), (0, 1), (0, 1, 2)):
            assert ordered(run, f"consumer {by} finish dQ tile {j}", f"write shared dS {w} tile {j + 2}")
            assert ordered(run, f"the store of dq {w} tile {j}", f"write dq {w} tile {j + 2}")


def test_shown_probabilities_are_read_before_the_next_ones_are_written() -> None:
    """P has one stage, without a barrier of its own; and K and V are in registers before dK and dV take their
    places in shared memory."""
    run = trace(sound("products"), [6], round_robin())
    for j in range(5):
        assert ordered(run, f"consumer 0 write shared P 0 tile {j}", f"consumer 1 read shared P 0 tile {j}")
        assert ordered(run, f"read shared P 0 tile {j}", f"write shared P 0 tile {j + 1}")
    for j in range(4):
        assert ordered(run, f"consumer 0 finish dQ tile {j}", f"write shared dS 1 tile {j + 2}")
    assert ordered(run, "consumer 1 read v tile 0", "consumer 0 write dV rows 0 tile 0")
    assert ordered(run, "consumer 0 finish dQ tile 5", "consumer 1 write dK rows 1 tile 0")


def test_what_the_other_cta_sends_is_read_before_the_next_one_comes() -> None:
    """Its dS has two stages, and dQ of a step is multiplied in the next one; other keys come where V was."""
    run = trace(sound(PAIRS), [6], round_robin())
    for c, other in (("", " there"), (" there", "")):
        for j in range(4):
            read = f"consumer 1{c} finish dQ{c} tile {j}"
            assert ordered(run, read, f"exchange{other} load ds_peer{c} tile {j + 2}")
            assert ordered(run, read, f"consumer 1{c} write shared dS{c} tile {j + 2}")
            assert ordered(run, f"consumer 1{c} read shared P{c} tile {j}", f"write shared P{c} tile {j + 1}")
        assert ordered(run, f"consumer 1{c} read v{c} tile 0", f"exchange{c} load k_peer{c} tile 0")
        assert ordered(run, f"consumer 1{c} finish dQ{c} tile 5", f"write dV rows{c} tile 0")


@KIND
def test_every_dropped_event_is_found(kind: str) -> None:
    pipeline = sound(kind)
    works = works_of(pipeline)
    assert not broken(pipeline, *works)
    # Where warpgroups do not share out products, they do the same; and so do CTAs of a pair.
    alike = () if "products" in kind else ("consumer 1",)
    alike += tuple(role.name for role in pipeline.roles if role.cta)
    every = [x for x in dropped(pipeline, *alike) if matters(*x[:2], kind)]
    assert len(every) > 70
    for event, where, less in every:
        assert broken(less, *works), f"{event} of {where}"


def matters(event: Event, where: str, kind: str) -> bool:
    """True if the simulation finds one less. Warps of a warpgroup, which gather at `stored`, or at `scores`
    where there is one, are one role here; what comes for nothing is said to be read, and others read the next
    number, too. A drain is followed by others: see below. What is announced is part of what the other CTA
    sends here, and dS is read as it is sent. Where products are shared out, the second warpgroup reads K
    after it has met the first one, which has waited, too; and so do both where dK leaves by the memory of dS,
    for which they meet when K and V have come."""
    told = event.action, event.target
    alone = ("scores",) * (kind == "few tiles")
    gathers = event.action == "sync" and event.target.startswith(("stored", *alone))
    read = told in (("read", "k"), ("read", "v"), ("read", "next"), ("store", "shared dS 0"))
    others = "k" if "products" in kind else "kv" if BY_DS in sound(kind).overlaps else ""
    by = "consumer" if "v" in others else "consumer 1"
    spare = event.action == "wait" and event.target in others and where.startswith(by)
    sent = told == ("read", "shared dS")
    spare = spare or sent or event.action in ("drain", "announce")
    return not gathers and not read and not spare


@KIND
def test_memory_is_not_overwritten_while_it_is_stored(kind: str) -> None:
    """Without the drains of a step, or of what is staged for global memory."""
    pipeline = sound(kind)
    for name in ("writer", "consumer 0"):
        role = pipeline.role(name)
        parts = {when: tuple(e for e in part if e.action != "drain") for when, part in role.parts.items()}
        if any(e.action == "drain" for e in role.events):
            less = with_role(pipeline, replace(role, **parts))  # type: ignore[arg-type]
            assert "the store of" in broken(less, *works_of(pipeline))


@KIND
def test_wrong_counts_are_found(kind: str) -> None:
    pipeline = sound(kind)
    wrong = wrong_counts(pipeline)
    assert len(wrong) >= 12
    assert all(broken(one, *works_of(pipeline)) for one in random.sample(wrong, 8))


# kind, role, part, event, the event to whose place it goes, and what is said
MOVED = (
    # used before it is there
    ("two stages of dQ", "consumer 0", "body", "issue dQ", "sync scores", "shared dS 1 tile . before"),
    ("columns", "consumer 0", "body", "issue dV", "sync scores", "shared P 1 tile . before it is there"),
    ("products", "consumer 1", "body", "read shared P 0", "take weighed", "shared P 0 tile . before it is"),
    ("products", "consumer 0", "body", "issue dQ", "sync scores", "shared dS 1 tile . before it is there"),
    ("one stage of dQ", "consumer 1", "body", "issue S", "wait q", "q tile . before it is there"),
    ("one stage of dQ", "consumer 1", "first", "issue dP", "wait k", "v tile 0 before it is there"),
    ("two stages of dQ", "writer", "body", "store dq 0", "take dq_full 0", "dq 0 tile . before it is there"),
    ("two stages of dQ", "consumer 0", "body", "read dQ of 0", "finish dQ", "dQ of 0 tile . before it is"),
    ("two stages of dQ", "consumer 0", "body", "give dq_full 0", "write dq 0", "dq 0 tile . before it is"),
    # overwritten before it is read
    ("two stages of dQ", "consumer 0", "body", "release dout", "finish dV", "frees dout tile . in use"),
    ("two stages of dQ", "consumer 0", "body", "release q", "finish dK", "frees q tile . in use"),
    ("one stage of dQ", "writer", "body", "give dq_empty 0", "drain dq 0", "the store of dq 0 .* may still"),
    ("two stages of dQ", "consumer 0", "body", "write dq 0", "take dq_empty 0", "while the store of dq 0"),
    ("one stage of dQ", "consumer 0", "last", "write dV rows 0", "take dq_read 0", "while the store of dq 0"),
    ("one stage of dQ", "consumer 0", "last", "write dK rows 0", "sync scores", "multiply shared dS"),
    ("two stages of dQ", "consumer 0", "last", "write dK rows 0", "take dq_empty 0", "store of dq 0"),
    (
        "persistent products",
        "consumer 0",
        "last",
        "write dV rows 0",
        "take dq_read 0",
        "nobody has read dq 0",
    ),
    ("columns", "consumer 0", "body", "release q", "sync scores", "q tile . while the product dK tile ."),
    ("columns", "consumer 0", "last", "write dK rows 0", "sync scores", "while the product dQ .* multiply k"),
    ("products", "consumer 0", "body", "give weighed", "write shared P 0", "shared P 0 tile . before it is"),
    ("products", "consumer 1", "body", "read shared P 0", "sync scores", "shared P 0"),
    (
        "products",
        "consumer 1",
        "last",
        "write dK rows 1",
        "sync scores",
        "while the product dQ .* multiply k",
    ),
    (PAIRS, "consumer 1", "body", "issue dQ", "wait ds_peer", "ds_peer tile . before it is there"),
    (PAIRS, "consumer 1", "body", "release ds_peer", "finish dQ", "frees ds_peer tile . in use"),
    (
        PAIRS,
        "exchange",
        "body",
        "read shared dS",
        "take ds_shared",
        "shared dS tile . before it is there",
    ),
    (
        PAIRS,
        "exchange",
        "first",
        "load k_peer",
        "await v_kept",
        "v tile 0 while the copy of k_peer tile 0|v tile 0 before",
    ),
    ("two stages of dQ", "producer", "first", "load v", "await keys_empty", "v full|v tile . while"),
)


@pytest.mark.parametrize("case", MOVED, ids=lambda case: f"{case[1]}: {case[3]}, {case[0]}")
def test_an_event_out_of_place_is_named(case: tuple[str, ...]) -> None:
    kind, role, when, event, other, words = case
    pipeline = sound(kind)
    at, to = (find(pipeline, role, when, wanted) for wanted in (event, other))
    wrong = moved(pipeline, role, when, at, to)
    assert re.search(words, fault_of(wrong, *works_of(pipeline))), fault_of(wrong, *works_of(pipeline))


def test_a_deadlock_names_who_waits_for_what() -> None:
    pipeline = sound("two stages of dQ")
    role = pipeline.role("consumer 0")
    body = tuple(e for e in role.body if e.target != "dq_full 0")
    fault = fault_of(with_role(pipeline, replace(role, body=body)), [5])
    assert re.match("deadlock: .*writer: take dq_full 0 tile 1", fault), fault


def test_graph_and_words() -> None:
    plan = planned(NARROW)
    graph = plan.topology.graph
    assert graph.edges["producer", "q"] == {"full": 1, "bytes": 128 * 64 * 2 + 4 * 128}
    assert graph.edges["consumer 1", "keys_empty"] == {"arrivals": 4}
    assert graph.edges["consumer 0", "dq_full 0"] == graph.edges["dq_empty 0", "consumer 0"]
    assert graph.nodes["dq_full 1"] == {"kind": "barrier", "number": 3, "threads": 160}
    for words in ("k: 1 stage of 16384 B; full after 1 arrival and 16384 B, freed by keys_empty", "writer:"):
        assert words in plan.explain()
