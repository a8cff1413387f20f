"""The report on a new GPU: what is wrong, hangs or dies is said, and nothing of it stops the rest."""

from __future__ import annotations

import json
import re
import socket
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fa4flex.__main__ import main
from fa4flex.first_light import report, worker
from fa4flex.first_light.cases import CASES, Draw, case_named
from fa4flex.first_light.command import (
    END_SECONDS,
    MOST_SECONDS,
    RECORDED_SEED,
    SECONDS,
    parts_of,
    tasks_of,
)
from fa4flex.first_light.judge import judge
from fa4flex.first_light.processes import Done, Task, run_all
from fa4flex.first_light.rows import ROWS

RESULT = {"name": "out", "error": 1.0, "usual": 1.0, "right": True, "digest": "a", "sample": [0.0]}


@dataclass(frozen=True)
class Script(Task):
    text: str = ""

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-c", self.text]


def script(text: str, seconds: float = 60.0) -> Script:
    return Script("cuda", "right", "case", 0, seconds, text=text)


def right(**changed: Any) -> Done:
    said = {"arch": "sm_90a", "findings": [], "results": [RESULT | changed]}
    return Done(Task("cuda", "right", "case", 0, 1.0), 0.0, said)


def ended(*scripts: Script, until: float | None = None) -> list[Done]:
    return list(run_all(scripts, 2, time.monotonic() + 60 if until is None else until, lambda done: None))


def test_each_process_ends_by_itself() -> None:
    """A hang with a child of its own, a fault, and words without a result, before a case that is right."""
    hangs = script(
        "import subprocess, sys, time; sleeps = 'import time; time.sleep(60)';"
        "subprocess.Popen([sys.executable, '-c', sleeps]); print('begun', flush=True); time.sleep(60)",
        1.0,
    )
    dies = script("import os; os.kill(os.getpid(), 11)")
    speaks = script("print('no such driver')")
    well = script("print('words'); print('{\"results\": []}')")
    start = time.monotonic()
    first, second, third, last = ended(hangs, dies, speaks, well)
    assert time.monotonic() - start < 30
    assert "still running after 1 s" in first.said["error"] and "begun" in first.said["output"]
    assert "status -11" in second.said["error"]
    assert "status 0" in third.said["error"] and "no such driver" in third.said["output"]
    assert last.said["results"] == []
    words = [report.verdict(each).word for each in (first, second, third)]
    assert words == ["FAILED"] * 3


def test_nothing_begins_after_the_time_limit() -> None:
    (done,) = ended(script("print('{}')"), until=time.monotonic() - 1)
    assert report.verdict(done).passed is None
    (done,) = ended(script("import time; time.sleep(60)"), until=time.monotonic() + 1)
    assert report.verdict(done).passed is None  # nothing says that it hangs


@pytest.mark.parametrize(
    ("changed", "word", "says"),
    [
        ({}, "ok", "1.00 of PyTorch's"),
        ({"right": False, "error": 3.0}, "FAILED", "out is off by 3.0e+00, PyTorch by 1.0e+00"),
    ],
)
def test_verdicts(changed: dict[str, Any], word: str, says: str) -> None:
    verdict = report.verdict(right(**changed))
    assert verdict.word == word and says in verdict.says


def test_findings_and_tools_fail_a_case() -> None:
    done = right()
    assert report.verdict(replace(done, said=done.said | {"findings": ["a race"]})).says == "a race"
    under = replace(done, task=replace(done.task, under=("compute-sanitizer", "--tool", "memcheck")))
    assert report.verdict(under).passed is False  # it said nothing
    for summary, passed in (("ERROR SUMMARY: 0 errors", True), ("ERROR SUMMARY: 10 errors", False)):
        said = replace(under, said=under.said | {"sanitizer": [summary]})
        assert report.verdict(said).passed is passed
        assert report.verdict(said).name == "case under memcheck"


def test_bits_are_compared_for_recorded_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"sm_90a": {"case": {"out": {"digest": "a", "sample": [0.5]}}}}
    monkeypatch.setattr(report, "recorded", lambda: known)
    done = right()
    recorded = replace(done, task=replace(done.task, recorded=True))
    assert "bits" not in report.verdict(done).says
    assert report.verdict(recorded).says.endswith(", bits as simulated")
    other = right(digest="b", sample=[0.75])
    says = report.verdict(replace(other, task=recorded.task)).says
    assert says.endswith("in 0 of 1 results, samples at most 2.5e-01 apart")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cases_mean_what_they_call(case: Any) -> None:
    """Each case on the CPU executor; and an output that is off fails it."""
    draw = Draw.of(torch.device("cpu"), 1)
    trial = case.build(draw)
    results = judge(trial, case.gradients, draw.generator)
    assert [x.name for x in results] == (["out", "dq", "dk", "dv"] if case.gradients else ["out"])
    assert all(x.right for x in results), results
    attend = trial.attend
    off = replace(trial, attend=lambda *leaves: attend(*leaves) * 1.1)
    assert not all(x.right for x in judge(off, False, draw.generator))


def test_a_report_fits_ten_minutes_and_names_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = {task.name for task in tasks_of("cuda", "", 0)}
    assert names == {case.name for case in CASES} | set(ROWS)
    assert max(MOST_SECONDS.values()) < SECONDS / 4
    status = main(["first-light", "--device", "sm_100a", "--cases", "decode d128", "--time-limit", "0"])
    assert status == 1  # nothing ran
    written = (tmp_path / "first-light.json").read_text()
    assert json.loads(written)["cases"][0]["passed"] is None
    for private in (str(tmp_path), str(Path.home()), socket.gethostname()):
        assert not re.search(rf"\b{re.escape(private)}\b", written)


def test_every_step_has_a_part_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tools come last, and are asked for where they are installed; nothing is left of a step that has no
    tasks."""
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    tasks = tasks_of("cuda", "", 0)
    parts = parts_of(tasks, 1000.0, SECONDS)
    assert sorted(map(id, tasks)) == sorted(id(task) for part, _ in parts for task in part)
    assert [{(task.step, bool(task.under)) for task in part} for part, _ in parts] == [
        {("right", False)}, {("fast", False)}, {("right", True)},
    ]  # fmt: skip
    ends = [end - 1000.0 for _, end in parts]
    assert ends == sorted(ends) and ends[0] > 200 and ends[1] - ends[0] > 200 and ends[2] - ends[1] > 100
    assert ends[2] == SECONDS - END_SECONDS
    assert {task.under[-1] for task in parts[2][0]} == {"memcheck", "racecheck"}
    (only,) = parts_of(tasks_of("sm_100a", "", 0), 1000.0, SECONDS)
    assert only[1] == 1000.0 + SECONDS - END_SECONDS


def test_one_case_leaves_time_for_those_behind_it() -> None:
    """Cases that hang take half of what is left each, and all end within the limit."""
    hangs, well = script("import time; time.sleep(60)"), script("print('{\"results\": []}')")
    start = time.monotonic()
    done = list(run_all([hangs, hangs, well], 1, start + 8, lambda done: None))
    assert time.monotonic() - start < 12
    assert 3 < done[0].seconds < 5 and 1 < done[1].seconds < 3
    assert [report.verdict(one).passed for one in done[:2]] == [None, None]  # nothing says that they hang
    assert done[2].said["results"] == []


def test_reports_name_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where errors of libraries do."""
    monkeypatch.setattr(socket, "gethostname", lambda: "lab-17.uni.edu")
    monkeypatch.setattr("getpass.getuser", lambda: "ada")
    monkeypatch.setattr(Path, "home", lambda: Path("/home/Ada Lovelace"))
    error = (
        "OSError: /home/ada/env/lib/site-packages/torch/cuda.py:33 on lab-17.uni.edu (lab-17), ada's; "
        "GPU-8f1b2c3d-0123-4567-89ab-0123456789ab, '/home/Ada Lovelace/x.toml', ~/.cache/a/b.o, "
        "1/2 of q/k/v, https://docs.example.org/a/page"
    )
    done = replace(right(), said={"error": error})
    verdicts = [report.verdict(done)]
    about = {"nvidia-smi": f"not read: {error}"}
    told = report.anonymous(report.as_json(about, [done], verdicts))
    privates = "lab-17", "ada", "Ada", "home", "site-packages", "8f1b2c3d", "0123456789ab", ".cache"
    rest = "OSError: cuda.py:33", "x.toml", "b.o", "1/2 of q/k/v", "https://docs.example.org/a/page"
    for written in (json.dumps(told), report.anonymous(report.text(verdicts))):
        assert not [x for x in privates if x in written]
        assert all(x in written for x in rest)
    assert told["cases"][0]["passed"] is False and told["cases"][0]["seconds"] == 0.0


def test_unknown_devices_and_cases_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--device", "sm_80"], ["--device", "sm_90a", "--cases", "no such"]):
        assert main(["first-light", *arguments]) == 2
    errors = capsys.readouterr().err
    assert "cuda, sm_90a or sm_100a" in errors and "causal d64" in errors


def test_a_simulated_b200_has_the_recorded_bits() -> None:
    """The smallest case as its process computes it, at every run of the tests."""
    done = Done(Task("sm_100a", "right", "decode d128", RECORDED_SEED, 1.0, recorded=True), 0.0, {})
    verdict = report.verdict(replace(done, said=worker.right("sm_100a", "decode d128", RECORDED_SEED)))
    assert verdict.passed and verdict.says.endswith("bits as simulated"), verdict.says


@pytest.mark.slow
def test_the_command_on_a_simulated_b200(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = ["--device", "sm_100a", "--cases", "decode d128", "--out", str(tmp_path)]
    assert main(["first-light", *chosen]) == 0
    assert "1 ok, 0 failed, 0 not run" in capsys.readouterr().out
    (case,) = json.loads((tmp_path / "first-light.json").read_text())["cases"]
    assert case["passed"] and case["arch"] == "sm_100a" and case["says"].endswith("bits as simulated")
    assert "bits as simulated" in (tmp_path / "first-light.txt").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", [case.name for case in CASES if case.recorded])
@pytest.mark.parametrize("chip", ["sm_90a", "sm_100a"])
def test_simulated_chips_have_the_recorded_bits(chip: str, name: str) -> None:
    (task,) = [task for task in tasks_of(chip, "", 0) if task.name == name]
    (done,) = run_all([task], 1, time.monotonic() + 600, lambda done: None)
    verdict = report.verdict(done)
    assert verdict.passed, verdict.says
    assert verdict.says.endswith("bits as simulated"), "run scripts/record_first_light.py where this is meant"
    assert case_named(name).recorded
