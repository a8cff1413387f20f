"""Count how many random mutants of host code the tests notice.

    python scripts/host_mutants.py --record /tmp/executed.json        (the suite once, with a profiler)
    python scripts/host_mutants.py --executed /tmp/executed.json --count 300 --seed 1 --jobs 2

A mutant is one change of one function of the package that a host runs: a comparison turned, a number one
larger, an `and` for an `or`, a condition negated, a result left out, a statement dropped, an argument left to
its default. Device code (roles, kernels/common) and ptxsim have mutants of their own in tests. It is noticed
if a test fails that executes its function; the quickest of these run first, for at most SECONDS. Mutants are
made in copies of the working tree; those of functions that no test executes count as unnoticed.
"""

from __future__ import annotations

import argparse
import ast
import collections
import concurrent.futures
import copy
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "fa4flex"
DEVICE = (
    "kernels/common", "kernels/append/kernel", "kernels/block_lists", "kernels/block_tables/kernel",
    "kernels/output_function/kernel", "kernels/quantize/codes", "kernels/quantize/kernel",
    "kernels/quantize/rows", "kernels/quantize/sums",
)  # fmt: skip
"""Beginnings of paths in the package that hold no host code; of pipelines' folders HOST_HALF does."""

HOST_HALF = ("plan", "topology", "config", "dispatch", "__init__")
"""Files of pipelines' folders that a host runs."""

SECONDS, MOST_TESTS = 60.0, 40
LEFT_OUT = ".venv", ".git", ".device", "__pycache__"

Executed = dict[str, dict[str, float]]
"""Tests by function, `path:line`, with their seconds."""


# --- mutants ------------------------------------------------------------------------------------------------

TURNED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
SWAPPED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
    ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr,
}  # fmt: skip


def changes(node: ast.AST) -> Iterator[tuple[str, ast.AST, str]]:
    """Ways in which a node can be changed: a name, which part of it gives way, and to what."""

    def altered(**fields: Any) -> str:
        other = copy.copy(node)
        for name, value in fields.items():
            setattr(other, name, value)
        return f"({ast.unparse(other)})"

    if isinstance(node, ast.Compare) and type(node.ops[0]) in TURNED:
        yield "comparison turned", node, altered(ops=[TURNED[type(node.ops[0])](), *node.ops[1:]])
    if isinstance(node, ast.BinOp) and type(node.op) in SWAPPED:
        yield "operator exchanged", node, altered(op=SWAPPED[type(node.op)]())
    if isinstance(node, ast.BoolOp):
        yield "and for or", node, altered(op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
    if isinstance(node, ast.Constant) and type(node.value) is int:
        yield "number one larger", node, str(node.value + 1)
    if isinstance(node, ast.Constant) and type(node.value) is bool:
        yield "flag turned", node, str(not node.value)
    if isinstance(node, ast.If | ast.IfExp | ast.While):
        yield "condition negated", node.test, f"(not ({ast.unparse(node.test)}))"
    if isinstance(node, ast.Return) and node.value is not None:
        yield "no result", node.value, "None"
    if isinstance(node, ast.Call) and node.keywords and node.keywords[-1].arg is not None:
        yield "argument left out", node, altered(keywords=node.keywords[:-1])
    if isinstance(node, ast.Expr | ast.AugAssign) and not _is_text(node):
        yield "statement dropped", node, "pass"


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


@dataclass(frozen=True)
class Mutant:
    path: str
    function: str
    line: int
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line} {self.kind}"


def host_files() -> list[Path]:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        inner = path.relative_to(PACKAGE).as_posix()
        pipeline = inner.startswith("kernels/") and not inner.startswith("kernels/plan/")
        if not inner.startswith(DEVICE) and not (pipeline and path.stem not in HOST_HALF):
            found.append(path)
    return found


def drawn(rng: random.Random, files: list[Path]) -> Mutant:
    """A mutant of a random line: files count by how many places they have."""
    weights = [len(x.read_bytes()) for x in files]
    while True:
        path = rng.choices(files, weights)[0]
        text = path.read_text()
        functions = [x for x in ast.walk(ast.parse(text)) if isinstance(x, ast.FunctionDef)]
        bodies = [(function, part) for function in functions for part in function.body]
        places = [(x, change) for x, part in bodies for node in ast.walk(part) for change in changes(node)]
        if not places:
            continue
        function, (kind, part, other) = rng.choice(places)
        first = min([function.lineno, *(x.lineno for x in function.decorator_list)])
        inner = path.relative_to(ROOT).as_posix()
        return Mutant(inner, f"{inner}:{first}", part.lineno, kind, spliced(text, part, other))


def spliced(text: str, part: Any, other: str) -> str:
    """The text with another in the place of a part."""
    lines = [line.encode() for line in text.splitlines(keepends=True)]
    before = b"".join(lines[: part.lineno - 1]) + lines[part.lineno - 1][: part.col_offset]
    after = lines[part.end_lineno - 1][part.end_col_offset :] + b"".join(lines[part.end_lineno :])
    return (before + other.encode() + after).decode()


# --- which tests execute which functions --------------------------------------------------------------------


class Recorder:
    """A plugin of pytest: functions of the package that each test calls."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.executed = folder, collections.defaultdict[str, dict[str, float]](dict)
        self.codes: set[Any] = set()
        self.seen: dict[Any, str | None] = {}

    def pytest_runtest_protocol(self, item: Any) -> None:
        self.codes, self.start = set(), time.perf_counter()
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
        seconds = time.perf_counter() - self.start
        for name in {self._name(code) for code in self.codes} - {None}:
            self.executed[str(name)][nodeid] = round(seconds, 3)

    def pytest_sessionfinish(self) -> None:
        path = self.folder / f"{os.environ.get('PYTEST_XDIST_WORKER', 'main')}.json"
        path.write_text(json.dumps(self.executed))

    def _note(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            self.codes.add(frame.f_code)

    def _name(self, code: Any) -> str | None:
        if code not in self.seen:
            inside = code.co_filename.startswith(str(PACKAGE))
            path = os.path.relpath(code.co_filename, ROOT) if inside else ""
            self.seen[code] = f"{path}:{code.co_firstlineno}" if inside else None
        return self.seen[code]


FOLDER = "FA4FLEX_EXECUTED"


def pytest_configure(config: Any) -> None:
    config.pluginmanager.register(Recorder(Path(os.environ[FOLDER])))


def record(out: Path) -> None:
    """Run the suite once, and write which tests execute which functions."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {FOLDER: folder, "PYTHONPATH": f"{ROOT}:{ROOT / 'scripts'}"}
        options = ["-p", "host_mutants", "-n", "2", "--dist", "worksteal", "--slow-one-in", "6"]
        subprocess.run([sys.executable, "-m", "pytest", *options], cwd=ROOT, env=environment, check=False)
        executed: Executed = collections.defaultdict(dict)
        for path in Path(folder).iterdir():
            for function, tests in json.loads(path.read_text()).items():
                executed[function] |= tests
    out.write_text(json.dumps(executed))


# --- running ------------------------------------------------------------------------------------------------


def noticed(mutant: Mutant, executed: Executed, folder: Path) -> bool:
    """True if a test fails that executes the mutant's function."""
    tests = executed.get(mutant.function, {})
    chosen, seconds = [], 0.0
    for name in sorted(tests, key=tests.__getitem__)[:MOST_TESTS]:
        if chosen and seconds + tests[name] > SECONDS / 2:
            break
        chosen.append(name)
        seconds += tests[name]
    if not chosen:
        return False
    (folder / mutant.path).write_text(mutant.text)
    environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "--time-limit", "30", *chosen]
    try:
        ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, timeout=4 * SECONDS)
        return ran.returncode != 0
    except subprocess.TimeoutExpired:
        return True
    finally:
        shutil.copyfile(ROOT / mutant.path, folder / mutant.path)


def run(executed: Executed, count: int, seed: int, jobs: int) -> None:
    rng, files = random.Random(seed), host_files()
    mutants = [drawn(rng, files) for _ in range(count)]
    with tempfile.TemporaryDirectory() as root:
        folders = [Path(root) / str(n) for n in range(jobs)]
        for folder in folders:
            shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*LEFT_OUT))
        free = list(folders)
        total = 0

        def one(mutant: Mutant) -> bool:
            folder = free.pop()
            try:
                return noticed(mutant, executed, folder)
            finally:
                free.append(folder)

        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            for mutant, seen in zip(mutants, pool.map(one, mutants), strict=True):
                total += seen
                if not seen:
                    why = "" if executed.get(mutant.function) else " (no test executes it)"
                    print(f"unnoticed: {mutant}{why}", flush=True)
    print(f"{total} of {count} mutants noticed, seed {seed}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--record", type=Path, help="run the suite once, and write which tests execute what")
    parser.add_argument("--executed", type=Path, help="what --record wrote")
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    if options.record is not None:
        record(options.record)
    else:
        run(json.loads(options.executed.read_text()), options.count, options.seed, options.jobs)


if __name__ == "__main__":
    main()
