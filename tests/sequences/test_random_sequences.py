"""A short run of random sequences, and checks that the tester sees what it is to see."""

from __future__ import annotations

import select
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._functorch.config

import fa4flex
from fa4flex.bench.isolated import begin
from fa4flex.runtime.flex.attend import Module

from . import calls, changes, gpu_steps, pool
from .oracle import Failure
from .processes import Running, report, wait
from .running import Setting, run
from .steps import Asked, ask, run_step

SECONDS = 20.0


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Settings of the process, which runs of sequences change."""
    monkeypatch.setattr(Module, "compiled", Module.compiled)
    threads, config, dtype = torch.get_num_threads(), torch._functorch.config, torch.get_default_dtype()
    with config.patch(donated_buffer=config.donated_buffer):
        yield
    torch.set_num_threads(threads)
    torch.set_default_dtype(dtype)
    torch.use_deterministic_algorithms(False)


@pytest.mark.slow
def test_sequences(seed: int) -> None:
    """Other sequences each time: `python -m tests.sequences --seed <number> --calls 20000` is a long run."""
    report = run(Setting(seed=seed), seconds=SECONDS, shrink_seconds=0.0, stop_at_first=True)
    assert not report.failures, report.table()
    assert report.calls > 10


@pytest.mark.parametrize(
    ("words", "status", "expected"),
    [
        ("7 calls in 2 sequences, 1 s: 0 failures of 0 kinds", 0, 0),
        ("7 calls in 2 sequences, 1 s: 1 failures of 1 kinds", 1, 1),
        ("no table", 0, 1),
        ("7 calls in 2 sequences, 1 s: 0 failures of 0 kinds", -9, 1),
    ],
)
def test_reports_of_processes(words: str, status: int, expected: int, tmp_path: Path) -> None:
    log = tmp_path / "1.log"
    log.write_text(words)
    ended: Any = SimpleNamespace(returncode=status)
    assert report([Running(1, ended, log)]) == expected


def test_processes_end_with_their_children(tmp_path: Path) -> None:
    sleeps = "import time; time.sleep(60)"
    child = f"subprocess.Popen([sys.executable, '-c', {sleeps!r}], stdin=sys.stdin)"
    code = f"import subprocess, sys; {child}; print('begun', flush=True); {sleeps}"
    process = begin([sys.executable, "-c", code])
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    wait([Running(1, process, tmp_path / "1.log")], time.monotonic())
    assert process.returncode == -signal.SIGKILL
    # Its output ends when nobody is left who has it.
    assert select.select([process.stdout], [], [], 20.0)[0]
    assert process.stdout.read() == ""


def test_as_a_gpu_is_asked(seed: int) -> None:
    """Calls as a GPU would be given them, on a CPU."""
    report = run(
        Setting(seed=seed, programs=4, as_gpu=True), sequences=1, shrink_seconds=0.0, stop_at_first=True
    )
    assert not report.failures, report.table()


@pytest.mark.parametrize("name", list(changes.WAYS))
def test_ways_write(name: str) -> None:
    """Each way leaves what was to be written, and its effect on torch's counter is as said."""
    way = changes.WAYS[name]
    if way.gpu:
        pytest.skip("needs a GPU")
    world = Setting().world()
    for new in (torch.randn(5), torch.randint(0, 9, (5,))):
        x = torch.zeros_like(new)
        before = x._version
        try:
            way.write(world, x, new)
        except pool.Skip:
            continue
        assert (
            torch.equal(x, new)
            or name == "by_arithmetic"
            or (name == "by_data_in_part" and new.dtype == torch.float32)
        )
        assert not torch.equal(x, torch.zeros_like(x))
        assert (x._version > before) == way.counted


class NoStream:
    def wait_stream(self, other: Any) -> None:
        pass


class NoGraph:
    """A graph that does nothing when it is replayed, as one would that reads what was kept."""

    def replay(self) -> None:
        pass


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams and graphs of a GPU that is not there."""
    monkeypatch.setattr(gpu_steps, "need_a_gpu", lambda world: None)
    nothing: dict[str, Any] = {
        "Stream": NoStream, "current_stream": NoStream, "CUDAGraph": NoGraph, "synchronize": lambda: None,
        "_sleep": lambda cycles: None, "stream": lambda x: nullcontext(), "graph": lambda x: nullcontext(),
    }  # fmt: skip
    for name, value in nothing.items():
        monkeypatch.setattr(torch.cuda, name, value)


def gpu_world() -> pool.World:
    world = Setting(as_gpu=True, programs=3, left_out=("blocks",)).world()
    world.seed(0)
    world.subjects.append(pool.compile(world))
    return world


@pytest.mark.parametrize("name", ["streams", "unordered_streams", "sharded"])
def test_steps_of_a_gpu(name: str, no_gpu: None, seed: int) -> None:
    world = gpu_world()
    for n in range(4):
        run_step(world, (name, seed + n))
    assert world.calls


def test_a_captured_call_that_reads_old_contents_is_seen(no_gpu: None, seed: int) -> None:
    world = gpu_world()
    with pytest.raises(Failure, match=r"wrong.*replay"):
        for n in range(30):
            run_step(world, ("captured", seed + n))


def asked_of(seed: int) -> Asked:
    """A call of a compiled attention with a table, right as it is."""
    world = Setting(doors=("compile",), left_out=("blocks",)).world()
    world.seed(seed)
    mod = pool.SCORES[0]
    score = pool.write_function(mod, "score", world.sizes, world.rng, world.device)
    next(iter(score.values.values())).read().requires_grad_()
    subject = pool.Subject("compile", fa4flex.compile(score.made), score)
    while True:
        asked = ask(world, calls.draw_call(world, subject))
        if (
            asked.given.mode == "grad"
            and asked.given.problem.q.dtype == torch.float32
            and asked.given.problem.k.numel() > 99
        ):
            return asked


@pytest.mark.parametrize("what", ["out", "lse", "gradients", "dtype", "error"])
def test_faults_are_seen(what: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = asked_of(seed)
    if "return_lse" not in asked.given.brought:
        asked.given.brought["return_lse"] = True
    asked.run()
    asked.check()
    assert asked.found is not None
    out, lse = asked.found
    if what == "gradients":
        asked.found = out * 1.1, lse * 1.1
        with pytest.raises(Failure, match="gradient of"):
            asked.check_gradients()
        return
    found: dict[str, Any] = {
        "out": (out + 0.001 * out.abs().max(), lse), "lse": (out, lse + 0.001 * lse.abs().max()),
        "dtype": (out.double(), lse), "error": (out, lse),
    }  # fmt: skip
    asked.found, asked.error = found[what], KeyError("x") if what == "error" else None
    with pytest.raises(Failure):
        asked.check()
