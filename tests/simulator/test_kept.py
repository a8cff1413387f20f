"""Simulated kernels on disk: another process launches them without the compiler, and computes the same."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from executed import comparing

import fa4flex
from fa4flex.codegen.plan.target import SM90A
from fa4flex.compiler import cache
from fa4flex.compiler import compile as compile_module
from fa4flex.compiler.signature import Signature
from fa4flex.errors import UnsupportedError
from fa4flex.lower import Given, Lowered, lower_forward
from fa4flex.primitives.schedule import Schedule
from fa4flex.simulator import device
from fa4flex.simulator.doors import kept
from fa4flex.variants import causal
from fa4flex.view.gpu import inputs_of
from fa4flex.view.sizes import setting

PROGRAM = """
import sys, torch, fa4flex
from fa4flex.compiler import compile as compiling
from fa4flex.simulator import device
from fa4flex.variants import causal

def refuse(*given):
    raise AssertionError("compiled anew")

if sys.argv[2] == "refuse":
    compiling.trace_and_compile = refuse
q, k, v = (torch.randn(1, 2, 70, 64, generator=torch.Generator().manual_seed(5)).bfloat16() for _ in range(3))
with device("sm_90a") as gpu:
    torch.save(fa4flex.compile(mask=causal)(q, k, v), sys.argv[1])
assert not gpu.findings and gpu.results
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FA4FLEX_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.delenv("FA4FLEX_CACHE", raising=False)
    monkeypatch.setattr(compile_module, "_kernels", {})
    found = cache.directory()
    assert found is not None
    return found


def lowered() -> Lowered:
    program = fa4flex.compile(mask=causal).program
    inputs = inputs_of(program, setting(program, 256, 256).shape, {"head_dim": 64})
    return lower_forward(Given(program.facts, Schedule(), inputs, program.captured(), SM90A))


def refuse(*given: Any) -> Any:
    raise AssertionError("compiled anew")


@pytest.mark.slow
def test_another_process_launches_what_this_one_has_compiled(folder: Path, tmp_path: Path) -> None:
    """Addresses of this process are of no use there."""
    found = []
    for what in ("compile", "refuse"):
        path = tmp_path / what
        command = [sys.executable, "-c", PROGRAM, str(path), what]
        subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
        found.append(torch.load(path))
    assert [path.suffix for path in folder.iterdir()] == [cache.SIMULATED]
    assert torch.equal(*found) and found[0].isfinite().all()


def test_a_kept_kernel_is_launched_within_the_simulator_alone(folder: Path) -> None:
    """As one that was compiled."""
    space: dict[str, Any] = {}
    exec(f"def capped(s, b, h, q, k):\n    return s * {random.random()}", space)  # of no other test
    with comparing(keep=True) as compared, device("sm_90a"):
        out = fa4flex.compile(score_mod=space["capped"])(*torch.randn(3, 1, 2, 70, 64).bfloat16())
    (path,) = folder.iterdir()
    launch, arguments = kept.loaded(cache.content(path)), compared.kept[-1].arguments
    wanted = out.clone()
    out.zero_()
    with pytest.raises(UnsupportedError, match="outside of it"):
        launch(*arguments)
    with device("sm_90a") as gpu:
        launch(*arguments)
    assert gpu.results and not gpu.findings
    assert torch.equal(out, wanted) and wanted.any()


def test_files_that_catch_launches_are_part_of_the_key(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert compile_module.digest(Path(kept.__file__).parent) == kept.IDENTITY
    with device("sm_90a"):
        assert lowered().compile(Signature()).compiled
        compile_module._kernels.clear()
        assert not lowered().compile(Signature()).compiled
        compile_module._kernels.clear()
        monkeypatch.setattr(kept, "IDENTITY", "another")
        assert lowered().compile(Signature()).compiled


def test_a_file_that_does_not_load_is_no_harm(folder: Path) -> None:
    with device("sm_90a"):
        first = lowered().compile(Signature())
        compile_module._kernels.clear()
        cache.store(folder, first.key, cache.SIMULATED, b"whole, and of no use")
        assert lowered().compile(Signature()).compiled


def test_nothing_is_kept_where_the_cache_is_off(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FA4FLEX_CACHE", "0")
    with device("sm_90a"):
        assert lowered().compile(Signature()).compiled
    assert not list(folder.iterdir())
