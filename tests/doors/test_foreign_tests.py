"""The scripts that run other projects' tests on fa4flex: how each case ends, and which are unexpected."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

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


FOR_A_GPU = """
import unittest
import torch
from torch.nn.attention.experimental._paged_attention import PagedAttention
from torch.utils._triton import has_triton

PLATFORM_SUPPORTS_BF16 = False
ready = torch.cuda.is_available() and has_triton() and torch.cuda.get_device_capability() >= (8, 0)
dtypes = [torch.float16, torch.bfloat16] if PLATFORM_SUPPORTS_BF16 else [torch.float16]
B = 4
H = 8
S = 2048
pages = PagedAttention(4, 16, 2)
placed = PagedAttention(4, 16, 2, device="cuda:0")
there = torch.device("cuda:1")

class Test(unittest.TestCase):
    device = "cuda"

    def run_dynamic_test(self, B=B, H=H, S=S, D=64):
        return B, H, S, D

    def run_automatic_dynamic_test(self, B=B, S=S):
        return B, S

    def test(self):
        B = 4
        with_gradients = not (self.device == "cpu")
        x = torch.zeros(2, device=self.device).cuda()
        return B, with_gradients, x, x.is_cuda
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

    lines = (tmp_path / "gym_tests.jsonl").read_text().splitlines()
    (tmp_path / "gym_tests.jsonl").write_text("\n".join(lines[:5]) + "\n")
    subprocess.run([*command, *options], capture_output=True, text=True, timeout=300)
    again = (tmp_path / "gym_tests.jsonl").read_text().splitlines()
    assert again[:5] == lines[:5] and len(again) == 7, "what is recorded is not run again"
    assert {x["case"]: x["kind"] for x in json.loads((tmp_path / "gym_tests.json").read_text())} == found

    # Other tests: nothing that is recorded counts.
    (tmp_path / "test_sample.py").write_text(SAMPLE + "\n")
    done = subprocess.run(
        [*command, *options, "--budget", "1e-9"], capture_output=True, text=True, timeout=300
    )
    left = json.loads((tmp_path / "gym_tests.json").read_text())
    assert {(x["kind"], x["reason"]) for x in left} == {
        ("not run", "the budget of 1e-09 minutes was used up")
    }
    assert len(left) == 7 and done.returncode == 0


def written(tmp_path: Path, name: str, text: str) -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def test_tests_for_a_gpu_are_rewritten(tmp_path: Path) -> None:
    """Code that names or asks for a GPU names a CPU, and gates let everything through; a second GPU stays
    one."""
    on_cpu = load("flex_tests_on_cpu").on_cpu
    found: dict[str, Any] = {}
    exec(on_cpu(written(tmp_path, "test_flex_attention.py", FOR_A_GPU)), found)
    assert found["ready"] and torch.bfloat16 in found["dtypes"]
    assert (found["B"], found["H"], found["S"]) == (2, 2, 512)
    assert found["pages"].page_table.device == found["placed"].page_table.device == torch.device("cpu")
    assert found["there"] == torch.device("cuda:1")
    assert found["Test"]().run_dynamic_test() == (2, 4, 1024, 64)
    assert found["Test"]().run_automatic_dynamic_test() == (2, 1024)
    batch, with_gradients, x, there = found["Test"]().test()
    assert batch == 4 and with_gradients and there and x.device.type == found["Test"].device == "cpu"

    exec(on_cpu(written(tmp_path, "test_flex_decoding.py", FOR_A_GPU)), found)
    assert (found["B"], found["H"], found["S"]) == (4, 8, 2048)


@pytest.mark.parametrize(
    "present, absent, kind",
    [
        ("torch.cuda.is_available()", "True", r"is_available\(\)"),
        ("torch.cuda.get_device_capability()", "(8, 0)", r"get_device_capability\(\)"),
        ("has_triton() and", "", r"has_triton\(\)"),
        ("if PLATFORM_SUPPORTS_BF16", "if True", "supports bfloat16"),
        ("\nS = 2048", "\nS = 1024", "S"),
        ("B=B, H=H, S=S", "B=B, H=8", "run_dynamic_test"),
        (".cuda()", "", r"cuda\(\)"),
        ("x.is_cuda", "x.is_cpu", "is_cuda"),
        ('self.device == "cpu"', 'self.device != "cuda"', "inference only"),
    ],
)
def test_what_is_not_found_is_said(tmp_path: Path, present: str, absent: str, kind: str) -> None:
    rewriting = load("flex_tests_on_cpu")
    assert FOR_A_GPU.count(present) == 1
    path = written(tmp_path, "test_flex_attention.py", FOR_A_GPU.replace(present, absent))
    with pytest.raises(rewriting.UnknownTests, match=f"nothing to replace for: {kind}$"):
        rewriting.on_cpu(path)


def test_tests_of_any_device_stay_as_they_are(tmp_path: Path) -> None:
    text = FOR_A_GPU + "\ninstantiate_device_type_tests(Test, globals())\n"
    assert load("flex_tests_on_cpu").on_cpu(written(tmp_path, "test_flex_attention.py", text)) == text


def test_a_budget_reaches_each_test_first() -> None:
    """Further parameters of tests are what a budget leaves out, and no case is taken twice."""
    names = ["a_float16_1", "a_float16_2", "a_bfloat16_3", "a_float32_10", "b", "c_1", "c_2"]
    order = load("foreign_tests")._in_turns(range(len(names)), names)
    assert sorted(order) == list(range(len(names)))
    assert {names[i][0] for i in order[:3]} == {"a", "b", "c"}
    assert {names[i][0] for i in order[3:5]} == {"a", "c"}


def test_captured_tensors_want_gradients() -> None:
    wants = load("torch_flex_tests")._wants_gradients
    q, bias = torch.zeros(1), torch.zeros(1, requires_grad=True)

    def reads(captured: torch.Tensor) -> Callable[..., torch.Tensor]:
        return lambda score, *index: score + captured

    assert not wants(((q, q), {"scale": 0.5, "score_mod": reads(q)}))
    assert wants(((q, bias), {}))
    outer = partial(lambda inner, score: inner(score), reads(bias))
    for mod in (reads(bias), outer, reads(outer)):
        assert wants(((q,), {"score_mod": mod}))


def test_reasons_of_a_gpu_are_of_a_gpu_alone() -> None:
    """Formats that GPUs do not multiply are refused there, by design, and nowhere else."""
    script = load("torch_flex_tests")
    words = "UnsupportedError: torch.float32 tensors on cuda:0 expected: bfloat16 or float16"
    refused = load("foreign_tests").Outcome("test_GQA_float32", "eager", "fa4flex error", words)
    by_device = {
        device: [reason for reason in script.Tests((), device).reasons if reason.holds(refused)]
        for device in script.DEVICES
    }
    assert len(by_device["cuda"]) == 1 and not by_device["cpu"]


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
