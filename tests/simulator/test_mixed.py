"""Mixed batches over pages on the simulated GPU: sequences with few query rows, whose heads are packed, and
chunks of queries in one launch; right against the oracle under random timings, with every kind of mod."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from executed import Compared, Trace, comparing
from helpers import drawn_timing
from paged_pools import Drawn, Size, compare, drawn
from test_forward_paged import chunks, expected
from torch import Tensor

import fa4flex
import ptxsim
from fa4flex import Schedule, Sinks
from fa4flex.kernels.mixed_sm90.plan import MixedPlan
from fa4flex.kernels.plan.arguments import COUNTERS
from fa4flex.kernels.plan.signals import rows_of
from fa4flex.kernels.plan.topology import Event, NamedBarrier, Topology
from fa4flex.runtime.cuda.launches import ready
from fa4flex.variants import alibi, causal, sliding_window, softcap
from ptxsim.model.events import Loaded
from ptxsim.state.cta import Warp

TABLE, SLOPES = torch.randn(8, 1400) / 2, torch.rand(3, 8)
CAUSAL = fa4flex.compile(mask=causal)


def relative(score, b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
    return score + TABLE[h, q_idx - kv_idx + 700]


def by_sequence(score, b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
    return score * SLOPES[b % 3, h] + (h % 3) * 0.1 * kv_idx.cos()


MODS: dict[str, dict[str, Any]] = {
    "none": {},
    "alibi, window": {"score_mod": alibi, "mask": causal & sliding_window(90)},
    "softcap, sinks": {
        "score_mod": softcap(20.0),
        "mask": causal,
        "sinks": Sinks(torch.tensor([0.5, 3.0, -torch.inf, 1.0, 9.0, -2.0, 0.0, 1.0])),
    },
    "relative": {"score_mod": relative, "mask": causal},
    "by sequence": {"score_mod": by_sequence, "mask": causal},
}


def attend(attn: fa4flex.Attention, given: Drawn, sms: int) -> tuple[Tensor, Tensor]:
    timing, seed = drawn_timing()
    with torch.no_grad(), ptxsim.device("sm_90a", seed, timing, sms=sms) as gpu:
        out, lse = given(attn, return_lse=True)
    others = "sequences", "combine"
    kernels = [result.kernel for result in gpu.results if not any(x in result.kernel for x in others)]
    assert len(kernels) == 1 and "mixed_sm90" in kernels[0], kernels
    found = [finding for finding in gpu.findings if not expected(finding)]
    assert not found, f"{timing} {seed}: {gpu.report()}"
    return out, lse


def check(attn: fa4flex.Attention, given: Drawn, sms: int = 2) -> None:
    compare(attn, given, *attend(attn, given, sms))


def mixed(heads: int = 8, kv_heads: int = 2, d: int = 64, **size: Any) -> Drawn:
    """Sequences of any lengths: with one query, some, so many that they just are few or many, and none."""
    most = 64 * kv_heads // heads
    lengths = tuple(random.choices((0, 1, 63, 64, 65, 128, 200, 257, 400), k=6))
    queries = [1, *random.choices((0, 1, 1, 2, most, most + 1, 130), k=4), 129]
    random.shuffle(queries)
    given = drawn(Size(heads=heads, kv_heads=kv_heads, lengths=lengths, d=d, dv=d, **size))
    taken = tuple(random.randint(0, n) for n in queries) if random.random() < 0.3 else None
    return chunks(given, tuple(queries), taken)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == "softcap, sinks" else pytest.mark.exhaustive) for n in MODS]
)
def test_variant_draws(name: str) -> None:
    check(fa4flex.compile(**MODS[name]), mixed())


@pytest.mark.exhaustive
@pytest.mark.parametrize("heads, kv_heads", [(2, 2), (4, 1), (7, 1), (12, 4)])
@pytest.mark.parametrize("d, page_size", [(64, 64), (96, 24), (128, 8), (128, 256), (128, 1), (64, 3)])
def test_heads_and_widths_draw(heads: int, kv_heads: int, d: int, page_size: int) -> None:
    check(CAUSAL, mixed(heads, kv_heads, d, page_size=page_size))


def graph_of_few(plan: MixedPlan) -> Topology:
    """The graph of tiles of few rows, with the turn that a block opens and tiles of many rows take."""
    *producers, first, second = plan.few.roles
    opening = Event("give", "turn 0"), *first.opening
    opens, turn = replace(first, opening=opening), NamedBarrier("turn 0", 1, 256)
    return replace(plan.few, roles=(*producers, opens, second), barriers=(*plan.few.barriers, turn))


def test_few_alone_draw(launches: Compared) -> None:
    """Sequences that decode alone, more than a warp has lanes: what blocks do at barriers is the graph's."""
    lengths = tuple(random.choices((0, 1, 40, 130, 300), k=40))
    given = drawn(Size(heads=4, kv_heads=1, lengths=lengths))
    unchecked = patch.object(MixedPlan, "check", lambda plan: None)  # nobody takes the turn
    with patch.object(MixedPlan, "topology", property(graph_of_few)), unchecked:
        check(CAUSAL, chunks(given, (1,) * 40), sms=3)
    assert launches.launches


def test_many_alone(launches: Compared) -> None:
    with patch.object(MixedPlan, "topology", MixedPlan.many):
        check(CAUSAL, chunks(drawn(Size(lengths=(150, 33))), (130, 70)))
    assert launches.launches


def test_chunks_alone_take_all_heads_of_the_longest_tile_first() -> None:
    given = chunks(drawn(Size(heads=4, kv_heads=2, lengths=(384,))), (384,))
    with patch.object(MixedPlan, "topology", MixedPlan.many), comparing(keep=True) as compared:
        check(CAUSAL, given, sms=1)
    (run,) = compared.kept
    keys = rows_of(run.topology, run.trace.signals(run.topology, (0, 0, 0)))
    assert keys == [3] * 4 + [2] * 4 + [1] * 4


def test_a_block_takes_its_next_tile_when_it_has_asked_for_all_keys() -> None:
    """One that is taken before waits for the end of this one, while other blocks run out of tiles."""
    counters, taken, note = torch.zeros(COUNTERS, dtype=torch.int32), [], Trace.note

    def noted(trace: Trace, warp: Warp, event: Any) -> None:
        if isinstance(event, Loaded) and warp.index == 0:
            taken.append(int(counters[0]))
        note(trace, warp, event)

    given = chunks(drawn(Size(heads=1, kv_heads=1, lengths=(500,))), (128,))
    told = patch.object(ready, "counters", lambda device: counters), patch.object(Trace, "note", noted)
    with patch.object(MixedPlan, "topology", MixedPlan.many), told[0], told[1]:
        check(CAUSAL, given, sms=1)
    assert taken and not any(taken)


def test_kinds_take_turns() -> None:
    """A block has tiles of both kinds, one after the other, and rings go on where they were."""
    given = drawn(Size(heads=4, kv_heads=2, lengths=(300, 150, 260, 33)))
    check(CAUSAL, chunks(given, (1, 200, 3, 1)), sms=1)


BATCHES: dict[str, tuple[tuple[int, ...], int]] = {
    "both kinds": ((1, 130, 2, 70), 2),
    "few rows alone": ((1, 2, 1, 1, 3), 3),
    "many rows alone": ((130, 70), 2),
    "more blocks than tiles": ((1, 70), 9),
    "fewer of few rows than blocks": ((1, 200, 200), 4),
    "fewer of many than blocks": ((1, 40, 1, 1, 1), 4),
    "no query is used": ((3, 70), 2),
}
"""Queries of each sequence, and multiprocessors."""


@pytest.mark.slow
def test_launches_leave_their_counters_at_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """One after another on the same counters, as replays of a CUDA graph; a tile that was left out, or taken
    twice, would be wrong."""
    counters = torch.zeros(COUNTERS, dtype=torch.int32)
    monkeypatch.setattr(ready, "counters", lambda device: counters)
    for name, (queries, sms) in BATCHES.items():
        lengths = tuple(n + random.choice((0, 30)) for n in queries)
        given = drawn(Size(heads=2, kv_heads=1, lengths=lengths))
        taken = (0,) * len(queries) if name == "no query is used" else None
        # Programs are made for a chip, and not for another: each has one of its own.
        attn = fa4flex.compile(mask=causal, schedule=Schedule(split=(1 << 24) + sms))
        check(attn, chunks(given, queries, taken), sms)
        assert not counters.any(), name


def test_who_asks_for_an_order_gets_the_kernel_for_many_rows() -> None:
    attn = fa4flex.compile(mask=causal, schedule=Schedule(next_tile="counter"))
    given = chunks(drawn(Size(lengths=(40, 33))), (1, 2))
    with torch.no_grad(), ptxsim.device("sm_90a") as gpu:
        out, lse = given(attn, return_lse=True)
    compare(attn, given, out, lse)
    assert any("fwd_sm90" in result.kernel for result in gpu.results)


@pytest.mark.exhaustive
def test_float16_draws() -> None:
    given = mixed(d=128)
    half = replace(given, **{name: getattr(given, name).to(torch.float16) for name in ("q", "k", "v")})
    check(CAUSAL, half)
