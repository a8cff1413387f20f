"""The benchmark's arithmetic: FLOPs, medians, ratios, verdicts, errors of rows. Nothing is timed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import DRAWS, no_worse
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from fa4flex import reference
from fa4flex.bench import accuracy as errors
from fa4flex.bench import first_call
from fa4flex.bench.accuracy import Accuracy
from fa4flex.bench.command import latency_verdicts
from fa4flex.bench.measure import Samples, host_overhead, interleave
from fa4flex.bench.options import SUITE_NAMES
from fa4flex.bench.peers import Absent, Fa4flex, Problem, Run, attempt, make_problem
from fa4flex.bench.report import Measured, RowReport, as_json, full_table, short_table, verdicts
from fa4flex.bench.suites import SPARSE, SUITES, Row, Target, blocks_with_work, flops, groups, select_all
from fa4flex.errors import InputError

CPU = torch.device("cpu")
ROWS = [pytest.param(row, id=f"{name} {row.name}") for name, rows in SUITES.items() for row in rows]


def at(row: Row, length: int) -> Row:
    """The row at a length where its mask has some blocks of every kind."""
    heads, kv_heads = 2 * row.group, row.kv_heads and 2
    kv_length = row.kv_length and length // 2
    batch = 1 if row.sequences else 2
    value_heads = row.value_heads and heads // row.value_group
    sizes = {"batch": batch, "heads": heads, "kv_heads": kv_heads, "value_heads": value_heads}
    small = replace(row, length=length, kv_length=kv_length, **sizes)
    return replace(small, head_dim=16, sequences=min(row.sequences, 4), shrink=8)


# --- suites -------------------------------------------------------------------------------------------------


def test_the_command_line_knows_every_suite() -> None:
    assert set(SUITE_NAMES) == {*SUITES, "latency", "random", SPARSE}


@pytest.mark.parametrize("row", ROWS)
def test_blocks_are_those_of_create_block_mask(row: Row, seed: int) -> None:
    small = at(row, 1024)
    mask_mod = make_problem(small, CPU, seed).mods.mask_mod
    found = blocks_with_work(small, mask_mod, CPU)
    if mask_mod is None:
        assert found == 2 * 8 * (4 if small.kv_length else 8)
        return
    blocks = create_block_mask(mask_mod, small.batch, None, 1024, small.keys, device="cpu")
    assert found == int(blocks.kv_num_blocks.sum() + blocks.full_kv_num_blocks.sum())


def test_a_ragged_length_counts_whole_blocks(seed: int) -> None:
    row = at(next(r for r in SUITES["variants"] if r.name == "causal"), 300)
    assert blocks_with_work(row, make_problem(row, CPU, seed).mods.mask_mod, CPU) == 2 * (1 + 2 + 3)


def test_flops_of_full_attention_are_those_of_two_products() -> None:
    for row in SUITES["dense"]:
        if row.mask == "full":
            assert row.batch * row.length == 32768 and row.heads * row.head_dim == 2048
            products = 2 * row.batch * row.heads * 2 * row.length**2 * row.head_dim
            assert flops(row, blocks_with_work(row, None, CPU)) == products


def test_causal_flops_are_half_and_the_diagonal() -> None:
    row = next(r for r in SUITES["dense"] if r.name == "d128 causal 4k")
    blocks = 32 * 33 // 2 * row.batch
    assert blocks_with_work(row, lambda b, h, q, kv: q >= kv, CPU) == blocks
    assert flops(row, blocks) == 4 * 128 * 128 * 128 * blocks * 16


def test_the_window_of_other_kernels_is_the_masks(seed: int) -> None:
    """flash-attn's window (w - 1, 0) sees keys q - w + 1 .. q: so many does the mask allow."""
    row = at(next(r for r in SUITES["variants"] if r.name == "sliding"), 512)
    mask_mod = make_problem(row, CPU, seed).mods.mask_mod
    assert mask_mod is not None and row.native is not None and row.native.window is not None
    i = torch.arange(512)
    allowed = mask_mod(0, 0, i[:, None], i[None, :])
    assert allowed[400].nonzero().flatten().tolist() == list(range(400 - row.native.window + 1, 401))


@pytest.mark.parametrize("row", ROWS)
def test_only_what_has_a_name_is_native(row: Row) -> None:
    said = row.native
    assert (said is None) == (row.score not in ("plain", "softcap") or row.mask in ("document", "prefix"))
    if said is not None:
        causal = row.mask in ("causal", "packed")
        assert (said.causal, said.window is not None) == (causal, row.mask == "sliding")
        assert (said.softcap == 30.0) == (row.score == "softcap")


def test_documents_cover_the_sequence(seed: int) -> None:
    row = at(next(r for r in SUITES["variants"] if r.name == "document"), 2048)
    mask_mod = make_problem(row, CPU, seed).mods.mask_mod
    assert mask_mod is not None
    captured = next(c.cell_contents for c in mask_mod.__closure__ if isinstance(c.cell_contents, Tensor))  # type: ignore[attr-defined]
    assert captured.shape == (2, 2048) and captured[:, 0].eq(0).all() and captured.max() <= 7
    assert (captured.diff(dim=1) >= 0).all() and not torch.equal(captured[0], captured[1])


def test_rows_are_selected_with_their_bases() -> None:
    chosen = select_all(["dense", "cost"], ["alibi+sliding", "d128 full*"])
    assert [r.name for r in chosen["dense"]] == ["d128 full 4k", "d128 full 16k"]
    assert [r.name for r in chosen["cost"]] == ["sliding", "alibi+sliding"]
    assert len(select_all(["variants", "latency"], [])["variants"]) == 10
    with pytest.raises(InputError, match="d64 full 4k"):
        select_all(["dense"], ["alibi"])


def test_rows_with_one_base_are_measured_together() -> None:
    together = groups(SUITES["cost"])
    assert [r.name for r in together[1]] == ["causal", "alibi+causal", "key_bias+causal"]
    assert all(len(group) == 1 for group in groups(SUITES["variants"]))


# --- measuring ----------------------------------------------------------------------------------------------


class DriftingClock:
    """Calls take what `costs` says, and all get slower as the chip gets warm."""

    def __init__(self, costs: dict[Callable[[], Any], float], drift: float) -> None:
        self.costs, self.drift, self.ticks = costs, drift, 0
        self.log: list[tuple[Callable[[], Any], int]] = []

    def time(self, call: Callable[[], Any], calls: int) -> float:
        self.ticks += 1
        self.log.append((call, calls))
        return self.costs[call] * (1 + self.drift * self.ticks)


def test_interleaving_cancels_drift() -> None:
    def fast() -> None: ...
    def slow() -> None: ...

    clock = DriftingClock({fast: 1e-3, slow: 2e-3}, drift=0.001)
    found = interleave({"fast": fast, "slow": slow}, clock, rounds=60)
    assert found["slow"].median / found["fast"].median == pytest.approx(2, rel=0.01)
    assert len(found["fast"].seconds) == 60
    timed = [call for call, _ in clock.log[4:]]
    assert {tuple(timed[i : i + 2]) for i in range(0, 120, 2)} == {(fast, slow), (slow, fast)}
    assert {n for call, n in clock.log[4:] if call is slow} == {10}  # 20 ms of 2 ms calls


def test_host_overhead_takes_turns() -> None:
    def a() -> None: ...
    def b() -> None: ...

    clock = DriftingClock({a: 1e-5, b: 3e-5}, drift=0.0)
    found = host_overhead({"a": a, "b": b}, 3, clock)
    assert found["a"].median == pytest.approx(1e-5) and found["b"].seconds == (3e-5,) * 3


def test_medians_and_quartiles() -> None:
    samples = Samples((5.0, 1.0, 3.0, 2.0, 4.0))
    assert samples.median == 3 and samples.quartiles == (2, 4) and samples.spread == pytest.approx(2 / 3)
    assert Samples((7.0,)).quartiles == (7, 7)


# --- reports ------------------------------------------------------------------------------------------------

GOOD, BAD = Accuracy(1e-3, 2e-3, 1e-3, 2e-3), Accuracy(1.0, 2.0, 1e-3, 2e-3)


def timed(seconds: float, accuracy: Accuracy = GOOD) -> Measured:
    return Measured(Samples((seconds,) * 3), accuracy)


def report(row: Row, **peers: Measured) -> RowReport:
    return RowReport(row, 10**12, peers)


def row_with(*targets: Target, base: str = "", name: str = "row") -> Row:
    return Row(name, 1, 1, 128, 64, targets=targets, base=base)


def judged(found: RowReport, *others: RowReport) -> list[tuple[bool | None, float | None]]:
    return [(v.passed, v.value) for v in verdicts(found, [found, *others])]


def test_ratio_is_to_the_fastest_peer() -> None:
    row = row_with(Target("best", 1.0), Target("flex", 2.2))
    found = report(row, fa4flex=timed(2.0), flex=timed(4.0), FA4=timed(1.9))
    assert found.tflops("fa4flex") == 0.5 and found.best_peer == "FA4"
    assert judged(found) == [(False, pytest.approx(0.95)), (False, pytest.approx(2.0)), (True, 1.0)]
    assert judged(report(row_with(Target("best", 1.0)), fa4flex=timed(2.0), flex=timed(2.0)))[0] == (True, 1)


def test_a_wrong_result_is_no_competitor() -> None:
    row = row_with(Target("best", 1.0))
    found = report(row, fa4flex=timed(2.0), FA4=timed(0.1, BAD), flex=timed(4.0))
    assert found.best_peer == "flex" and "WRONG RESULT, 1e+03 times" in full_table([found])
    assert "tflops" not in as_json([found])[0]["peers"]["FA4"]
    # ... and our own wrong result, however fast, passes nothing.
    assert judged(report(row, fa4flex=timed(0.1, BAD), flex=timed(4.0))) == [(False, None), (False, 1000)]
    unwritten = Accuracy(math.nan, math.nan, 1e-3, 2e-3)
    ours = judged(report(row, fa4flex=timed(0.1, unwritten), flex=timed(4.0)))
    assert [passed for passed, _ in ours] == [False, False]


def test_the_worse_of_element_and_row_counts() -> None:
    assert Accuracy(1e-3, 6e-3, 1e-3, 2e-3).ratio == pytest.approx(3)
    assert Accuracy(4e-3, 2e-3, 1e-3, 2e-3).ratio == pytest.approx(4)
    assert Accuracy(0.0, 0.0, 0.0, 0.0).ratio == 1 and Accuracy(1e-9, 0.0, 0.0, 0.0).ratio == math.inf


def test_absence_has_a_reason() -> None:
    row = row_with(Target("FA4", 1.0))
    missing = report(row, fa4flex=timed(1.0), FA4=Measured(reason="not installed"))
    (verdict,) = verdicts(missing, [])[:1]
    assert verdict.passed is None and "not installed" in verdict.says
    assert "not installed" in full_table([missing]) and "not judged" in short_table([missing])
    ours = report(row, fa4flex=Measured(reason="boom"), FA4=timed(1.0))
    (verdict,) = verdicts(ours, [])
    assert verdict.passed is False and "boom" in verdict.says
    assert as_json([missing])[0]["peers"]["FA4"] == {"reason": "not installed"}


def test_cost_is_over_the_base() -> None:
    base, mod = row_with(name="mask"), row_with(name="mod+mask", base="mask")
    without = report(base, fa4flex=timed(1.0))
    assert judged(report(mod, fa4flex=timed(1.05)), without)[0] == (True, pytest.approx(0.05))
    assert judged(report(mod, fa4flex=timed(1.07)), without)[0] == (False, pytest.approx(0.07))
    assert judged(report(mod, fa4flex=timed(1.0)))[0] == (None, None)


def test_latency_limits() -> None:
    def found(us: float, *seconds: float) -> list[bool | None]:
        calls = {which: {"call": time} for which, time in zip(first_call.MOST, seconds, strict=True)}
        return [
            v.passed for v in latency_verdicts({"host": {"fa4flex": {"median_us": us}}, "first call": calls})
        ]

    assert found(15, 3, 0.5, 4.5, 0.3) == [True] * 5 and found(16, 3.1, 0.6, 4.6, 0.4) == [False] * 5
    failed = latency_verdicts({"host": {}, "first call": {"reason": "no GPU"}})
    assert [v.passed for v in failed] == [False] * 5 and "no GPU" in failed[1].says


def test_first_calls_find_byte_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside sources, or where Python is told not to write it there, in a folder that the runs share."""
    assert first_call.MOST.keys() <= first_call.RUNS.keys() and next(iter(first_call.RUNS)) == "byte code"
    monkeypatch.delenv("PYTHONPYCACHEPREFIX", raising=False)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    apart = [first_call._environment(tmp_path, kernels) for kernels in ("others", "forward")]
    assert len({found["PYTHONPYCACHEPREFIX"] for found in apart}) == 1
    assert len({found["FA4FLEX_CACHE_DIR"] for found in apart}) == 2
    assert not any("PYTHONDONTWRITEBYTECODE" in found for found in apart)
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE")
    assert "PYTHONPYCACHEPREFIX" not in first_call._environment(tmp_path, "forward")


# --- errors -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "row", [p for p in ROWS if str(p.id).startswith("variants") or "key_bias" in str(p.id)]
)
def test_exact_rows_are_the_oracles(row: Row, seed: int) -> None:
    problem = make_problem(at(row, 160), CPU, seed)
    whole, _ = reference.attention(
        problem.q, problem.k, problem.v, problem.mods.score_mod, problem.mods.mask_mod
    )
    for pick in errors.picks(problem, seed):
        rows = errors.exact_rows(problem, pick, errors.tensors(problem, pick))
        torch.testing.assert_close(rows, whole[pick.b, pick.h, pick.rows], rtol=1e-12, atol=1e-12)


def small_problem(seed: int) -> Problem:
    return make_problem(at(next(r for r in SUITES["variants"] if r.name == "alibi+causal"), 160), CPU, seed)


def test_picks_hold_the_borders(seed: int) -> None:
    chosen = errors.picks(small_problem(seed), seed)
    assert sorted((p.b, p.h) for p in chosen) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert all({0, 1, 127, 128, 159} <= set(p.rows.tolist()) for p in chosen)


def right(make: Callable[[int], Problem], seed: int) -> tuple[Problem, errors.Truth, Run]:
    """A problem, its truth and our run of it, the first of draws whose errors are no worse than PyTorch's."""
    first, found = None, []
    for draw in range(seed, seed + DRAWS):
        problem = make(draw)
        known = errors.truth(problem, draw)
        run = attempt(Fa4flex(), problem)
        assert not isinstance(run, Absent)
        found.append(errors.accuracy(problem, run, known))
        first = first or (problem, known, run)
    no_worse([(x.element, x.row) for x in found], [(x.plain_element, x.plain_row) for x in found])
    assert first is not None and all(x.plain_element > 0 for x in found)
    return first


def test_errors_are_found(seed: int) -> None:
    problem, known, run = right(small_problem, seed)
    out = run()
    pick = known.picks[0]
    for wrong, expected in ((0.5, 0.5), (math.nan, math.nan)):
        broken = out.clone()
        broken[pick.b, pick.h, pick.rows[3], 5] += wrong
        found = errors.accuracy(problem, lambda broken=broken: broken, known)
        assert found.element == pytest.approx(expected, rel=0.1, nan_ok=True)
        assert not found.ratio <= 10


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize(
    "suite, name",
    [
        ("backward-variants", "alibi+causal"),
        ("backward-shapes", "28:4 s4k d128"),
        ("backward-shapes", "d192:128"),
        ("backward-shapes", "cross 1k:8k d128 full"),
        ("backward-shapes", "packed 16 in 16k d64"),
    ],
)
def test_errors_of_gradients_are_found(
    suite: str, name: str, which: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where several heads, and several parts of the rows, add to the gradients of keys."""
    monkeypatch.setattr(errors, "MOST_ROWS", 96)
    row = next(r for r in SUITES[suite] if r.name == name)
    problem, known, run = right(lambda draw: make_problem(at(row, 160), CPU, draw), seed)
    gradients = [x.clone() for x in run()]
    pick = known.picks[0]
    gradients[which][pick.b, pick.h // row.group if which else pick.h, 3, 5] += 2.0
    found = errors.accuracy(problem, lambda: tuple(gradients), known)
    assert found.element == pytest.approx(2.0, rel=0.1) and not found.ratio <= 10


def test_ordered_rows_are_compared_with_the_same_row() -> None:
    for ordered in (row for row in SUITES["backward"] if row.deterministic):
        base = next(row for row in SUITES["backward"] if row.name == ordered.base)
        assert replace(base, name=ordered.name, targets=()) == replace(
            ordered, base="", most_cost=base.most_cost, deterministic=False
        )
        without = report(base, fa4flex=timed(3.0))
        assert judged(report(ordered, fa4flex=timed(3.9)), without)[0] == (True, pytest.approx(0.3))
        assert judged(report(ordered, fa4flex=timed(4.1)), without)[0][0] is False


def test_a_peer_that_raises_says_why(seed: int) -> None:
    class Broken:
        name = "broken"

        def version(self) -> str:
            return ""

        def prepare(self, problem: Problem) -> Any:
            def run() -> Tensor:
                raise RuntimeError("no kernel\nand more")

            return run

    assert attempt(Broken(), small_problem(seed)) == Absent("RuntimeError: no kernel")
