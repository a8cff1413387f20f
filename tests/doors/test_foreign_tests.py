"""The scripts that run other projects' tests on fa4flex: how each case ends, and which are unexpected."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"

SAMPLE = """
import os
import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

def attend(**options):
    q, k, v = (torch.randn(1, 2, 16, 8, device="cuda") for _ in range(3))
    ours = torch.compile(flex_attention)(q, k, v, **options)
    return ours, torch.nn.functional.scaled_dot_product_attention(q, k, v)

def test_right():
    torch.testing.assert_close(*attend())

def test_wrong():
    torch.testing.assert_close(*attend(scale=0.1))

def test_refused():
    attend(kernel_options={"nonsense": 1})

def test_without_a_call():
    assert torch.cuda.is_available()

def test_raw():
    attend()
    [][0]

def test_skipped():
    pytest.skip("for a reason")

def test_crash():
    os._exit(3)
"""


def load(name: str) -> ModuleType:
    sys.path.insert(0, str(SCRIPTS))
    try:
        spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(SCRIPTS))


@pytest.mark.slow
def test_every_end_of_a_case(tmp_path: Path) -> None:
    """Each kind is told from the others, and cases without a reason make the script fail."""
    (tmp_path / "test_sample.py").write_text(SAMPLE)
    command = [sys.executable, str(SCRIPTS / "gym_tests.py"), str(tmp_path / "test_sample.py")]
    options = ["--mode", "eager", "--jobs", "1", "--limit", "120", "--out", str(tmp_path)]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=300)
    found = {x["case"]: x["kind"] for x in json.loads((tmp_path / "gym_tests.json").read_text())}
    assert found == {
        "test_right": "passed",
        "test_wrong": "wrong result",
        "test_refused": "fa4flex error",
        "test_without_a_call": "passed without a call",
        "test_raw": "raw error",
        "test_skipped": "not applicable",
        "test_crash": "crash",
    }
    assert done.returncode == 1
    assert "UNEXPECTED eager test_wrong: wrong result" in done.stdout


def test_reasons() -> None:
    """A reason explains the cases that it matches, in its modes alone; a defect keeps how the case ended."""
    foreign = load("foreign_tests")
    outcomes = [
        foreign.Outcome("test_a", "eager", "raw error", "KeyError: 1"),
        foreign.Outcome("test_a", "inductor", "raw error", "KeyError: 1"),
        foreign.Outcome("test_b", "eager", "fa4flex error", "InputError: mixed"),
        foreign.Outcome("test_c", "eager", "passed"),
    ]
    reasons = [
        foreign.Reason("KeyError", "looks at keys", ("eager",)),
        foreign.Reason("test_b.*\\n.*mixed", "mixes", defect=True),
    ]
    explained = foreign.explained(outcomes, reasons)
    assert [x.kind for x in explained] == ["not applicable", "raw error", "fa4flex error", "passed"]
    assert [x.mode for x in foreign.unexplained(explained)] == ["inductor"]
    text = foreign.table(explained)
    assert "| eager | 1 | 1 | 0 | 1 | 3 |" in text and "to be changed: mixes" in text
    assert "UNEXPECTED: KeyError: 1" in text
