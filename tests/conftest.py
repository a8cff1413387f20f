"""One seed and a time limit for every test, a share of slow tests, golden files; see tests/README.md.

Also what makes a run short: threads, and how often garbage is looked for.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import os
import random
import re
import signal
import threading
import traceback
import zlib
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy
import pytest
import torch
from kernel_faults import drop_faults

GOLDEN = Path(__file__).parent / "golden"

TIME_LIMIT, EXHAUSTIVE_LIMIT = 300.0, 3600.0
"""Seconds for each of a test's setup, call and teardown, and for those of tests marked exhaustive."""

GRACE = 60.0
"""Seconds after its limit that a test, which waits where no Python code runs, has before the process ends."""

THRESHOLDS = (10_000, 20, 50)
"""Thresholds of the garbage collector's generations: see gc.set_threshold."""

SLOW = 10.0
"""Seconds of process time from which a test is listed at the end of a run, unless it is marked slow."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=None, help="seed of every test (default: fresh)")
    parser.addoption("--time-limit", type=float, default=None, help="seconds for each test; 0: no limit")
    parser.addoption("--slow-one-in", type=int, default=1, help="run one in so many slow tests (default: 1)")
    parser.addoption("--slow-seed", type=int, default=None, help="which slow tests run (default: fresh)")
    parser.addoption(
        "--kernel-coverage", action="store_true", help="print which share of kernels was simulated"
    )
    parser.addoption("--update-golden", action="store_true", help="rewrite golden files from this run")


def pytest_configure(config: pytest.Config) -> None:
    in_ci = os.environ.get("CI", "").lower() not in ("", "0", "false")
    if in_ci and config.getoption("--update-golden"):
        raise pytest.UsageError("--update-golden where CI is set: update on your machine and read the diff")
    config.addinivalue_line("markers", "timeout_s(seconds): the test's time limit; 0: none")
    if config.getoption("--slow-seed") is None:
        fresh = random.SystemRandom().randrange(2**31)
        config.option.slow_seed = getattr(config, "workerinput", {}).get("slow_seed", fresh)
    config.stash[_STDERR] = os.fdopen(os.dup(2), "w")  # nothing is captured yet
    if "PYTEST_XDIST_WORKER" in os.environ:  # other workers use the other cores
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # else a pool of processes of its own
        torch.set_num_threads(1)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """The collector forgets what imports made, and looks at the rest less often: compilers and simulated
    programs make objects by the million, few of them garbage, and looking through them took an eighth of a
    run's time."""
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # else libraries complain at the end that their objects leaked
    gc.set_threshold(*THRESHOLDS)


# --- time limits ------------------------------------------------------------------------------------------

_STDERR = pytest.StashKey[Any]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    with time_limit(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    start = process_time()
    try:
        with time_limit(item):
            return (yield)
    finally:
        item.stash[_TAKEN] = process_time() - start


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    with time_limit(item):
        return (yield)


def seconds_of(item: pytest.Item) -> float:
    """The test's own limit, else the command line's, else the default."""
    own, given = item.get_closest_marker("timeout_s"), item.config.getoption("--time-limit")
    if own is not None:
        return float(own.args[0])
    if given is not None:
        return float(given)
    return EXHAUSTIVE_LIMIT if item.get_closest_marker("exhaustive") else TIME_LIMIT


@contextlib.contextmanager
def time_limit(item: pytest.Item) -> Iterator[None]:
    """Within, the test fails after its limit, with the stack of where it was.

    Signals reach Python code only. A test that waits in a library's code for GRACE more seconds ends the
    process, with the stacks of all threads on stderr: nothing else can be done about it.
    """
    seconds = seconds_of(item)
    if not seconds or threading.current_thread() is not threading.main_thread():
        yield
        return

    def expired(number: int, frame: FrameType | None) -> None:
        stack = "".join(traceback.format_stack(frame))
        pytest.fail(f"{item.nodeid} took more than {seconds:g} s; it was here:\n{stack}", pytrace=False)

    before = signal.signal(signal.SIGALRM, expired)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    faulthandler.dump_traceback_later(seconds + GRACE, exit=True, file=item.config.stash[_STDERR])
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# --- slow tests -------------------------------------------------------------------------------------------

_TAKEN = pytest.StashKey[float]()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Slow tests that are not drawn are deselected. Each is drawn by its name: whatever else is collected."""
    one_in, seed = config.getoption("--slow-one-in"), config.getoption("--slow-seed")
    left = {x for x in items if x.get_closest_marker("slow") and not is_drawn(x.nodeid, one_in, seed)}
    if left:
        config.hook.pytest_deselected(items=list(left))
        items[:] = [x for x in items if x not in left]


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Workers draw what this process does."""
    node.workerinput["slow_seed"] = node.config.getoption("--slow-seed")


def is_drawn(name: str, one_in: int, seed: int) -> bool:
    """True for one of so many names, others with another seed."""
    return zlib.crc32(f"{seed} {name}".encode()) % one_in == 0


def process_time() -> float:
    """CPU seconds of this process and of the children it has waited for; load on the machine adds none."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Reports of slow tests without the mark say how slow, also those that a worker sends."""
    report = yield
    seconds = item.stash.get(_TAKEN, 0.0) if call.when == "call" else 0.0
    if seconds > SLOW and not any(item.get_closest_marker(name) for name in ("slow", "exhaustive")):
        report.unmarked_seconds = seconds
    return report


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reports = [x for found in ("passed", "failed", "xfailed") for x in terminalreporter.stats.get(found, ())]
    one_in, seed = (terminalreporter.config.getoption(x) for x in ("--slow-one-in", "--slow-seed"))
    if one_in > 1:
        terminalreporter.write_line(f"one in {one_in} slow tests: --slow-one-in {one_in} --slow-seed {seed}")
    slow = {x.nodeid: x.unmarked_seconds for x in reports if hasattr(x, "unmarked_seconds")}
    if slow:
        terminalreporter.section("slow tests without the mark")
        for name in sorted(slow, key=slow.__getitem__, reverse=True):
            terminalreporter.write_line(f"{slow[name]:6.1f} s of process time: {name}")


# --- seeds and golden files -------------------------------------------------------------------------------


os.environ.setdefault("FA4FLEX_BACKGROUND", "0")
"""Kernels are compiled where they are asked for, in all tests but those of the background."""


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> int:
    """A fresh seed, already given to torch, numpy and random; it stands in the report of a failing test."""
    given = request.config.getoption("--seed")
    value = given if given is not None else random.SystemRandom().randrange(2**31)
    request.node.add_report_section("setup", "seed", f"--seed {value}")
    random.seed(value)
    numpy.random.seed(value % 2**32)
    torch.manual_seed(value)
    return int(value)


@pytest.fixture(autouse=True)
def settings_of_torch() -> Iterator[None]:
    """Settings that a test left changed fail it, and no test after it."""
    before = torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()
    yield
    after = torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()
    if after != before:
        torch.set_default_dtype(before[0])
        torch.use_deterministic_algorithms(before[1])
        pytest.fail(f"default dtype and deterministic algorithms were {before}, and the test left {after}")


@pytest.fixture(autouse=True)
def faults_of_kernels() -> Iterator[None]:
    """A fault that a kernel told of and no call raised fails its test, and is raised in no test after it."""
    yield
    if drop_faults():
        pytest.fail("a kernel told of a fault that the test did not expect")


@pytest.fixture
def either_steps(seed: int) -> Iterator[None]:
    """Steps of backward passes as few queries take them or as many do, by chance: tests have few."""
    from pairs import long_steps

    with random.choice((long_steps, contextlib.nullcontext))():
        yield


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Compilations of other tests count against a limit."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """`golden(text)`: text must equal tests/golden/<test name>.txt, which --update-golden rewrites."""
    path = GOLDEN / f"{re.sub(r'[^a-z0-9]+', '_', request.node.name.lower()).strip('_')}.txt"

    def compare(text: str) -> None:
        text = text.rstrip() + "\n"
        if request.config.getoption("--update-golden"):
            path.write_text(text)
        assert path.exists(), f"{path} does not exist: run with --update-golden and read the file"
        assert text == path.read_text(), f"differs from {path}: if that is meant, run with --update-golden"

    return compare
