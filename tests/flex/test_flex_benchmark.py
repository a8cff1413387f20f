"""The benchmark of the backend runs on a CPU."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fa4flex.runtime.flex.attend import Module

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "flex_backend.py"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    spec = importlib.util.spec_from_file_location("flex_backend_benchmark", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec.loader.exec_module(module)
    return module


def test_block_masks_are_timed(benchmark: Any, capsys: pytest.CaptureFixture[str]) -> None:
    benchmark.main(["--device", "cpu", "--only", "masks", "--long", "512", "--rounds", "1"])
    said = capsys.readouterr().out
    assert said.count("fa4flex") >= 4 and said.count("torch  ") >= 4 and " ms" in said


def test_tables_reach_to_any_length(benchmark: Any) -> None:
    """Tables of distances lie on the device of the context."""
    sizes = benchmark.replace(benchmark.Sizes(), batch=1, q_len=70, kv_len=105, dim=16, dim_v=16)
    cpu = torch.device("cpu")
    for draw in benchmark.variant_table.TABLE["sandwich"]:
        assert all(a >= 0 for a, _ in benchmark.errors_of(draw(sizes), cpu))


@pytest.mark.parametrize("name", ["bigbird", "sandwich"])
def test_tables_lie_on_the_device(name: str, benchmark: Any) -> None:
    """No tensor is made elsewhere than the context says; on the meta device none has contents."""
    with torch.device("meta"):
        case = benchmark.variant_table.TABLE[name][0](benchmark.Sizes())
    attn = benchmark.fa4flex.compile(**case.compose())
    operands = attn.program.captured().operands
    assert operands and all(x.device.type == "meta" for x in operands)


def test_a_line_says_what_was_wrong(benchmark: Any) -> None:
    assert benchmark.words_of(AssertionError()) == "AssertionError: "
    said = benchmark.words_of(RuntimeError("backend='x' raised:\n\nOutOfMemoryError: out of resource\n at y"))
    assert said == "RuntimeError: backend='x' raised: OutOfMemoryError: out of resource"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["alibi", "gpt_oss_sinks", "document"])
def test_errors_are_those_of_the_same_maths(
    benchmark: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bf16, out and gradients, at most twice those of PyTorch operations: means of draws, as it says."""
    sizes = benchmark.replace(benchmark.Sizes(), q_len=24, kv_len=36, dim=32, dim_v=32)
    draw = benchmark.variant_table.TABLE[name][1]
    cpu = torch.device("cpu")
    found = benchmark.ratio([benchmark.errors_of(draw(sizes), cpu) for _ in range(80)])
    assert 0.1 < found <= 2, found

    made = Module.uncompiled

    def planted(self: Any) -> Any:
        attend = made(self)
        return lambda *given: (lambda out, *rest: (out * 1.1, *rest))(*attend(*given))

    monkeypatch.setattr(Module, "uncompiled", planted)
    sizes = benchmark.replace(sizes, dim=48, dim_v=48)  # functions are kept by widths
    assert benchmark.ratio([benchmark.errors_of(draw(sizes), cpu)]) > 2, "a fault is seen"
