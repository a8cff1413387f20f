"""The k largest scores of rows by kernels, on simulated GPUs: as in a stable sort, under all timings,
whatever memory held before; nothing outside a row is read."""

from __future__ import annotations

import random
from unittest.mock import patch

import pytest
import torch
from paged_pools import guarded
from torch import Tensor

import ptxsim
from fa4flex import select
from fa4flex.kernels.topk import config
from fa4flex.primitives.largest import largest
from fa4flex.primitives.units import SEEN, Rule
from fa4flex.runtime.cuda import topk as kernels
from fa4flex.runtime.cuda.device import kept_kernels
from fa4flex.runtime.cuda.device.kept_kernels import KeptKernels

TIMINGS = [("eager", 0), ("late", 1), ("random", 2)]


def rows_of(kind: str, units: int) -> Tensor:
    """A row of scores."""
    row = torch.randn(units)
    if kind == "ties":
        return (2 * row).round()
    if kind == "mostly zeros":  # as of an indexer with ReLU
        return torch.where(torch.rand(units) < 0.01, row.abs(), random.choice([0.0, -0.0]))
    if kind == "equal":
        return torch.full((units,), 0.25)
    if kind == "ascending":
        return row.sort().values
    if kind == "in a run":  # all of the largest ones lie together
        row[units // 3 : units // 3 + units // 8] += 20
        return row
    if kind == "few":
        return torch.where(torch.arange(units) % 97 == 5, row, -torch.inf)
    if kind == "none":
        return torch.full((units,), -torch.inf)
    if kind == "odd":
        row[::3], row[1::7], row[2::11] = torch.nan, torch.inf, -torch.inf
        row[5:9] = torch.tensor([1e-45, -1e-45, 3e38, -3e38])[: len(row[5:9])]
        return row
    return row


KINDS = ("random", "ties", "mostly zeros", "equal", "ascending", "in a run", "few", "none", "odd")


def check(scores: Tensor, k: int, rule: Rule | None = None, chip: str = "sm_90a") -> None:
    timing, seed = random.choice(TIMINGS)
    scores = guarded(scores)
    with ptxsim.device(chip, seed, timing) as gpu:
        ids, counts = kernels.topk(scores, k, rule)
    assert not gpu.findings, f"{timing} {seed}: {gpu.report()}"
    rows = zip(scores.flatten(0, -2), ids.flatten(0, -2), counts.flatten(), strict=True)
    for number, (row, found, count) in enumerate(rows):
        units = range(len(row))
        mine = set() if rule is None else forced(rule, number % rule.rows)
        open = set(units if rule is None else seen(rule, number % rule.rows)) - mine
        keys = [x if i in open and x > -torch.inf else -torch.inf for i, x in enumerate(row.tolist())]
        best = [i for i in sorted(units, key=lambda i: -keys[i]) if keys[i] > -torch.inf]
        wanted = sorted([*mine, *best[: k - len(mine)]])
        assert int(count) == len(wanted)
        assert found.tolist() == wanted + [-1] * (k - len(wanted))


def places(rule: Rule, row: int) -> list[int]:
    """Positions of a row's queries among the keys."""
    queries = range(row * rule.queries, min((row + 1) * rule.queries, rule.q_len))
    return [q + rule.kv_len - rule.q_len for q in queries]


def forced(rule: Rule, row: int) -> set[int]:
    """Units that the rule selects always."""
    found = {c for c in range(rule.units) if c < rule.first or c >= rule.units - rule.last}
    if rule.own:
        low, high = max(places(rule, row)[0], 0) // rule.keys, places(rule, row)[-1] // rule.keys
        found |= {c for c in range(low - rule.own + 1, high + 1) if 0 <= c < rule.units}
    return found


def seen(rule: Rule, row: int) -> list[int]:
    """Units that the rule lets be selected."""
    some, at = [range(c * rule.keys, min((c + 1) * rule.keys, rule.kv_len)) for c in range(rule.units)], []
    for c, tokens in enumerate(some):
        latest, earliest = places(rule, row)[-1], places(rule, row)[0]
        if {"all": True, "causal": tokens[0] <= latest, "whole": tokens[-1] <= earliest}[SEEN[rule.seen]]:
            at.append(c)
    return at


def drawn_rule(units: int, rows: int) -> Rule:
    """A rule of so many rows and units, causal or not, which may force some."""
    queries, keys = random.choice([1, 2, 3, 8, 64]), random.choice([1, 2, 5, 16])
    q_len = rows * queries - random.randrange(queries)
    kv_len = units * keys - random.randrange(keys)
    some = [random.choice([0, 0, 1, 2]) for _ in range(3)]
    return Rule(queries, keys, q_len, kv_len, *some, random.randrange(3))


@pytest.mark.parametrize("chip", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("units", [1, 31, 128, 300, 1024])
def test_short_rows(units: int, chip: str) -> None:
    scores = torch.stack([rows_of(random.choice(KINDS), units) for _ in range(6)])
    check(scores, random.randint(1, units), chip=chip)


@pytest.mark.parametrize("kind", KINDS)
def test_long_rows(kind: str) -> None:
    """Rows that shared memory has room for, and longer ones, of which samples tell more or less."""
    units = random.choice([1025, 3000, 8193, 9000, 12000])
    check(rows_of(kind, units).view(1, -1), random.choice([1, 40, 700]))


def test_long_rows_of_blackwell() -> None:
    check(rows_of(random.choice(KINDS), 9001).view(1, -1), 64, chip="sm_100a")


@pytest.mark.parametrize("kind", KINDS)
def test_too_few_and_too_many_pass(kind: str) -> None:
    """A small sample says little, or there is little room: the row is read again."""
    with patch.object(kernels, "SIZES", ((1 << 16, 512, random.choice([64, 512])),)):
        check(rows_of(kind, 4096).view(1, -1), random.choice([20, 500]))


def test_scores_that_are_mostly_the_same() -> None:
    """Units that have the sample's key are selected in order, whose last one is anywhere."""
    scores = torch.where(torch.rand(1, 9000) < 0.02, torch.rand(1, 9000), 0.0)
    scores[:, : random.randint(0, 8000)] -= 1
    check(scores, 700)


@pytest.mark.parametrize("units", [9, 70, 2000, 9000])
@pytest.mark.parametrize("chip", ["sm_90a", "sm_100a"])
def test_units_in_the_future_and_forced_ones(units: int, chip: str) -> None:
    """Rules of rows that take turns; nothing past what may be selected is told apart from what was not
    read."""
    rows = 3 if units < 2000 else 2
    rule = drawn_rule(units, rows)
    heads = 2 if units < 2000 else 1
    scores = torch.stack([rows_of(random.choice(KINDS), units) for _ in range(heads * rows)])
    k = random.randint(rule.most, max(rule.most, min(units, 60)))
    check(scores.view(heads, rows, units), max(k, 1), rule, chip)


def test_rows_of_any_strides() -> None:
    whole = torch.randn(5, 1301)
    check(whole[:, 3:1203][::2], 17)
    check(whole.t()[:1200].contiguous().t()[:2], 17)


@pytest.mark.parametrize("own", [0, 2])
def test_selections(own: int) -> None:
    """Kernels and operations of torch select the same."""
    scores = select.Scores(torch.randn(2, 3, 4, 40), 16, 8, 64, 320).causal()
    wanted = select.topk(scores, 9, first=1, own=own, last=1)
    with ptxsim.device("sm_90a") as gpu:
        found = select.topk(scores, 9, first=1, own=own, last=1)
    assert len(gpu.results) == 1 and not gpu.findings
    assert torch.equal(found.ids, wanted.ids)
    assert found.counts is not None and wanted.counts is not None
    assert torch.equal(found.counts, wanted.counts)


def test_other_rows_are_selected_by_operations() -> None:
    """float64, more units than bits, more of a long row than is held."""
    with ptxsim.device("sm_90a") as gpu:
        for scores, k in ((torch.randn(2, 50).double(), 5), (torch.randn(1, 3000), config.MOST_SELECTED + 1)):
            ids, counts = torch.ops.fa4flex.topk(scores, k, [])
            wanted = largest(scores, k, None)
            assert torch.equal(ids, wanted[0]) and torch.equal(counts, wanted[1])
    assert not gpu.results
    assert not kernels.takes(torch.empty(1, config.MOST_UNITS + 1), 5)


def test_a_first_call_in_a_captured_graph_is_selected_by_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can be compiled there; what was compiled before is launched."""
    scores, forced = torch.randn(2, 50), torch.zeros(2, 50, dtype=torch.bool)
    monkeypatch.setattr(kernels, "_kernels", KeptKernels())
    with ptxsim.device("sm_90a") as gpu:
        for captures in (True, False, True):
            monkeypatch.setattr(kept_kernels, "capturing", lambda: captures)  # noqa: B023
            launched = len(gpu.results)
            ids, counts = torch.ops.fa4flex.topk(scores, 5, [])
            wanted = largest(scores, 5, forced)
            assert torch.equal(ids, wanted[0]) and torch.equal(counts, wanted[1])
            assert len(gpu.results) == launched + (launched > 0 or not captures)
