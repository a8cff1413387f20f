"""Run another project's tests on fa4flex: what torch_flex_tests.py and gym_tests.py share.

Worker processes collect the tests with pytest and run those that are asked for, one at a time: a case that
takes too long is ended with its process, and a new one goes on. Each case that does not pass must be matched
by a `Reason`; one that is not makes the script fail.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import hashlib
import importlib.util
import json
import os
import re
import resource
import select
import shutil
import subprocess
import sys
import tempfile
import time
import types
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

KINDS = (
    "passed",
    "passed without a call",
    "wrong result",
    "failed assertion",
    "fa4flex error",
    "raw error",
    "time limit",
    "crash",
    "not applicable",
    "not run",
)
"""The ends of a case. One that passed without a call never reached fa4flex, and says nothing about it."""

SPREAD = 0.6180339887498949
"""Golden ratio: its multiples modulo 1 spread evenly, however many are taken."""

NUMBERS = re.compile(r"are not close|(Compiled|[Rr]ef|reference) error|exceeds|NaN|non-finite|is not true")
"""Words of assertions about numbers. Where one says only "False is not true", the worst is assumed."""


@dataclass(frozen=True)
class Reason:
    """A reason for which cases do not pass.

    pattern   is searched in "case\\nkind: error"
    words     what the tables say
    modes     those in which it holds; all where empty
    defect    fa4flex is to be changed; otherwise the test does not apply to it
    kind      how the case ends, where its error does not say it
    """

    pattern: str
    words: str
    modes: tuple[str, ...] = ()
    defect: bool = False
    kind: str = ""

    def holds(self, outcome: Outcome) -> bool:
        text = f"{outcome.case}\n{outcome.kind}: {outcome.error}"
        return (not self.modes or outcome.mode in self.modes) and bool(re.search(self.pattern, text))


@dataclass(frozen=True)
class Outcome:
    case: str
    mode: str
    kind: str
    error: str = ""
    seconds: float = 0.0
    reason: str = ""
    defect: bool = False


class Suite(Protocol):
    """The tests that a script runs, and how they are made to call fa4flex."""

    files: Sequence[Path]
    reasons: Sequence[Reason]

    def prepare(self, mode: str) -> None:
        """Replace what the tests import. Called once in a worker, before the tests are imported."""

    def attempts(self, case: str) -> Iterator[contextlib.AbstractContextManager[None]]:
        """The ways in which a case is run, one after another until it called fa4flex."""

    def called(self) -> bool:
        """True if fa4flex was called since the attempt began."""


# ------------------------------------------------------------------------------------------------- worker


class _Worker:
    """A pytest plugin that runs the cases whose numbers come through a pipe."""

    def __init__(self, suite: Suite, mode: str, requests: Any, replies: Any) -> None:
        self.suite, self.mode, self.requests, self.replies = suite, mode, requests, replies
        self.failure: tuple[str, str] | None = None

    def pytest_runtestloop(self, session: Any) -> bool:
        self._send([item.nodeid for item in session.items])
        for line in self.requests:
            start = time.monotonic()
            outcome = self._run(session.items[int(line)])
            self._send(asdict(replace(outcome, seconds=round(time.monotonic() - start, 2))))
        return True

    def _send(self, message: Any) -> None:
        self.replies.write(json.dumps(message) + "\n")
        self.replies.flush()

    def _run(self, item: Any) -> Outcome:
        from _pytest.runner import runtestprotocol

        for attempt in self.suite.attempts(item.name):
            self.failure = None
            with attempt:
                reports = runtestprotocol(item, nextitem=None, log=False)
            called = self.suite.called()
            if called:
                break
        kind, error = self.failure or ("passed" if called else "passed without a call", "")
        skipped = [report for report in reports if report.skipped and not hasattr(report, "wasxfail")]
        if self.failure is None and skipped:
            kind, error = "not applicable", str(skipped[0].longrepr[2]).removeprefix("Skipped: ")
        return Outcome(item.name, self.mode, kind, error)

    def pytest_runtest_makereport(self, item: Any, call: Any) -> Any:
        import pytest

        report = yield
        info = call.excinfo
        if info is not None and not report.skipped and not isinstance(info.value, pytest.skip.Exception):
            self.failure = self.failure or _describe(info.value)
        elif report.failed:
            self.failure = self.failure or ("failed assertion", str(report.longrepr)[:300])
        return report


def _describe(error: BaseException) -> tuple[str, str]:
    """The kind of a failure, and its first words."""
    from fa4flex.errors import Fa4flexError

    chain, seen = error, error
    while seen is not None and not isinstance(seen, Fa4flexError):
        seen = seen.__cause__ or seen.__context__
    words = f"{type(chain).__name__}: {chain}".strip()
    if seen is not None and seen is not chain:
        words = f"{type(seen).__name__}: {seen} | seen as {words}"
    words = " ".join(words.split()).split(" from user code: ")[0][:600]
    if isinstance(chain, AssertionError) and seen is None:
        return ("wrong result" if NUMBERS.search(str(chain)) else "failed assertion"), words
    return ("fa4flex error" if seen is not None else "raw error"), words


def serve(suite: Suite, given: argparse.Namespace) -> int:
    """Run a worker: collect the tests, then the cases that are asked for, until the pipe closes."""
    import pytest

    _Worker.pytest_runtest_makereport = pytest.hookimpl(wrapper=True)(_Worker.pytest_runtest_makereport)
    if given.memory:
        gigabytes = given.memory * 2**30
        resource.setrlimit(resource.RLIMIT_AS, (gigabytes, gigabytes))
    requests, replies = (os.fdopen(int(n), way) for n, way in zip(given.worker.split(","), "rw"))
    suite.prepare(given.mode)
    with tempfile.TemporaryDirectory() as empty:
        ini = Path(empty, "pytest.ini")
        ini.write_text("[pytest]\n")
        options = ["-c", str(ini), "-p", "no:cacheprovider", "-q", "--import-mode=importlib", "-W", "ignore"]
        plugin = _Worker(suite, given.mode, requests, replies)
        return int(pytest.main([*options, *map(str, suite.files)], plugins=[plugin]))


# ------------------------------------------------------------------------------------------------- parent


class _Process:
    """A worker, started anew after each case that ends it."""

    def __init__(self, command: list[str], start_limit: float = 300) -> None:
        self.command, self.start_limit = command, start_limit
        self.start()

    def start(self) -> None:
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        command = [*self.command, "--worker", f"{theirs_in},{theirs_out}"]
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 - for as long as the process runs
        self.process = subprocess.Popen(
            command, pass_fds=(theirs_in, theirs_out), stdout=self.log, stderr=subprocess.STDOUT
        )
        os.close(theirs_in), os.close(theirs_out)
        self.requests, self.replies = os.fdopen(ours_out, "w"), os.fdopen(ours_in, "r")
        self.names = self.wait(self.start_limit)
        if not isinstance(self.names, list):
            self.process.kill()
            self.log.seek(0)
            raise SystemExit("a worker did not start:\n" + self.log.read().decode()[-3000:])

    def wait(self, limit: float) -> Any:
        """Next reply of the worker; "time limit" or "crash" where it sends nothing."""
        ready, _, _ = select.select([self.replies], [], [], limit)
        line = self.replies.readline() if ready else None
        return "time limit" if line is None else json.loads(line) if line else "crash"

    def run(self, number: int, mode: str, limit: float) -> Outcome:
        self.requests.write(f"{number}\n")
        self.requests.flush()
        found = self.wait(limit)
        if isinstance(found, dict):
            return Outcome(**found)
        name = self.names[number].split("::")[-1]
        words = f"no result within {limit:g} s" if found == "time limit" else "the process ended"
        self.process.kill()
        self.process.wait()
        self.start()
        return Outcome(name, mode, found, words, limit)

    def close(self) -> None:
        self.requests.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        self.process.kill()


def _in_turns(cases: Sequence[int], names: Sequence[str]) -> list[int]:
    """Cases in an order in which any beginning holds many tests: one parameter of each, then another."""
    turns: Counter[str] = Counter()
    found = []
    for case in sorted(cases, key=lambda i: i * SPREAD % 1):
        test = re.sub(r"b?float\d+|\d+", "", names[case])
        found.append((turns[test], case))
        turns[test] += 1
    return [case for _, case in sorted(found)]


def fingerprint(files: Sequence[Path], options: Sequence[str]) -> str:
    """Digest of what outcomes depend on: fa4flex, the tests, torch and the script's options."""
    found = importlib.util.find_spec("fa4flex")
    assert found is not None and found.submodule_search_locations is not None
    ours = sorted(Path(found.submodule_search_locations[0]).rglob("*.py"))
    digest = hashlib.sha256(repr((version("torch"), sys.version, list(options))).encode())
    for path in (*ours, *files):
        digest.update(path.read_bytes())
    return digest.hexdigest()


class Record:
    """Outcomes as they come, one line of JSON each, so that a run that is stopped goes on where it was. Those
    of another `fingerprint` do not count."""

    def __init__(self, folder: Path | None, name: str, fingerprint: str) -> None:
        self.fingerprint = fingerprint
        self.path = None if folder is None else folder / f"{name}.jsonl"
        self.known: dict[tuple[str, str], Outcome] = {}
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.touch()
            for line in self.path.read_text().splitlines():
                found = json.loads(line)
                test = found.pop("test")
                if found.pop("fingerprint") == fingerprint:
                    self.known[found["mode"], test] = Outcome(**found)

    def add(self, test: str, outcome: Outcome) -> None:
        """`test`: the case's file, class and name, of which an outcome has the name alone."""
        self.known[outcome.mode, test] = outcome
        if self.path is not None:
            with self.path.open("a") as file:
                known = {"test": test, "fingerprint": self.fingerprint, **asdict(outcome)}
                file.write(json.dumps(known) + "\n")


def run(command: list[str], given: argparse.Namespace, mode: str, record: Record) -> list[Outcome]:
    """All cases whose names match, in a mode, but those that the record has."""
    first = _Process(command)
    matching = [i for i, name in enumerate(first.names) if re.search(given.only, name)]
    cases = [i for i in matching if (mode, first.names[i]) not in record.known]
    wanted = deque(_in_turns(cases, first.names) if given.budget else cases)
    print(f"{mode}: {len(wanted)} of {len(first.names)} cases", flush=True)
    end = time.monotonic() + 60 * given.budget if given.budget else float("inf")

    def work(process: _Process) -> None:
        with contextlib.closing(process):
            while wanted and time.monotonic() < end:
                with contextlib.suppress(IndexError):
                    number = wanted.popleft()
                    last = process.run(number, mode, given.limit)
                    record.add(first.names[number], last)
                    if given.verbose:
                        print(f"{last.seconds:7.1f} s  {last.kind:22} {last.case}", flush=True)

    processes = [first, *(_Process(command) for _ in range(min(given.jobs, len(wanted)) - 1))]
    with ThreadPoolExecutor(len(processes)) as pool:
        list(pool.map(work, processes))
    known = [record.known.get((mode, first.names[i])) for i in matching]
    found = [outcome for outcome in known if outcome is not None]
    left = f"the budget of {given.budget:g} minutes was used up"
    found += [Outcome(first.names[i].split("::")[-1], mode, "not run", "", 0, left) for i in wanted]
    return sorted(found, key=lambda outcome: outcome.case)


def explained(outcomes: Sequence[Outcome], reasons: Sequence[Reason]) -> list[Outcome]:
    """The outcomes, each that did not pass with the first reason that holds."""
    result = []
    for outcome in outcomes:
        if not outcome.kind.startswith("passed") and not outcome.reason:
            for reason in reasons:
                if reason.holds(outcome):
                    kind = reason.kind or (outcome.kind if reason.defect else "not applicable")
                    outcome = replace(outcome, kind=kind, reason=reason.words, defect=reason.defect)
                    break
        result.append(outcome)
    return result


def unexplained(outcomes: Sequence[Outcome]) -> list[Outcome]:
    return [x for x in outcomes if not x.kind.startswith("passed") and not x.reason]


def table(outcomes: Sequence[Outcome]) -> str:
    """Counts by mode, and by reason with an example, in Markdown."""
    modes = list(dict.fromkeys(x.mode for x in outcomes))
    counts = {mode: Counter(x.kind for x in outcomes if x.mode == mode) for mode in modes}
    kinds = [kind for kind in KINDS if any(counts[mode][kind] for mode in modes)]
    lines = ["| " + " | ".join(["mode", *kinds, "all"]) + " |", "|" + " --- |" * (len(kinds) + 2)]
    for mode in modes:
        row = [mode, *(str(counts[mode][kind]) for kind in kinds), str(counts[mode].total())]
        lines.append("| " + " | ".join(row) + " |")
    lines += ["", "| mode | how it ends | reason | cases | for example |", "| --- | --- | --- | --- | --- |"]
    groups: dict[tuple[str, ...], list[Outcome]] = {}
    for x in outcomes:
        if not x.kind.startswith("passed"):
            words = (
                ("to be changed: " if x.defect else "") + x.reason if x.reason else f"UNEXPECTED: {x.error}"
            )
            groups.setdefault((x.mode, x.kind, words.replace("|", "\\|")[:300]), []).append(x)
    for (mode, kind, words), group in sorted(groups.items(), key=lambda pair: (pair[0][0], -len(pair[1]))):
        lines.append(f"| {mode} | {kind} | {words} | {len(group)} | {group[0].case} |")
    return "\n".join(lines) + "\n"


def arguments(description: str | None, modes: Sequence[str]) -> argparse.ArgumentParser:
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=as_written)
    parser.add_argument("checkout", type=Path, nargs="+", help="a checkout of the project, or its test files")
    parser.add_argument("--mode", nargs="+", choices=modes, default=list(modes[:2]))
    parser.add_argument("--only", default="", metavar="REGEX", help="cases whose names match")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--limit", type=float, default=120, help="seconds for a case")
    parser.add_argument("--budget", type=float, default=0, help="minutes for a mode; 0 is no limit")
    parser.add_argument(
        "--memory", type=int, default=12, help="gigabytes of address space for a process; 0 is no limit"
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="folder where NAME.json and NAME.md are written, and NAME.jsonl as cases end: those that it has"
        " of the same fa4flex, tests and torch are not run again",
    )
    parser.add_argument("--verbose", action="store_true", help="print each case as it ends")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser


def main(name: str, script: str, suite: Suite, given: argparse.Namespace, options: Sequence[str] = ()) -> int:
    """Run the modes and write the tables; 1 where a case that did not pass has no reason.

    options   the script's own, which its workers get too
    """
    if given.worker:
        given.mode = given.mode[0]
        return serve(suite, given)
    outcomes: list[Outcome] = []
    record = Record(given.out, name, fingerprint(suite.files, options))
    for mode in given.mode:
        files = [str(path) for path in given.checkout]
        command = [sys.executable, script, *files, "--mode", mode, "--memory", str(given.memory), *options]
        outcomes += explained(run(command, given, mode, record), suite.reasons)
    text = table(outcomes)
    print(text)
    if given.out is not None:
        (given.out / f"{name}.md").write_text(text)
        (given.out / f"{name}.json").write_text(json.dumps([asdict(x) for x in outcomes], indent=1) + "\n")
    for outcome in unexplained(outcomes):
        print(f"UNEXPECTED {outcome.mode} {outcome.case}: {outcome.kind}: {outcome.error}")
    return int(bool(unexplained(outcomes)))


def compiled(real: Any, backend: str) -> Any:
    """A torch.compile for tests: with `backend` where they name none or "inductor"."""

    def compile(model: Any = None, **options: Any) -> Any:
        if model is None:
            return lambda given: compile(given, **options)
        if options.get("backend", "inductor") == "inductor":
            options["backend"] = backend
        if options["backend"] != "inductor":
            options.pop("mode", None)
        return real(model, **options)

    return compile


def copies(files: Sequence[Path], rewritten: Callable[[Path], str]) -> list[Path]:
    """Rewritten copies of tests, beside their conftest.py, in a folder that is removed in the end."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)
    found = []
    for path in files:
        found.append(folder.resolve() / path.name)
        found[-1].write_text(rewritten(path))
    for path in {path.parent / "conftest.py" for path in files if (path.parent / "conftest.py").exists()}:
        shutil.copy(path, folder)
    return found


def of_tests(module: types.ModuleType | dict[str, Any], files: Sequence[Path]) -> bool:
    """True if a module's globals are a test file's."""
    found = module.get("__file__") if isinstance(module, dict) else module.__file__
    return found is not None and any(Path(found) == path for path in files)
