"""Kernels do at barriers what the graphs of their plans say; a kernel or a graph that is changed does not.

A graph is proved (tests/plans); what executed warps did is compared with it, signal by signal. conftest.py
does so for all launches of this folder; here are some of each pipeline, and changes of them.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
from blackwell import planned
from broken_graphs import with_role
from executed import Compared, Executed, Trace, comparing, differences, noting
from pairs import few_tiles, hopper_pairs, in_pairs

import fa4flex
import ptxsim
from fa4flex import Varlen
from fa4flex.kernels.bwd_sm90.consumer import Consumer
from fa4flex.kernels.bwd_sm90.roles import DQ_EMPTY, DQ_FULL
from fa4flex.kernels.bwd_sm100.mma import Mma
from fa4flex.kernels.common.barriers import arrive, sync
from fa4flex.kernels.common.transfer import stage_by_fours
from fa4flex.kernels.plan.signals import expected
from fa4flex.kernels.plan.topology import Topology
from fa4flex.primitives.schedule import Schedule
from fa4flex.variants import causal
from ptxsim.run.launch import Shape, execute, module_of, program_of
from ptxsim.run.timing import Timing
from ptxsim.watch.findings import Fault


@dataclass(frozen=True)
class Case:
    """A call on a simulated GPU of one multiprocessor, whose blocks take many tiles where they can.

    lengths    of sequences, one after another, of queries and keys; otherwise q_len and kv_len
    """

    arch: str
    backward: bool = False
    heads: tuple[int, int] = (2, 1)
    q_len: int = 200
    kv_len: int = 330
    dims: tuple[int, int] = (64, 64)
    masked: bool = False
    lengths: tuple[tuple[int, int], ...] = ()
    schedule: Schedule = Schedule()
    pair: bool = False
    few_tiles: bool = False
    score_mod: Any = None

    def run(self) -> None:
        (h, kv_heads), (d, dv) = self.heads, self.dims
        shapes: list[tuple[int, ...]] = [(1, h, self.q_len, d), (1, kv_heads, self.kv_len, d)]
        shapes.append((*shapes[1][:-1], dv))
        varlen = None
        if self.lengths:
            ends = [torch.tensor([0, *x]).cumsum(0).int() for x in zip(*self.lengths, strict=True)]
            varlen = Varlen(*ends)
            q_rows, k_rows = (int(x[-1]) for x in ends)
            shapes = [(q_rows, h, d), (k_rows, kv_heads, d), (k_rows, kv_heads, dv)]
        q, k, v = (torch.randn(shape).bfloat16().requires_grad_(self.backward) for shape in shapes)
        mask = causal if self.masked else None
        attn = fa4flex.compile(score_mod=self.score_mod, mask=mask, schedule=self.schedule)
        with contextlib.ExitStack() as stack:
            pairs = hopper_pairs(self.pair) if self.arch == "sm_90a" else in_pairs()
            if self.pair or self.arch == "sm_90a":
                stack.enter_context(pairs)
            stack.enter_context(few_tiles(self.few_tiles))
            stack.enter_context(planned(1) if self.arch == "sm_100a" else contextlib.nullcontext())
            stack.enter_context(ptxsim.device(self.arch, random.randrange(99), "late", sms=1))
            out = attn(q, k, v, varlen=varlen)
            if self.backward:
                out.backward(torch.randn_like(out))


RAGGED = ((70, 70), (130, 200), (9, 5), (1, 150))
HOPPER, BLACKWELL = "sm_90a", "sm_100a"
CASES = {
    "fwd_sm90": Case(HOPPER),
    "fwd_sm90 masked": Case(HOPPER, masked=True),
    "fwd_sm90 packed": Case(HOPPER, lengths=RAGGED, dims=(128, 128)),
    "fwd_sm90 wide": Case(HOPPER, dims=(256, 256)),
    "bwd_sm90": Case(HOPPER, True, kv_len=200),
    "bwd_sm90 masked": Case(HOPPER, True, masked=True, dims=(128, 128)),
    "bwd_sm90 packed": Case(HOPPER, True, lengths=RAGGED),
    "bwd_sm90 without queries": Case(HOPPER, True, masked=True, kv_len=700, q_len=130),
    "bwd_sm90 few tiles": Case(HOPPER, True, masked=True, few_tiles=True),
    "bwd_sm90 few tiles, columns": Case(HOPPER, True, masked=True, dims=(128, 128), few_tiles=True),
    "bwd_sm90 columns": Case(HOPPER, True, masked=True, dims=(256, 256)),
    "bwd_sm90 products": Case(HOPPER, True, masked=True, dims=(192, 192)),
    "bwd_sm90 pairs": Case(HOPPER, True, masked=True, dims=(192, 192), pair=True),
    "bwd_sm90 pairs without queries": Case(HOPPER, True, masked=True, q_len=70, dims=(160, 160), pair=True),
    "bwd_sm90 products, persistent": Case(HOPPER, True, masked=True, kv_len=200, dims=(160, 160)),
    "bwd_sm90 products, packed": Case(HOPPER, True, lengths=RAGGED, dims=(160, 160)),
    "bwd_sm90 pairs, packed": Case(HOPPER, True, lengths=RAGGED, dims=(192, 192), pair=True),
    "fwd_sm100": Case(BLACKWELL),
    "fwd_sm100 masked": Case(BLACKWELL, masked=True, dims=(128, 128)),
    "fwd_sm100 packed": Case(BLACKWELL, lengths=RAGGED, masked=True),
    "fwd_sm100 wide": Case(BLACKWELL, dims=(192, 128), schedule=Schedule(tile=(128, 128))),
    "fwd_sm100 heads of 256": Case(BLACKWELL, q_len=700, dims=(256, 256), masked=True),
    "fwd_sm100 heads of 256, cancelling": Case(
        BLACKWELL, q_len=700, dims=(256, 256), schedule=Schedule(next_tile="launch_control")
    ),
    "fwd_sm100 heads of 256, packed": Case(BLACKWELL, lengths=RAGGED, masked=True, dims=(256, 256)),
    "fwd_sm100 cancelling": Case(BLACKWELL, schedule=Schedule(next_tile="launch_control")),
    "fwd_sm100 in pairs": Case(BLACKWELL, q_len=700, dims=(128, 128)),
    "fwd_sm100 in pairs, cancelling": Case(
        BLACKWELL, q_len=700, dims=(128, 128), schedule=Schedule(next_tile="launch_control")
    ),
    "one_cta": Case(BLACKWELL, True, kv_len=200),
    "one_cta without queries": Case(BLACKWELL, True, masked=True, kv_len=700, q_len=130),
    "one_cta packed": Case(BLACKWELL, True, lengths=RAGGED, masked=True),
    "two_cta": Case(BLACKWELL, True, kv_len=200, pair=True),
    "two_cta masked": Case(BLACKWELL, True, pair=True, masked=True, q_len=330),
    "wide_heads": Case(BLACKWELL, True, kv_len=100, dims=(192, 128)),
    "two_kernels": Case(BLACKWELL, True, kv_len=100, q_len=200, dims=(256, 256)),
    "two_kernels masked": Case(BLACKWELL, True, dims=(200, 136), masked=True),
    "wide_heads masked": Case(BLACKWELL, True, dims=(160, 96), masked=True),
}
FEW = ("fwd_sm90", "bwd_sm90", "fwd_sm100", "one_cta", "two_cta", "wide_heads", "two_kernels")
"""One of each pipeline."""


@lru_cache
def executed(name: str) -> Executed:
    """The kernel of a pass."""
    with comparing(keep=True) as compared:
        CASES[name].run()
    assert compared.launches == 1 + CASES[name].backward + name.startswith("two_kernels")
    assert not compared.differences, "\n".join(compared.differences)
    return compared.kept[-1]


def check(name: str) -> None:
    run = executed(name)
    assert min(len(run.trace.signals(run.topology, warp)) for warp in busy(run)) > 2


def busy(run: Executed) -> list[tuple[int, int, int]]:
    """A warp of each role."""
    idle = [role for role in run.topology.roles if len(role.events) == 1]
    return [(0, role.cta, role.warp) for role in run.topology.roles if role not in idle]


@pytest.mark.slow
@pytest.mark.parametrize("name", FEW)
def test_a_kernel_does_what_its_graph_says(name: str) -> None:
    check(name)


OTHERS = sorted(CASES.keys() - set(FEW))


@pytest.mark.slow
def test_another_kernel_does_what_its_graph_says() -> None:
    check(random.choice(OTHERS))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", OTHERS)
def test_other_kernels_do_what_their_graphs_say(name: str) -> None:
    check(name)


# --- changed runs --------------------------------------------------------------------------------------


def changes(events: list[Any]) -> Iterator[tuple[list[Any], list[Any]]]:
    """One signal less, or twice, or after the one that follows it: which, and all of them then."""
    for i, event in enumerate(events):
        yield [event], events[:i] + events[i + 1 :]
        yield [event], [*events[:i], event, *events[i:]]
        if i + 1 < len(events) and events[i + 1] != event:
            yield events[i : i + 2], [*events[:i], events[i + 1], event, *events[i + 2 :]]


@pytest.mark.slow
@pytest.mark.parametrize("name", FEW)
def test_every_change_of_a_run_is_found(name: str) -> None:
    """But of waits that may come once more: where each head asks for keys and values."""
    run = executed(name)
    names = run.trace.names(run.topology)
    for warp in busy(run):
        role = next(r for r in run.topology.roles if (r.cta, r.warp) == warp[1:])
        again = {s.at for s in expected(run.topology, role, 0, [1]) if s.again}
        for some, events in random.sample(list(changes(run.trace.warps[warp])), 15):
            if again.isdisjoint(names.get(getattr(event, "key", None)) for event in some):
                changed = Trace({**run.trace.warps, warp: events}, run.trace.made)
                assert list(differences(changed, run.topology, warp)), f"{some} of warp {warp}"


@pytest.mark.parametrize("name", FEW)
def test_every_wrong_count_is_found(name: str) -> None:
    run = executed(name)
    for key in random.sample(sorted(run.trace.names(run.topology)), 5):
        made = {**run.trace.made, key: run.trace.made[key] + 1}
        assert any("arrivals" in x for x in differences(Trace(run.trace.warps, made), run.topology))


# --- changed graphs ------------------------------------------------------------------------------------


def changed_graphs(topology: Topology, rows: list[int]) -> Iterator[tuple[str, Topology]]:
    """One event less, or after the one that follows it, where that changes a role's signals."""
    for role in topology.roles:
        as_it_is = expected(topology, role, 0, rows)
        for when, part in role.parts.items():
            for i, event in enumerate(part):
                less = part[:i] + part[i + 1 :]
                later = (*less[: i + 1], event, *less[i + 1 :])
                for what, events in ((f"without {event}", less), (f"{event} later", later)):
                    other = with_role(topology, replace(role, **{when: events}))  # type: ignore[arg-type]
                    if expected(other, other.role(role.name), 0, rows) != as_it_is:
                        yield f"{what} of {role.name}, {when}", other


@pytest.mark.parametrize("name", FEW)
def test_every_change_of_a_graph_is_found(name: str) -> None:
    """Events that this run has: its tiles have two key tiles at least."""
    run = executed(name)
    every = list(changed_graphs(run.topology, [3, 2]))
    assert len(every) > 40
    for what, other in random.sample(every, 25):
        assert list(differences(run.trace, other)), what


# --- changed kernels -----------------------------------------------------------------------------------

SIGNALS = ("mbarrier.arrive", "bar.sync", "bar.arrive", "barrier.sync", "barrier.arrive", "tcgen05.commit")


def changed(run: Executed, lines: list[str]) -> str:
    """Report on the launch with another PTX text: by the comparison, or by the simulator, where a wait that
    never ends is not in the trace."""
    ptx, at, trace = "\n".join(lines), run.launch, Trace()
    for x in run.arguments:
        if isinstance(x, torch.Tensor) and x.dtype == torch.int32 and x.numel() == 2:
            x.zero_()  # counts tiles; a launch that does not end leaves it as it is
    shape = Shape(at.grid, at.block, at.cluster, at.shared_bytes)
    program = noting(program_of(ptx, at.kernel), trace)
    fault = execute(module_of(ptx), program, shape, at.params, None, Timing("eager", 0)).fault
    return "\n".join(differences(trace, run.topology)) or (fault.text if fault else "")


def signalling(run: Executed) -> list[int]:
    """Lines of its PTX text that signal, but for what all threads do before roles begin."""
    body = program_of(run.launch.ptx, run.launch.kernel).kernel.body
    first = next(i for i, x in enumerate(body) if x.opcode.startswith("setmaxnreg"))
    return [x.line - 1 for x in body[first:] if x.opcode.startswith(SIGNALS) and x.line in run.trace.lines]


@pytest.mark.parametrize("name", FEW)
def test_a_signal_more_or_less_in_a_kernel_is_found(name: str) -> None:
    run = executed(name)
    text = run.launch.ptx.split("\n")
    for line, copies in zip(random.sample(signalling(run), 2), (0, 2), strict=True):
        assert changed(run, [*text[:line], *[text[line]] * copies, *text[line + 1 :]]), text[line]


def hand_over_early(self: Any, mine: Any, collector: Any, parts: Any, count: Any) -> None:
    """Says that dQ is there, and then waits until there is room for it."""
    w, stage = mine.number, count % self.config.dq_stages
    arrive(DQ_FULL, w, stage)
    sync(DQ_EMPTY, w, stage)
    stage_by_fours(parts, mine.shared.dq[None, w, stage], mine.lane, 128)


def free_early(self: Any, given: Any, state: Any, add: Any, zero: Any = 0) -> None:
    """Frees Q before the product that reads it is issued."""
    given.pipes.q.consumer_release(state)
    q = given.operands.q_t[None, None, None, state.index]
    acc = given.base + self.config.memory.dk
    given.products.to_dk.issue(acc, given.operands.ds_t, q, range(8), add, zero)
    self.cluster.commit(given.pipes.dk_full)


def of_its_own(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """No other test has this program: its kernel is not that of others, and what is kept of it not theirs."""
    return score * 0.7319


SWAPPED = (
    ("bwd_sm90", Consumer, "hand_over", hand_over_early, "dq_empty 0", "dq_full 0"),
    ("one_cta", Mma, "dk", free_early, "commit dq_full", "commit dk_full"),
)


@pytest.mark.slow
@pytest.mark.parametrize("case", SWAPPED, ids=lambda case: f"{case[0]}, {case[2]}")
def test_signals_in_another_order_in_a_kernel_are_found(
    case: tuple[Any, ...], launches: Compared, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FA4FLEX_CACHE", "0")  # the key of a kernel knows of files alone
    name, owner, method, wrong, wanted, found = case
    with contextlib.ExitStack() as stack:
        compared = stack.enter_context(comparing(keep=True))
        stack.enter_context(patch.object(owner, method, wrong))
        stack.enter_context(contextlib.suppress(Fault))
        replace(CASES[name], score_mod=of_its_own).run()
    run = compared.kept[-1]
    said = next(differences(run.trace, run.topology)).split("\n")
    at = next(i for i, line in enumerate(said) if "expected" in line)
    assert wanted in said[at] and found in said[at + 1], said
    assert launches.differences  # as the fixture would say
    launches.differences.clear()
