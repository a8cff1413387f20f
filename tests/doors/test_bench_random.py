"""Random rows of the benchmark: how they are drawn, run in processes that may die, and reported."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fa4flex.__main__ import main
from fa4flex.bench import random_report as report
from fa4flex.bench.command import Options, measure_group
from fa4flex.bench.isolated import Worker
from fa4flex.bench.peers import Absent, Fa4flex, Problem, interval_ends, make_problem
from fa4flex.bench.plot import save_ratios
from fa4flex.bench.random_rows import (
    KINDS,
    MOST_BYTES,
    MOST_FLOPS,
    MOST_HEADS,
    PACKED_TOKENS,
    TOKENS,
    Dice,
    Drawing,
    bounded,
    chosen,
    described,
    flops_of,
    widths_of,
)
from fa4flex.bench.random_suite import Run, status
from fa4flex.bench.suites import Row, blocks_with_work, flops
from fa4flex.errors import InputError

CPU = torch.device("cpu")
ALL_WIDTHS = widths_of("64,96,128,192:128,256")


def drawing(seed: int, rows: int = 400, *kinds: str) -> Drawing:
    return Drawing(seed, rows, kinds or KINDS, ALL_WIDTHS)


# --- drawing ------------------------------------------------------------------------------------------------


def test_a_row_depends_on_its_seed_and_number_alone(seed: int) -> None:
    some, more = drawing(seed, 10).drawn(), drawing(seed, 40).drawn()
    assert some == more[: len(some)] and drawing(seed + 1, 10).drawn() != some
    packed = drawing(seed, 10, "packed").drawn()
    assert [r.name.split(" ", 1)[1] for r in packed] == [r.name.split(" ", 1)[1] for r in some[1::3]]


def test_rows_of_a_seed_stay_what_they_are() -> None:
    """Reports name a row by seed and number, also those of other hosts and of earlier versions."""
    found = [row.name for row in Drawing(49, 4, KINDS).drawn()[:9:2]]
    assert found == [
        "0 forward causal b45 s18560 h4:4 d64",
        "2 forward document7 b1 s10592 h12:3 d64",
        "4 backward packed n7 t2914 h2:2 d64",
        "6 forward causal b1 s1408 h16:1 d64",
        "8 forward document3 b2 s384 h56:56 d128",
    ]


def test_rows_lie_within_their_ranges(seed: int) -> None:
    rows = drawing(seed).drawn()
    by_kind = {kind: rows[place::3] for place, kind in enumerate(KINDS)}
    for row in by_kind["dense"] + by_kind["masks"]:
        assert TOKENS[0] <= row.length <= TOKENS[1] and 1 <= row.batch <= 64 and not row.sequences
    for row in by_kind["packed"]:
        assert PACKED_TOKENS[0] <= row.length <= PACKED_TOKENS[1] and row.batch == 1
        assert 2 <= row.sequences <= 64
    assert {row.mask for row in by_kind["dense"]} == {"causal", "full"}
    assert {row.mask for row in by_kind["masks"]} == {"sliding", "prefix", "document"}
    assert all(1 <= row.mask_size <= row.length for row in by_kind["masks"])
    assert {row.group for row in rows} == set(range(1, 17))
    assert all(row.heads == row.group * row.kv_heads <= MOST_HEADS for row in rows)
    assert {(row.head_dim, row.values) for row in rows} == {
        (64, 64), (96, 96), (128, 128), (192, 128), (256, 256),
    }  # fmt: skip
    lengths = [row.length for row in by_kind["dense"]]
    assert sum(x % 2 for x in lengths) > len(lengths) / 5 and sum(x % 128 == 0 for x in lengths) > 20


def test_both_passes_of_a_problem_are_rows(seed: int) -> None:
    rows = drawing(seed, 20, "dense").drawn()
    for forward, backward in zip(rows[::2], rows[1::2]):
        assert not forward.backward and backward.backward
        assert replace(forward, name="", targets=()) == replace(backward, name="", targets=(), backward=False)
        assert (forward.targets[0].ratio, backward.targets[0].ratio) == (0.98, 0.97)


def test_memory_and_work_are_bounded(seed: int) -> None:
    """Counted anew: 16 bits of each element of q, k, v and the output; five products."""
    full = 0
    for row in drawing(seed).drawn():
        q = row.batch * row.heads * row.length
        kv = row.batch * row.kv_heads * row.length
        elements = q * row.head_dim + kv * row.head_dim + kv * row.values + q * row.values
        pairs = row.length**2 / (1 if row.mask == "full" else 2)
        products = 2 * row.batch * row.heads * pairs * (3 * row.head_dim + 2 * row.values)
        assert 2 * elements <= MOST_BYTES and products <= MOST_FLOPS
        again = replace(row, batch=row.batch + 1)
        full += 2 * elements / row.batch * again.batch > MOST_BYTES or flops_of(again) > MOST_FLOPS
    assert full > 20  # bounds are reached: they bound
    one = replace(Row("", 1, 64, 20_000, 256, "full"), kv_heads=64)
    assert bounded(one).heads == bounded(one).kv_heads < 64 and flops_of(bounded(one)) <= MOST_FLOPS
    shared = replace(one, length=32_768, heads=16, kv_heads=1)
    assert 1 <= bounded(shared).heads < 16 and flops_of(bounded(shared)) <= MOST_FLOPS


def test_flops_bounded_are_those_that_are_counted() -> None:
    row = Row("", 2, 4, 1024, 64, "full", backward=True)
    assert flops_of(row) == flops(row, blocks_with_work(row, None, CPU))


def test_numbers_are_as_likely_in_each_octave(seed: int) -> None:
    """Against the probabilities themselves, 1 / n, within five standard deviations."""
    import random

    dice, count = Dice(random.Random(seed)), 4000
    drawn = [dice.among(1, 64) for _ in range(count)]
    total = sum(1 / n for n in range(1, 65))
    for least in (1, 2, 4, 8, 16, 32):
        share = sum(1 / n for n in range(least, 2 * least)) / total
        found = sum(least <= x < 2 * least for x in drawn)
        assert abs(found - count * share) < 5 * math.sqrt(count * share * (1 - share))


def test_rows_are_chosen_by_number_and_name(seed: int) -> None:
    rows = drawing(seed, 30, "dense").drawn()
    assert [row.name.split()[0] for row in chosen(rows, ["3", "11"])] == ["3", "11"]
    assert chosen(rows, [rows[7].name]) == [rows[7]] and chosen(rows, []) == rows
    assert chosen(rows, ["backward"]) == rows[1::2] and chosen(rows, ["? forward*"]) == rows[:10:2]
    with pytest.raises(InputError, match="numbers up to 29"):
        chosen(rows, ["30"])


@pytest.mark.parametrize("text", ["60", "64,", "264", "128:64:32", "wide", "0"])
def test_widths_that_no_kernel_takes_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="multiples of 8"):
        widths_of(text)


def test_names_say_the_problem() -> None:
    row = Row("", 4, 28, 4096, 128, "causal", kv_heads=4, backward=True)
    assert described(row) == "backward causal b4 s4096 h28:4 d128"
    assert described(replace(row, mask="sliding", mask_size=1000, value_dim=64)).split()[1::3] == [
        "sliding1000", "h28:4",
    ]  # fmt: skip
    assert [str(x) for x in widths_of("128:128,192:128")] == ["128", "192:128"]


@pytest.mark.parametrize("mask", ["full", "causal", "sliding", "prefix", "document"])
def test_intervals_of_keys_are_the_mask(mask: str, seed: int) -> None:
    row = Row("", 2, 2, 300, 16, mask, mask_size=5 if mask == "document" else 70, shrink=1)
    mask_mod = make_problem(row, CPU, seed).mods.mask_mod or (lambda b, h, q_idx, kv_idx: kv_idx >= 0)
    ends = interval_ends(row, mask_mod, CPU)
    assert (
        ends.dtype == torch.int32 and ends.shape[0] == 1 and ends.shape[1] % 2 == 1 and ends.is_contiguous()
    )
    ends = ends[0].view(-1, 2, 300)
    assert (ends.diff(dim=0) >= 0).all()
    keys = torch.arange(300)
    for b in range(2):
        seen = keys < ends[0, b, :, None]
        for first, last in zip(ends[1::2, b], ends[2::2, b]):
            seen |= (keys >= first[:, None]) & (keys < last[:, None])
        queries = torch.arange(300)[:, None]
        allowed = torch.as_tensor(mask_mod(torch.tensor(b), torch.tensor(0), queries, keys[None, :]))
        assert torch.equal(seen, allowed.expand(300, 300))


# --- rows that fail -----------------------------------------------------------------------------------------

WORKER = """
import json, os, sys, time
from fa4flex.bench.isolated import tell
for line in sys.stdin:
    row = json.loads(line)
    print("a library's own words")
    for name in ["fa4flex", *row["peers"]]:
        tell(at=name)
        if name == "FA3": os.abort()
        if name == "FA4": time.sleep(60)
        if row["row"]["name"] == "ours": sys.exit(f"the fault beside {len(row['peers'])}")
    tell(at="")
    if row["row"]["name"] == "timing" and row["peers"]: os._exit(70)
    tell(answer={"peers": {name: {} for name in ["fa4flex", *row["peers"]]}, "verdicts": []})
"""


def running(deadline: float = 60.0, peers: Sequence[str] = ("cuDNN", "FA3")) -> Run:
    options = Options(CPU, False, 1, 0, time.monotonic() + deadline, ())
    return Run(options, tuple(peers), Worker([sys.executable, "-c", WORKER]))


def row_named(name: str) -> Row:
    return Row(name, 1, 1, 128, 64)


def test_a_peer_that_dies_is_noted_and_left_out() -> None:
    doing = running()
    for _ in range(2):  # the process that died has a successor
        found = doing.row(row_named("row"), "dense")
        assert set(found["peers"]) == {"fa4flex", "cuDNN", "FA3"} and not found["peers"]["cuDNN"]
        assert "status -6" in found["peers"]["FA3"]["reason"]
        assert "error" not in found and not report.failures([found])
    doing.worker.close()


def test_a_peer_that_hangs_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fa4flex.bench.random_suite.ROW_SECONDS", 5.0)
    doing = running(peers=("FA4", "cuDNN"))
    found = doing.row(row_named("row"), "dense")
    assert "still running after 5 s" in found["peers"]["FA4"]["reason"] and not found["peers"]["cuDNN"]
    doing.worker.close()


def test_a_death_of_ours_is_an_error_of_the_row() -> None:
    doing = running()
    found = doing.row(row_named("ours"), "dense")
    assert "status 1" in found["error"] and "the fault beside 2" in found["error"]
    assert report.failures([found]) == [f"ours: {found['error']}"] and status([found]) == 1
    after = doing.row(row_named("timing"), "dense")  # nobody knows who broke the device
    assert "not compared: while all were timed" in after["peers"]["cuDNN"]["reason"]
    assert "error" not in after and status([after]) == 0
    doing.worker.close()


def test_the_budget_ends_a_row() -> None:
    doing = running(1.0, peers=("FA4",))
    start = time.monotonic()
    found = [doing.row(row_named("row"), "dense") for _ in range(3)]
    assert time.monotonic() - start < 30
    assert [row["not run"] for row in found] == ["time budget"] * 3
    assert not report.failures(found) and status(found) == 1  # nothing ran
    assert doing.worker.process is None


class Fake:
    """A peer whose result is off by `wrong`, and that raises at its second call if `raises`."""

    def __init__(self, name: str, wrong: float = 0.0, raises: bool = False) -> None:
        self.name, self.wrong, self.raises, self.calls = name, wrong, raises, 0

    def version(self) -> str:
        return ""

    def prepare(self, problem: Problem) -> Any:
        run = Fa4flex().prepare(problem)
        assert not isinstance(run, Absent)

        def called() -> Tensor:
            self.calls += 1
            if self.raises and self.calls > 1:
                raise RuntimeError("no memory\nand more")
            out = run()
            assert isinstance(out, Tensor)
            return out + self.wrong

        return called


def test_results_are_judged_before_they_are_timed(seed: int) -> None:
    wrong, raising, told = Fake("FA4", 1.0), Fake("FA3", raises=True), []
    options = Options(CPU, True, 1, seed, math.inf, (), told.append)
    row = Row("row", 1, 2, 128, 64, "causal")
    (found,) = measure_group([row], (Fa4flex(), wrong, raising), options)
    assert told == ["fa4flex", "FA4", "FA3", ""]
    assert wrong.calls == 2 and found.peers["FA4"].samples is None  # a first call, and one that is judged
    assert "WRONG RESULT" in found.peers["FA4"].why
    assert found.peers["FA3"].why == "RuntimeError: no memory"
    assert found.seconds("fa4flex") is not None and found.best_peer is None


# --- reports ------------------------------------------------------------------------------------------------


def measured(name: str, ratio: float | None, which: str = "forward", **problem: Any) -> dict[str, Any]:
    about = {
        "head_dim": 64,
        "mask": "causal",
        "heads": 4,
        "kv_heads": 2,
        "length": 1500,
        "batch": 1,
    } | problem
    peers = {"fa4flex": {"median_ms": 1.0, "tflops": 500.0}, "FA3": {"reason": "not installed"}}
    if ratio is not None:
        peers["FA4"] = {"median_ms": ratio, "tflops": 500.0 / ratio}
    return {
        "row": name, "pass": which, "problem": about, "peers": peers, "verdicts": [],
        "ratio to best peer": ratio, "best peer": "FA4" if ratio is not None else None,
        "state under load": {"clocks.sm": f"{1500 + len(name)} MHz"},
    }  # fmt: skip


def test_ratios_are_sorted_and_counted() -> None:
    rows = [measured("a", 1.10), measured("bb", 0.90), measured("ccc", 1.02), measured("d", None)]
    rows += [
        measured("e", 0.5, "backward", head_dim=128),
        {"row": "f", "pass": "backward", "not run": "late"},
    ]
    ratios = report.by_pass(rows)
    assert [row["row"] for row in ratios["forward"].rows] == ["bb", "ccc", "a"]
    summary = ratios["forward"].summary()
    assert summary["median"] == 1.02 and summary["least"] == 0.9 and summary["behind"] == 1
    assert summary["share behind"] == pytest.approx(1 / 3) and summary["without a ratio"] == 1
    text = report.text(rows)
    assert "forward: median 1.020, least 0.900, behind in 1 of 3 rows (33.3%); 1 have no ratio" in text
    places = [text.index(x) for x in (" 0.900  bb", " 1.020  ccc", " 1.100  a")]
    assert places == sorted(places)
    assert "1000.0 us beside 900.0 (FA4), 500 TFLOP/s" in text
    assert "by width: d128 0.500 (1 of 1 behind)" in text and "1024-2047 1.020 (1 of 3 behind)" in text
    assert "FA3: not installed (5 rows)" in text and "clocks.sm: 1501 MHz to 1503 MHz" in text
    assert "1 rows were not run: late" in text and "FAILED" not in text


def test_failures_decide_the_exit_status() -> None:
    right = measured("a", 1.1)
    assert status([right]) == 0 and status([]) == 1
    raised = {**right, "peers": {"fa4flex": {"reason": "ValueError: no"}}, "ratio to best peer": None}
    wrong = {**right, "verdicts": [{"says": "error over plain PyTorch's", "value": 3.14, "passed": False}]}
    slow = {**right, "verdicts": [{"says": "speed over best peer", "value": 0.9, "passed": False}]}
    assert [status([right, row]) for row in (raised, wrong, slow)] == [1] * 3
    assert report.failures([raised, wrong, slow]) == [
        "a: ValueError: no", "a: error 3.14 times plain PyTorch's",
    ]  # fmt: skip
    assert report.line(raised) == "FAILED  a: ValueError: no"


def test_the_plot_has_every_row(tmp_path: Path) -> None:
    path = tmp_path / "ratios.svg"
    save_ratios({"forward": [0.9, 1.0, 1.1], "backward": [0.61] * 40}, "random rows, seed 1", path)
    written = path.read_text()
    assert "forward, 3 rows" in written and "backward, 40 rows" in written and "seed 1" in written
    assert written.count('<use xlink:href="#m') >= 43  # a mark per row, and those of the axes
    save_ratios({"forward": []}, "nothing was compared", path)


# --- the command --------------------------------------------------------------------------------------------

DRY = ["bench", "--suite", "random", "--device", "cpu", "--smoke", "--rounds", "1", "--seed", "7"]


def test_a_dry_run_whose_rows_can_be_asked_for_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*DRY, "--rows", "2", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "seed 7" in printed and "2/2" in printed and "median" in printed
    found = json.loads((tmp_path / "bench-random.json").read_text())
    assert found["drawing"] == {"seed": 7, "rows": 2, "kinds": ["dense"], "widths": "64,128"}
    assert [row["pass"] for row in found["rows"]] == ["forward", "backward"]
    assert all(row["ratio to best peer"] > 0 and row["best peer"] == "SDPA" for row in found["rows"])
    assert (tmp_path / "bench-random.svg").exists()
    again = tmp_path / "again"
    chosen = ["--rows", "5", "--only", found["rows"][0]["row"], "--minutes", "0"]
    assert main([*DRY, *chosen, "--out", str(again)]) == 1
    (row,) = json.loads((again / "bench-random.json").read_text())["rows"]
    assert row["problem"] == found["rows"][0]["problem"]


def test_a_budget_of_nothing_runs_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*DRY, "--rows", "3", "--minutes", "0", "--out", str(tmp_path)]) == 1
    assert "3 rows were not run: time budget" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--suite", "random", "dense"], "random alone"),
        (["--rows", "d64"], "number of rows"),
        (["--rows", "0"], "1 or more"),
        (["--kind", "dense,long"], "dense, packed, masks"),
        (["--widths", "60"], "multiples of 8"),
        (["--only", "500"], "numbers up to 99"),
        (["--minutes", "1", "--time-limit", "60"], "one of them"),
        (["--suite", "dense", "--kind", "masks"], "--suite random"),
        (["--peers", "FA7"], "SDPA"),
    ],
)
def test_refusals_of_random_rows(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*DRY, *arguments]) == 2
    assert says in capsys.readouterr().err
