"""Plans of the Blackwell backward by pairs of CTAs: the kernel's pipeline, proved and broken; when it is
chosen."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from itertools import product

import pytest
import torch
from barrier_counts import counts_of
from blackwell_plans import awaits_nothing, broken, dropped, edges, ordered, refuses_columns, wrong_counts
from checked_plans import plan_backward, sizes_of

from fa4flex.codegen.analyze.facts import Facts
from fa4flex.errors import UnsupportedError
from fa4flex.kernels.bwd_sm100.config import ROWS
from fa4flex.kernels.bwd_sm100.two_cta import roles
from fa4flex.kernels.bwd_sm100.two_cta.plan import TwoCtaPlan, plan_two_cta
from fa4flex.kernels.plan.pairs import THERE
from fa4flex.kernels.plan.problem import Problem
from fa4flex.kernels.plan.request import Request
from fa4flex.kernels.plan.sharing import lifetimes
from fa4flex.kernels.plan.signals import arrivals_of
from fa4flex.kernels.plan.sizes import Sizes
from fa4flex.kernels.plan.target import SM100A
from fa4flex.kernels.plan.topology import Event
from fa4flex.kernels.plan.verify import at_random, round_robin, simulate, trace
from fa4flex.runtime.call import NO_LENGTHS, Call, SequenceLengths
from fa4flex.runtime.key_sources import Contiguous

WIDTHS = ((64, 64), (64, 128), (128, 64), (128, 128))
STEPS = ([1], [2], [5])
"""Query tiles that a CTA pair visits."""


@cache
def planned(d: int = 128, dv: int = 128) -> TwoCtaPlan:
    plan = plan_two_cta(Request(Facts(), Problem(d, dv), SM100A))
    plan.check()
    return plan


@pytest.mark.parametrize("widths", WIDTHS)
def test_every_plan_runs(widths: tuple[int, int], seed: int) -> None:
    plan = planned(*widths)
    plan.check()
    for i, steps in enumerate(([1], [2], [4])):
        assert simulate(plan.topology, steps, at_random(seed + i)) > 0
    assert all(lifetimes(plan.topology, plan.columns).nodes[c]["read"] for c in (("dQ", 2), ("dV", 2)))


def test_one_run_stands_for_all(seed: int) -> None:
    pipeline = planned().topology
    first = edges(trace(pipeline, [3], round_robin()))
    assert len(first) > 600
    assert edges(trace(pipeline, [3], at_random(seed))) == first


def test_products_are_issued_in_the_stated_order() -> None:
    events = planned().topology.role("multiply").run([3])
    order = [f"{e.target} {e.tile}" for e in events if e.action == "issue" and " 1" not in e.target]
    here = [name.replace(" 0 0 ", " ") for name in order if THERE not in name]
    begin = "S 0, dP 0, dV 0"
    middle = "".join(f", S {j}, dK {j - 1}, dP {j}, dQ {j - 1}, dV {j}" for j in (1, 2))
    assert here == f"{begin}{middle}, dK 2, dQ 2".split(", ")
    assert len(order) == 2 * len(here)


def test_counts_are_the_kernels() -> None:
    plan = planned()
    pipeline = plan.topology
    table = roles.barrier_table(plan.config())
    counts = counts_of(table) | counts_of(table, 1)
    freed = {"freed": 32, "freed there": 32}  # tensor memory's own
    assert counts | freed == arrivals_of(pipeline)
    # Here the other CTA's warps arrive; there, one arrival announces their bytes.
    come = next(barrier for barrier in pipeline.mbarriers if barrier.name == "ds_come")
    assert come.arrivals == 16 and counts["ds_come"] == counts["ds_come there"] == 9
    assert counts["p_full"] == 16 and counts["dq_empty"] == 8 and counts["lse2 there empty"] == 8
    pipeline = plan.of_one_cta
    for named in table.named:
        here = [r for r in pipeline.roles if r.uses("sync", named.name) or r.uses("give", named.name)]
        assert sum(32 * role.warps for role in here) == named.threads


def test_barriers_that_the_kernel_does_not_have_are_not_missing() -> None:
    run = trace(planned().topology, [4], round_robin())
    for half, c, j in product((0, 1), ("", THERE), (0, 1, 2)):
        assert ordered(run, f"compute {half}{c} read S {half} 1{c} tile {j}", f"product S 0 0 tile {j + 1}")
        assert ordered(run, f"product dV tile {j}", f"product S {half} 0{c} tile {j + 1}")
        for there, maker in product(("", THERE), (0, 1)):
            name = f"write shared dS {half} of {maker}{there} tile {j + 1}"
            assert ordered(run, f"product dQ{c} tile {j}", name)
        if j:
            assert ordered(run, f"read dQ{c} tile {j - 1}", f"product S {half} 1{c} tile {j + 1}")


def test_dropped_events_are_found() -> None:
    """Some of them; dV and dK are read by two, so that one read less leaves them read."""
    pipeline = planned().topology
    assert not broken(pipeline, *STEPS)
    every = [x for x in dropped(pipeline) if matters(*x[:2])]
    assert len(every) > 250
    for event, where, less in random.sample(every, 12):
        assert broken(less, *STEPS), f"{event} of {where}"


@pytest.mark.exhaustive
def test_every_dropped_event_is_found() -> None:
    for event, where, less in dropped(planned().topology):
        assert not matters(event, where) or broken(less, *STEPS), f"{event} of {where}"


def matters(event: Event, where: str) -> bool:
    """True if the simulation finds it missing. Not what dQ(j - 1) awaits: warps that arrive at p_full of step
    j have written the dS before, and that some may reach the other CTA later is not simulated. Executed
    without that wait, the kernel's PTX has races (simulator/test_blackwell_backward_mutants.py). Nor what is
    awaited of a step before the first."""
    if event == Event("await", "ds_come", -1) or awaits_nothing(event, where):
        return False
    name = event.target.removesuffix(THERE)
    return event.action != "read" or name not in ("dV", "dK", "lse2", "delta")


def test_wrong_counts_are_found() -> None:
    wrong = wrong_counts(planned().topology)
    assert len(wrong) > 80 and all(broken(one, *STEPS) for one in random.sample(wrong, 20))


SHARED = (("dQ", "S 0 0"), ("dQ", "dP 0 1"), ("dK", "dP 0 0"), ("P 0 0", "S 1 1"), ("dS 1 0", "dP 0 0"))


@pytest.mark.parametrize(("moved", "to"), SHARED)
def test_columns_that_live_at_once_are_not_shared(moved: str, to: str) -> None:
    """dQ(j) and P(j + 1), say, which the first columns of scores hold."""
    refuses_columns(planned(), moved, to)


def test_a_pair_is_chosen_where_it_pays() -> None:
    many, sizes = Problem(128, 128, met_alike=True), sizes_of(kv_len=1025)
    assert plan_backward(Facts(), many, SM100A, sizes=sizes).tile == (128, 256)
    for alike in (
        {"mask_form": "spans"},
        {"lengths": "used"},
        {"lengths": "packed"},
        {"deterministic": True},
        {"sloped": True, "gradients": ((0, "sum"),)},
    ):
        problem = replace(many, **alike)  # type: ignore[arg-type]
        assert plan_backward(Facts(), problem, SM100A, sizes=sizes).tile == (128, 256)
    for other in (
        {"met_alike": False},
        {"head_dim": 64},
        {"head_dim_v": 96},
        {"long_scores": True},
    ):
        problem = replace(many, **other)  # type: ignore[arg-type]
        assert plan_backward(Facts(), problem, SM100A, sizes=sizes).tile == (128, 128)
    assert plan_backward(Facts(), many, SM100A, sizes=sizes_of(kv_len=1024)).tile == (128, 128)


def test_how_many_keys_a_sequence_has() -> None:
    """Shapes alone tell how many: they decide what is launched, and lengths change under CUDA graphs."""
    ends, used = torch.tensor([0, 5, 5, 3000]), torch.tensor([7, 9, 11])
    q, k = torch.empty(3000, 4, 64), torch.empty(6300, 2, 64)
    rest = (), 1.0, True, ("lse",)
    for lengths, kv_len in (
        (SequenceLengths(ends, ends), 2100),
        (SequenceLengths(ends, ends, used, used), 2100),
    ):
        usual = Sizes(Call(q, Contiguous(k, k), (), None, lengths, *rest).inputs(q.dtype)).usual_keys
        assert usual.at_most(kv_len) and usual.more_than(kv_len - 1)
    q, k = torch.empty(3, 4, 70, 64), torch.empty(3, 2, 2050, 64)
    for lengths, kv_len in (
        (NO_LENGTHS, 2050),
        (SequenceLengths(seqused_q=used), 2050),
        (SequenceLengths(seqused_k=used), 1025),
    ):
        usual = Sizes(Call(q, Contiguous(k, k), (), None, lengths, *rest).inputs(q.dtype)).usual_keys
        assert usual.at_most(kv_len) and usual.more_than(kv_len - 1)


@pytest.mark.parametrize("width", (64, 128))
def test_turns_are_of_single_warps(width: int) -> None:
    """An eighth of what is handed on of a step's dQ, which is 32 rows of half of the columns."""
    config = planned(width, width).config()
    eighth = config.dq_order.size // config.dq_parts
    parts: dict[int, set[tuple[int, bool]]] = {}
    for number in range(config.dq_order.size):
        row, column = config.dq_order.place(number)
        parts.setdefault(number // eighth, set()).add((row // 32, column < width // 2))
    assert [len(part) for part in parts.values()] == [1] * 8 == [1] * (ROWS // config.turn_rows)


def test_what_pairs_do_not_have() -> None:
    with pytest.raises(UnsupportedError, match="the kernel of one CTA alone"):
        plan_two_cta(Request(Facts(), Problem(192, 128), SM100A))


def test_a_plan_says_what_it_is() -> None:
    told = planned(64, 64).explain()
    for words in ("128 queries x 256 keys", "by a pair of CTAs", "tell:", "k_t: 1 stage"):
        assert words in told
    assert f"compute 0{THERE}" not in told
    narrow, whole = planned(40, 64).config(), planned(64, 64).config()
    assert narrow.depths == (3, 4) and narrow == replace(whole, depths=(3, 4))
    assert planned().memory.total <= SM100A.shared_memory
