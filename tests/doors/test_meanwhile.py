"""Calls of new sizes, served by a kernel that was compiled for others until their own is there. CPU tensors
stand for those of a GPU; kernels are files without code, which processes make when they are let."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from launch_changes import calls_on_gpu
from torch import Tensor

import fa4flex
from fa4flex import Schedule, Varlen
from fa4flex import lower as lower_module
from fa4flex.compiler import ahead, background, cache
from fa4flex.compiler.compile import Kernel, kernel_key
from fa4flex.runtime.cuda import meanwhile
from fa4flex.runtime.cuda.calls import launch_cache
from fa4flex.variants import causal

WORKER = """
    import pathlib, pickle, sys, time
    from fa4flex.compiler import worker
    here = pathlib.Path({path!r})
    (here / "begun").touch()
    def build(*given):
        while not (here / "go").exists():
            time.sleep(0.01)
        if (here / "fail").exists():
            raise RuntimeError("no such instruction")
        return ".so", b"code"
    worker.build_object = build
    worker.work(*pickle.load(sys.stdin.buffer))
"""


@dataclass
class Made:
    """Kernels that this process compiled, by the thread that did, and those that it launched, by their keys.
    here: a folder in which files tell other processes to go on, and to fail."""

    here: Path
    compiled: list[str] = field(default_factory=list)
    launched: list[str] = field(default_factory=list)

    def compile(self, source: Any, problem: Any, signature: Any, arch: str = "sm_90a") -> Kernel:
        key, folder = kernel_key(source.key, problem, signature, arch), cache.directory()
        assert folder is not None
        _, new = cache.obtain(folder, key, lambda: (".so", b"code"))
        if new:
            self.compiled.append(threading.current_thread().name)
        return Kernel(source.name, key, partial(self._launch, key), new, 0.0)

    def _launch(self, key: str, *given: Any) -> None:
        self.launched.append(key)

    def go(self) -> None:
        (self.here / "go").touch()

    def fail(self) -> None:
        (self.here / "fail").touch()
        self.go()


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Made]:
    """An empty cache, and processes that wait until they are let."""
    calls_on_gpu(monkeypatch)
    result = Made(tmp_path)
    (tmp_path / "waiting_worker.py").write_text(textwrap.dedent(WORKER.format(path=str(tmp_path))))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("FA4FLEX_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.setenv(background.SWITCH, "1")
    monkeypatch.setattr(ahead, "WORKER", "waiting_worker")
    monkeypatch.setattr(lower_module, "compile_kernel", result.compile)
    monkeypatch.setattr("fa4flex.compiler.compile._kernels", {})  # of other tests
    monkeypatch.setattr(background, "_said", set())
    monkeypatch.setattr(ahead, "_failed", {})
    yield result
    result.go()
    until(lambda: all(one.over or one.error for one in list(background._all)))


def inputs(q_len: int, kv_len: int = 600, grad: bool = False) -> tuple[Tensor, ...]:
    shapes = (1, 8, q_len, 64), (1, 1, kv_len, 64), (1, 1, kv_len, 64)
    return tuple(torch.randn(shape).bfloat16().requires_grad_(grad) for shape in shapes)


MANY, ONE = 512, 1
"""Numbers of queries, for which the best kernels differ."""


def until(held: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not held():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def awaited(attn: fa4flex.Attention) -> background.Awaited:
    (one,) = attn.prepared.engine.meanwhile
    return one.awaited


def over(attn: fa4flex.Attention) -> bool:
    return all(one.awaited.over for one in attn.prepared.engine.meanwhile)


def served(made: Made, call: Callable[[], Any]) -> str:
    """Key of the kernel that a call launches."""
    before = len(made.launched)
    call()
    assert len(made.launched) == before + 1
    return made.launched[-1]


# --- when -------------------------------------------------------------------------------------------------


def test_another_kernel_serves_until_the_best_one_is_there(made: Made) -> None:
    attn, here = fa4flex.compile(mask=causal), [threading.current_thread().name]
    many = served(made, lambda: attn(*inputs(MANY)))
    assert made.compiled == here
    for kv_len in (600, 600, 600, 601, 600):  # by its key, and by what is known of calls
        assert served(made, lambda n=kv_len: attn(*inputs(ONE, n))) == many  # type: ignore[misc]
    assert made.compiled == here and "is being compiled" in attn.explain()
    made.go()
    until(lambda: over(attn))
    one = served(made, lambda: attn(*inputs(ONE)))
    assert one != many and made.compiled == here
    for _ in range(4):
        assert served(made, lambda: attn(*inputs(ONE))) == one
        assert served(made, lambda: attn(*inputs(MANY))) == many
    assert "is being compiled" not in attn.explain()


def test_synchronize_waits_for_kernels(made: Made) -> None:
    attn = fa4flex.compile(mask=causal)
    many = served(made, lambda: attn(*inputs(MANY)))
    assert served(made, lambda: attn(*inputs(ONE))) == many
    fa4flex.synchronize()
    assert "is being compiled" in attn.explain()
    threading.Timer(0.3, made.go).start()
    fa4flex.synchronize(kernels=True)
    assert "is being compiled" not in attn.explain() and served(made, lambda: attn(*inputs(ONE))) != many


def test_both_passes(made: Made) -> None:
    """Each has kernels of its own for short sequences."""
    attn = fa4flex.compile(mask=causal)

    def train(length: int) -> list[str]:
        before = len(made.launched)
        attn(*inputs(length, length, grad=True)).sum().backward()
        return made.launched[before:]

    long = train(4096)
    compiled = list(made.compiled)
    short = [train(100) for _ in range(4)]
    assert all(keys == long for keys in short) and made.compiled == compiled
    made.go()
    until(lambda: over(attn))
    better = [train(100) for _ in range(4)]
    assert all(keys == better[0] for keys in better) and made.compiled == compiled
    assert not set(better[0]) & set(long)


def test_lengths_of_packed_sequences(made: Made) -> None:
    """Kernels that correct lengths have to be there, too."""
    attn = fa4flex.compile(mask=causal)

    def call(*lengths: int) -> list[str]:
        before, total = len(made.launched), sum(lengths)
        ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        q, k = torch.randn(total, 8, 128).bfloat16(), torch.randn(total, 2, 128).bfloat16()
        attn(q, k, k, varlen=Varlen(ends))
        return made.launched[before:]

    long = call(4000, 4000)
    compiled = list(made.compiled)
    assert call(100, 100)[-1] == long[-1] and made.compiled == compiled
    made.go()
    until(lambda: over(attn))
    assert call(100, 100)[-1] != long[-1] and made.compiled == compiled


def test_where_no_kernel_is_right_the_call_compiles(made: Made) -> None:
    """A kernel for few queries is none for many."""
    attn = fa4flex.compile(mask=causal)
    one = served(made, lambda: attn(*inputs(ONE)))
    assert served(made, lambda: attn(*inputs(MANY))) != one
    assert len(made.compiled) == 2 and not attn.prepared.engine.meanwhile


def test_what_is_on_disk_is_not_waited_for(made: Made) -> None:
    first, attn = fa4flex.compile(mask=causal), fa4flex.compile(mask=causal)
    one = served(made, lambda: first(*inputs(ONE)))
    attn(*inputs(MANY))
    assert served(made, lambda: attn(*inputs(ONE))) == one and not attn.prepared.engine.meanwhile


@pytest.mark.parametrize("value", ["0", "off"])
def test_turned_off(value: str, made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(background.SWITCH, value)
    compiles_at_once(made, fa4flex.compile(mask=causal))


@pytest.mark.parametrize(
    "schedule",
    [
        Schedule(deterministic=True),
        Schedule(split=256),
        Schedule(order="row_major", next_tile="in_turn"),
    ],
)
def test_results_with_promises(schedule: Schedule, made: Made) -> None:
    """Bits never depend on when a kernel is there, and a kernel that was asked for is the one that runs."""
    attn = fa4flex.compile(mask=causal, schedule=schedule)
    attn(*inputs(MANY))
    before = len(made.compiled)
    attn(*inputs(ONE))
    assert not attn.prepared.engine.meanwhile and len(made.compiled) >= before


def test_deterministic_algorithms_of_torch(made: Made) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        compiles_at_once(made, fa4flex.compile(mask=causal))
    finally:
        torch.use_deterministic_algorithms(False)


def compiles_at_once(made: Made, attn: fa4flex.Attention) -> None:
    many = served(made, lambda: attn(*inputs(MANY)))
    assert served(made, lambda: attn(*inputs(ONE))) != many
    assert len(made.compiled) == 2 and not attn.prepared.engine.meanwhile


def test_a_deterministic_schedule_compiles_at_once(made: Made) -> None:
    compiles_at_once(made, fa4flex.compile(mask=causal, schedule=Schedule(deterministic=True)))


def test_a_graph_that_is_captured(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps what serves, also where the better kernel comes meanwhile; calls after it do not."""
    attn = fa4flex.compile(mask=causal)
    many = served(made, lambda: attn(*inputs(MANY)))
    attn(*inputs(ONE))
    made.go()
    until(lambda: over(attn))
    with monkeypatch.context() as capturing:
        for module in (launch_cache, meanwhile):
            capturing.setattr(module, "capturing", lambda: True)
        for _ in range(4):
            assert served(made, lambda: attn(*inputs(ONE))) == many
    assert served(made, lambda: attn(*inputs(ONE))) != many


# --- what may go wrong ------------------------------------------------------------------------------------


def test_a_failure_is_said_once_and_raised_by_no_call(made: Made) -> None:
    attn = fa4flex.compile(mask=causal)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        many = served(made, lambda: attn(*inputs(MANY)))
        made.fail()
        attn(*inputs(ONE))
        until(lambda: bool(awaited(attn).error))
        until(lambda: bool(said))
        for _ in range(4):
            assert served(made, lambda: attn(*inputs(ONE))) == many
        again = background.begin(awaited(attn).jobs, lambda: None)
        until(lambda: bool(again.error))
        time.sleep(0.1)
    (one,) = said
    assert "no such instruction" in str(one.message) and issubclass(one.category, RuntimeWarning)
    assert "could not be compiled" in attn.explain() and "no such instruction" in attn.explain()
    assert len(made.compiled) == 1


def test_warnings_that_are_errors_stop_nothing(made: Made) -> None:
    attn, other = fa4flex.compile(mask=causal), fa4flex.compile()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for one in (attn, other):
            one(*inputs(MANY))
        made.fail()
        attn(*inputs(ONE))
        until(lambda: bool(awaited(attn).error))
        (made.here / "fail").unlink()
        other(*inputs(ONE))
        until(lambda: awaited(other).over)


def test_threads(made: Made) -> None:
    """Many at once, before, while and after the better kernel comes."""
    attn, errors = fa4flex.compile(mask=causal), []
    attn(*inputs(MANY))
    stop = threading.Event()

    def calls(length: int) -> None:
        given = inputs(ONE, length)
        try:
            while not stop.is_set():
                attn(*given)
                time.sleep(0.001)
        except BaseException as error:  # told below
            errors.append(error)

    threads = [threading.Thread(target=calls, args=(600 + i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    until(lambda: (made.here / "begun").exists())
    made.go()
    until(lambda: all(one.awaited.over for one in attn.prepared.engine.meanwhile))
    time.sleep(0.2)
    stop.set()
    for thread in threads:
        thread.join()
    assert not errors and made.compiled == [threading.current_thread().name]
    assert len({served(made, lambda n=n: attn(*inputs(ONE, n))) for n in range(600, 604)}) == 1  # type: ignore[misc]
    assert made.launched[-1] != made.launched[0]


def test_an_engine_that_is_gone(made: Made) -> None:
    """Whoever asked for a kernel may be gone when it comes."""
    attn = fa4flex.compile(mask=causal)
    attn(*inputs(MANY))
    attn(*inputs(ONE))
    one = awaited(attn)
    del attn
    made.go()
    until(lambda: one.over or bool(one.error))
    assert not one.error


def test_no_tensor_is_held(made: Made) -> None:
    import weakref

    attn = fa4flex.compile(mask=causal)
    attn(*inputs(MANY))
    q, k, v = inputs(ONE)
    refs = [weakref.ref(x) for x in (q, k, v)]
    attn(q, k, v)
    assert not awaited(attn).over
    del q, k, v
    assert not any(ref() is not None for ref in refs)


def test_children_of_a_fork_wait_for_nothing(made: Made) -> None:
    attn = fa4flex.compile(mask=causal)
    many = served(made, lambda: attn(*inputs(MANY)))
    given = inputs(ONE)  # torch's threads, which draw, are none of a child's
    attn(*given)
    child = os.fork()
    if child == 0:
        right = told = False
        try:
            right = served(made, lambda: attn(*given)) == many
            told = "forked" in awaited(attn).state and background._thread is None
        finally:
            os._exit(0 if right and told else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    made.go()
    until(lambda: over(attn))


EXITS = """
    import pathlib, threading
    from fa4flex.compiler import ahead, background
    ahead.WORKER = "waiting_worker"
    job = background.Job("key", "name", pathlib.Path({job!r}).read_bytes(), pathlib.Path({folder!r}))
    background.begin([job], lambda: print("told"))
    while not pathlib.Path({begun!r}).exists():
        threading.Event().wait(0.01)
"""


def test_an_interpreter_that_ends_meanwhile(made: Made) -> None:
    """It ends soon and in silence, no process outlives it, and the cache has nothing in it."""
    attn = fa4flex.compile(mask=causal)
    attn(*inputs(MANY))
    attn(*inputs(ONE))
    (job,) = awaited(attn).jobs
    until(lambda: (made.here / "begun").exists())
    ahead.end_all()
    (made.here / "begun").unlink(missing_ok=True)
    path, folder = made.here / "job", made.here / "others"
    given, _, plan = pickle.loads(job.text)
    path.write_bytes(pickle.dumps((given, folder, plan)))
    folder.mkdir(mode=0o700)
    code = textwrap.dedent(EXITS.format(job=str(path), folder=str(folder), begun=str(made.here / "begun")))
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**ahead._environment(), "FA4FLEX_CACHE_DIR": str(folder)}, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert time.monotonic() - start < 30
    commands = [x.read_bytes() for x in Path("/proc").glob("[0-9]*/cmdline") if x.exists()]
    assert not [x for x in commands if b"waiting_worker" in x and str(made.here).encode() in x]
    assert not [x for x in folder.iterdir() if x.suffix in cache.SUFFIXES]


def test_a_plan_that_does_not_hold_is_no_kernel(made: Made) -> None:
    """Other processes check plans, as this one would have."""
    attn = fa4flex.compile(mask=causal)
    attn(*inputs(MANY))
    attn(*inputs(ONE))
    (job,) = awaited(attn).jobs
    given, folder, plan = pickle.loads(job.text)
    assert plan.target.name == "sm_90a"
    wrong = pickle.dumps((given, folder, replace(plan, kv_stages=99)))
    made.go()
    until(lambda: over(attn))
    (folder / (job.key + ".so")).unlink()
    with pytest.warns(RuntimeWarning, match="bytes"):
        again = background.begin([job._replace(text=wrong)], lambda: None)
        until(lambda: bool(again.error))
        time.sleep(0.1)
    assert not cache.holds(folder, job.key)
