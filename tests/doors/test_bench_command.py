"""`python -m fa4flex bench` as a dry run on the CPU: every file it writes, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fa4flex.__main__ import main

SMOKE = ["bench", "--device", "cpu", "--smoke", "--rounds", "1"]


def test_a_dry_run_writes_numbers_and_a_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = [
        "--suite",
        "variants",
        "cost",
        "--rows",
        "alibi+sliding,softcap",
        "--peers",
        "SDPA",
        "--seed",
        "7",
    ]
    assert main([*SMOKE, *chosen, "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "seed 7" in printed and "takes no mods" in printed
    assert "FAIL" not in printed and "not judged" in printed and " 0.0 " not in printed
    found = json.loads((tmp_path / "bench-variants.json").read_text())
    assert [row["row"] for row in found["rows"]] == ["softcap+causal", "alibi+sliding"]
    ours = found["rows"][0]["peers"]["fa4flex"]
    assert ours["median_ms"] > 0 and ours["errors"]["over plain"] <= 2
    assert found["seed"] == 7 and "torch" in found["environment"]
    assert (tmp_path / "bench-variants.svg").read_text().count("softcap") >= 1
    cost = json.loads((tmp_path / "bench-cost.json").read_text())
    assert [row["row"] for row in cost["rows"]] == ["sliding", "alibi+sliding"]
    assert any("cost over sliding" in v["says"] for v in cost["rows"][1]["verdicts"])


def test_a_time_limit_skips_rows_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = ["--suite", "variants", "--rows", "causal", "--peers", "fa4flex", "--time-limit", "-1"]
    assert main([*SMOKE, *chosen, "--out", str(tmp_path)]) == 0
    assert "time limit" in capsys.readouterr().out


@pytest.mark.slow
def test_latency_in_fresh_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMOKE, "--suite", "latency", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "bench-latency.json").read_text())
    assert found["host"]["fa4flex"]["median_us"] > 0
    assert found["first call"]["first"]["call"] > 0 and found["first call"]["second"]["call"] > 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--device", "cpu"], "--smoke"),
        (["--device", "cpu", "--smoke", "--rows", "nothing"], "d64 full 4k"),
        (["--device", "cpu", "--smoke", "--peers", "FA7"], "FA4"),
        (["--device", "cpu", "--smoke", "--rounds", "0"], "at least 1"),
    ],
)
def test_refusals_are_words(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ") and says in printed.err
