"""Kernels of gradients are compiled by other processes, beside a first call, and only where wanted."""

from __future__ import annotations

import importlib
import io
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from kernel_programs import KINDS, Asked, Given, Kind, every_kernel, launched_backward

import fa4flex
import ptxsim
from fa4flex.codegen.emit import Source
from fa4flex.compiler import ahead, cache, compile, worker
from fa4flex.compiler.compile import compile_ahead, compile_kernel, kernel_key
from fa4flex.kernels.plan.target import SM90A
from fa4flex.runtime import launch
from fa4flex.runtime.cuda import backward, engine
from fa4flex.runtime.cuda.engine import Engine
from fa4flex.variants import causal

SLEEPER = """
    import os, pathlib, time
    pathlib.Path({path!r}).write_text(str(os.getpid()))
    time.sleep(120)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache, two processors, and no process left behind."""
    monkeypatch.setenv("FA4FLEX_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(compile, "_kernels", {})
    yield tmp_path / "kernels"
    ahead.end_all()


def program() -> Given:
    return launched_backward(KINDS["plain"], (64, 64), SM90A)[1]


def sleeper(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Path to which a worker that does nothing for two minutes writes its number."""
    path = folder / "pid"
    (folder / "sleeper.py").write_text(textwrap.dedent(SLEEPER.format(path=str(path))))
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setattr(ahead, "WORKER", "sleeper")
    return path


def number_in(path: Path) -> int:
    while not (path.exists() and path.read_text()):
        time.sleep(0.01)
    return int(path.read_text())


def runs(pid: int) -> bool:
    state = Path(f"/proc/{pid}/stat")
    return state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.slow
def test_found_on_disk(folder: Path) -> None:
    given = program()
    compile_ahead(*given)
    assert len(ahead._running) == 1
    compile_ahead(*given)
    assert len(ahead._running) == 1
    kernel = compile_kernel(*given)
    assert not kernel.compiled and not ahead._running
    (path,) = folder.iterdir()
    assert path.suffix == ".so"
    compile_ahead(*given)
    compile._kernels.clear()
    compile_ahead(*given)
    assert not ahead._running, "what is in memory or on disk is not compiled again"


LEAVES_A_MARK = """
    import {when}, pathlib
    def mark(): pathlib.Path({path!r}).touch()
    {call}
"""
DRIVER = "cuda.bindings.driver", "cuda.bindings.driver.cuInit = lambda flags: mark()"


@pytest.mark.slow
def test_a_worker_imports_no_torch_asks_no_driver_and_leaves_at_once(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kernel is the one that this process makes, which has torch."""
    made = {}
    for module, name, when, call in (
        ("torch", "torch", "sys", "mark(); raise ImportError"),
        ("sitecustomize", "exit", "atexit", "atexit.register(mark)"),
        ("sitecustomize", "driver", *DRIVER),
    ):
        made[name] = tmp_path / f"{name} was run"
        code = LEAVES_A_MARK.format(when=when, path=str(made[name]), call=call)
        with (tmp_path / f"{module}.py").open("a") as file:
            file.write(textwrap.dedent(code))
    given = program()
    with monkeypatch.context() as patched:
        patched.setenv("PYTHONPATH", str(tmp_path))
        compile_ahead(*given)
        compile_kernel(*given)
    (path,) = folder.iterdir()
    assert not [name for name, mark in made.items() if mark.exists()]
    assert (path.suffix, cache.content(path)) == compile.build_object(*given, SM90A.name)


def test_torch_is_hidden_only_where_it_is_not_imported() -> None:
    with worker.without_torch():
        assert sys.modules["torch"] is torch
    with patch.dict(sys.modules):
        del sys.modules["torch"]
        with worker.without_torch(), pytest.raises(ImportError):
            importlib.import_module("torch")
        assert "torch" not in sys.modules


def test_errors_are_raised_here(folder: Path) -> None:
    _, problem, signature = program()
    wrong = Source("wrong", "kernel = no_such_name\n")
    compile_ahead(wrong, problem, signature)
    with pytest.raises(NameError, match="no_such_name"):
        compile_kernel(wrong, problem, signature)
    assert not ahead._running


@pytest.mark.parametrize("processors", [2, 16])
def test_few_run_at_a_time(
    processors: int, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(processors)))
    sleeper(tmp_path, monkeypatch)
    for i in range(ahead.MOST_RUNNING + 2):
        ahead.start(f"key {i}", b"")
    assert len(ahead._running) == min(ahead.MOST_RUNNING, processors - 1)
    ahead.end_all()


def test_a_process_that_another_thread_waits_for_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    class Polled:
        def poll(self) -> None:
            ahead._running.pop("first", None)  # as `wait` does

    polled: Any = ahead.Running(Polled(), io.BytesIO())  # type: ignore[arg-type]
    monkeypatch.setattr(ahead, "_running", {"first": polled, "second": polled})
    ahead.start("second", b"")
    assert list(ahead._running) == ["second"]


def test_late_processes_are_not_waited_for(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = sleeper(tmp_path, monkeypatch)
    ahead.start("key", b"")
    assert runs(number_in(pid))
    monkeypatch.setattr(cache, "WAIT", 0.1)
    ahead.wait("key")
    assert not runs(number_in(pid))


def test_interrupted_waits_forget_no_process(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    sleeper(tmp_path, monkeypatch)
    ahead.start("key", b"")
    with patch.object(ahead.time, "sleep", interrupt), pytest.raises(KeyboardInterrupt):
        ahead.wait("key")
    assert list(ahead._running) == ["key"]


def test_nothing_outlives_the_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pid = sleeper(tmp_path, monkeypatch)
    code = f"""
        import pathlib, time
        from fa4flex.compiler import ahead
        ahead.WORKER = "sleeper"
        ahead.start("key", b"")
        while not (pathlib.Path({str(pid)!r}).exists() and pathlib.Path({str(pid)!r}).read_text()):
            time.sleep(0.01)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, env=ahead._environment())
    assert not runs(number_in(pid))


def test_children_leave_it_alone(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pid = sleeper(tmp_path, monkeypatch)
    ahead.start("key", b"")
    child = os.fork()
    if child == 0:
        os._exit(len(ahead._running))
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert runs(number_in(pid)) and len(ahead._running) == 1


@pytest.mark.parametrize("why", ["no cache", "one processor", "simulated"])
def test_not_begun(why: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if why == "no cache":
        monkeypatch.setenv("FA4FLEX_CACHE", "0")
    if why == "one processor":
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    if why == "simulated":
        monkeypatch.setattr(compile, "simulating", lambda: True)
    compile_ahead(*program())
    assert not ahead._running


class Stopped(Exception):
    pass


def test_only_where_gradients_are_wanted(folder: Path) -> None:
    """And for what the backward pass will ask for."""
    seen: list[tuple[Any, ...]] = []

    def stop(*_: Any) -> Any:
        raise Stopped

    q, k, v = (torch.randn(1, 2, 64, 64).bfloat16() for _ in range(3))
    attn = fa4flex.compile(mask=causal)
    with (
        ptxsim.device("sm_90a"),
        patch.object(launch, "compile_ahead", lambda *given: seen.append(given)),
        patch.object(Engine, "made", stop),
    ):
        for wanted, options in ((False, {}), (True, {}), (True, {"return_lse": True})):
            with pytest.raises(Stopped):
                attn(q.requires_grad_(wanted), k, v, **options)
        with torch.no_grad(), pytest.raises(Stopped):
            attn(q, k, v)
    assert [dlse for *_, dlse in seen] == [False, True]


def asked_ahead(kind: Kind) -> list[str]:
    """Keys of what a first call of this kind begins to have compiled."""
    asked: list[str] = []
    with (
        patch.object(backward, "require_not_capturing", lambda: None),
        patch.object(engine, "target_of", lambda device: SM90A),
        patch.object(ahead, "start", lambda key, job: asked.append(key)),
    ):
        backward.compile_ahead(*kind.called((64, 64)), kind.dlse)
    return asked


def keys_of(kernels: list[Asked]) -> list[str]:
    programs = [(lowered.source.key, lowered.problem, signature) for lowered, signature in kernels]
    return [kernel_key(*program, SM90A.name) for program in programs]


SORTED = replace(KINDS["causal, packed"], options={"schedule": fa4flex.Schedule(order="longest_first")})


@pytest.mark.parametrize(
    ("kind", "beside"),
    [
        (KINDS["alibi"], []),
        (KINDS["causal, packed"], ["sequences"]),
        (SORTED, ["sequences"]),
        (KINDS["natten"], ["tables"]),
    ],
    ids=["alone", "lengths", "sorted", "tables"],
)
def test_same_keys(kind: Kind, beside: list[str], folder: Path) -> None:
    """Kernels begun ahead are those that the passes compile, but for the first, which this process makes."""
    first, second = (every_kernel(each, kind, (64, 64), SM90A) for each in ("forward", "backward"))
    assert [lowered.direction for lowered, _ in first] == ["forward", *beside]
    assert [lowered.direction for lowered, _ in second] == ["backward", *beside]
    assert asked_ahead(kind) == keys_of([second[0], *first[1:], *second[1:]])


def test_a_process_that_is_prepared_takes_the_first_job(folder: Path, tmp_path: Path) -> None:
    """It is begun where nothing is kept, and only there; without a job it ends."""
    folder.mkdir(mode=0o700)
    compile.prepare_ahead("sm_90a")
    (one,) = ahead._prepared
    ahead.start("key", b"no job")
    assert not ahead._prepared and ahead._running["key"] is one
    ahead.wait("key")
    assert "UnpicklingError" in ahead.failed("key")
    compile.prepare_ahead("sm_90a")
    (other,) = ahead._prepared
    ahead.dismiss()
    assert not ahead._prepared and other.process.returncode
    cache.store(folder, "key", ".so", b"")
    compile.prepare_ahead("sm_90a")
    assert not ahead._prepared
