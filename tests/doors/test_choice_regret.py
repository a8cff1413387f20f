"""The benchmark of the choice's regret, by invented times; and its fit."""

from __future__ import annotations

import json
from pathlib import Path
from runpy import run_path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "choice_regret.py"


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return run_path(str(SCRIPT), run_name="choice_regret")


def test_a_dry_run_draws_times_and_reports(
    script: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "regret.json"
    assert script["main"](["--record", str(path), "--dry", "--problems", "12", "--seed", "5"]) == 0
    said, found = capsys.readouterr().out, json.loads(path.read_text())
    assert "seed 5" in said and "chosen over best" in said and "predicted over measured" in said
    assert len(found["rows"]) == 12 and found["dry"] and found["seed"] == 5
    assert {row["problem"]["direction"] for row in found["rows"]} == {"forward", "backward"}
    assert max(len(row["candidates"]) for row in found["rows"]) >= 4
    assert all(len({c["name"] for c in row["candidates"]}) == len(row["candidates"]) for row in found["rows"])


def test_regret_is_that_of_the_first_candidate(script: dict[str, Any]) -> None:
    rows = [{"candidates": [{"seconds": 3.0}, {"seconds": 2.0}]}, {"candidates": [{"seconds": 1.0}]}]
    assert script["regrets"](rows) == [0.5]


def test_the_fit_finds_constants_that_times_were_invented_by(
    script: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Times are 1.1 times what the model says, but for noise of 2 %."""
    path = tmp_path / "regret.json"
    script["main"](["--record", str(path), "--dry", "--problems", "16", "--seed", "1"])
    rows = script["Fitted"](json.loads(path.read_text())["rows"])
    before = script["constants"].ROWS[0]
    after = script["fit"](rows, before, rounds=2)
    assert rows.loss(after) < 0.5 * rows.loss(before)
    assert script["main"](["--fit", str(path)]) == 0
    said = capsys.readouterr().out
    assert "before, held out" in said and "after, held out" in said and "Constants(chip='H200'" in said
    assert script["constants"].ROWS[0] is before
