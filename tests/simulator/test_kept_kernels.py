"""Simulated kernels on disk: another process launches them without the compiler, and computes the same."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from executed import comparing
from torch import Tensor

import fa4flex
from fa4flex.compiler import cache
from fa4flex.compiler import compile as compile_module
from fa4flex.compiler.signature import Signature
from fa4flex.errors import UnsupportedError
from fa4flex.kernels.plan.target import SM90A
from fa4flex.lower import Given, Lowered, lower_forward
from fa4flex.primitives.schedule import Schedule
from fa4flex.variants import causal
from fa4flex.view.gpu import inputs_of
from fa4flex.view.sizes import setting
from ptxsim import device
from ptxsim.doors import kept

LAUNCH = """
import torch, fa4flex
from ptxsim import device

def launched(capped):
    draw = torch.Generator().manual_seed(5)
    with device("sm_90a") as gpu:
        out = fa4flex.compile(score_mod=capped)(*torch.randn(3, 1, 2, 70, 64, generator=draw).bfloat16())
    assert gpu.results and not gpu.findings
    return out
"""
AFTERWARDS = """
import sys
from fa4flex.compiler import compile as compiling

def refuse(*given):
    raise AssertionError("compiled anew")

compiling.trace_and_compile = refuse
torch.save(launched(capped), sys.argv[1])
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FA4FLEX_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.delenv("FA4FLEX_CACHE", raising=False)
    monkeypatch.setattr(compile_module, "_kernels", {})
    found = cache.directory()
    assert found is not None
    return found


def of_no_other_test() -> tuple[str, Tensor]:
    """Text of a score mod whose kernel has to be compiled, and what a launch in this process gives."""
    space: dict[str, Any] = {}
    text = f"def capped(s, b, h, q, k):\n    return s * {random.random()}\n"
    exec(text + LAUNCH, space)
    return text, space["launched"](space["capped"])


def test_another_process_launches_what_this_one_has_compiled(folder: Path, tmp_path: Path) -> None:
    """Addresses of this process are of no use there."""
    text, wanted = of_no_other_test()
    assert [path.suffix for path in folder.iterdir()] == [cache.SIMULATED]
    command = [sys.executable, "-c", text + LAUNCH + AFTERWARDS, str(tmp_path / "out")]
    subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
    assert torch.equal(torch.load(tmp_path / "out"), wanted) and wanted.any()


def test_a_kept_kernel_is_launched_within_the_simulator_alone(folder: Path) -> None:
    """Outside of the simulator it refuses, as one that was compiled."""
    with comparing(keep=True) as compared:
        _, out = of_no_other_test()
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


# --- when ---------------------------------------------------------------------------------------------------


def lowered() -> Lowered:
    program = fa4flex.compile(mask=causal).program
    inputs = inputs_of(program, setting(program, 256, 256).shape, {"head_dim": 64})
    return lower_forward(Given(program.facts, Schedule(), inputs, program.captured(), SM90A))


@pytest.fixture(scope="module")
def once() -> Any:
    """Result of the compiler, the same each time that it is asked."""
    with device("sm_90a"):
        found = lowered()
        given = found.source, found.problem, Signature(), "--enable-tvm-ffi --gpu-arch sm_90a"
        return compile_module.trace_and_compile(*given)


def compiled(once: Any) -> bool:
    """True if the compiler was asked for a kernel that this process has forgotten."""
    compile_module._kernels.clear()
    with device("sm_90a"), patch.object(compile_module, "trace_and_compile", lambda *given: once):
        return lowered().compile(Signature()).compiled


def test_files_that_catch_launches_are_part_of_the_key(
    folder: Path, once: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(Path(kept.__file__).parent, tmp_path / "doors"))
    assert kept.identity(copy) == kept.IDENTITY
    for path in copy.glob("*.py"):
        path.write_text(path.read_text() + "# changed\n")
        assert kept.identity(copy) != kept.IDENTITY
    assert compiled(once) and not compiled(once)
    monkeypatch.setattr(kept, "IDENTITY", "another")
    assert compiled(once) and not compiled(once)


def test_a_file_that_does_not_load_is_no_harm(folder: Path, once: Any) -> None:
    assert compiled(once)
    (path,) = folder.iterdir()
    cache.store(folder, path.stem, cache.SIMULATED, b"whole, and of no use")
    assert compiled(once)


def test_nothing_is_kept_where_the_cache_is_off(
    folder: Path, once: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FA4FLEX_CACHE", "0")
    assert compiled(once) and compiled(once)
    assert not list(folder.iterdir())
