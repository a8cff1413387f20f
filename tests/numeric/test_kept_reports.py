"""Reports of the compiler are kept on disk, for as long as nothing changes that decides a kernel's code."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

import fa4flex
from fa4flex.compiler import cache
from fa4flex.compiler import compile as compile_module
from fa4flex.compiler import inspect as inspecting
from fa4flex.compiler.inspect import Inspection
from fa4flex.kernels.plan.target import SM90A
from fa4flex.lower import Given, lower_backward
from fa4flex.primitives.schedule import Schedule
from fa4flex.variants import causal
from fa4flex.view.gpu import inputs_of
from fa4flex.view.sizes import setting


def refuse(*given: Any) -> Any:
    raise AssertionError("compiled anew")


def inspected(entry: str = "") -> Inspection:
    """A program of several kernels."""
    program = fa4flex.compile(mask=causal).program
    inputs = inputs_of(program, setting(program, 256, 256).shape, {"head_dim": 64})
    lowered = lower_backward(Given(program.facts, Schedule(), inputs, program.captured(), SM90A))
    return inspecting.inspect(lowered.source, lowered.problem, entry=entry)


def test_a_report_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same is read of it for each of a program's kernels; not after a change of the files of kernels."""
    monkeypatch.setenv("FA4FLEX_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("FA4FLEX_CACHE", raising=False)
    first = inspected()
    assert [path.suffix for path in tmp_path.iterdir()] == [cache.REPORT]
    with patch.object(inspecting, "trace_and_compile", refuse):
        again, main = inspected(), inspected("bwd_sm90kernel")
        assert again == first and first.seconds > 0 and first.ptx and first.cubin.startswith(b"\x7fELF")
        assert main.resources == first.resources_of("bwd_sm90kernel") != first.resources
        digest = compile_module.digest
        monkeypatch.setattr(compile_module, "digest", lambda folder: digest(folder) + "#")
        with pytest.raises(AssertionError, match="anew"):
            inspected()


def test_none_is_kept_where_the_cache_is_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FA4FLEX_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("FA4FLEX_CACHE", "0")
    with patch.object(inspecting, "trace_and_compile", refuse), pytest.raises(AssertionError, match="anew"):
        inspected()
    assert not list(tmp_path.iterdir())
