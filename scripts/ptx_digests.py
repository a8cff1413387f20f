"""Digest the PTX of every kernel that the project generates, to show which kernels a change changes.

    python scripts/ptx_digests.py --out before.txt --jobs 2
    python scripts/ptx_digests.py --out after.txt --only "causal d128" --chips sm_100a --passes backward
    python scripts/ptx_digests.py --compare before.txt after.txt
    python scripts/ptx_digests.py --out modules.txt --modules

A line of the result is a kernel: chip, pass, composition, width of heads, how it is called, and its number
where a pass has several; the sha256 of its PTX in its normal form (ptx_normal_form.py: no names, numbers of
registers, comments or debug information); and its launch: block, cluster, shared memory, and a digest of how
the grid follows from the arguments. What no kernel exists for has the reason in their place. No GPU is
needed, no cache of kernels is read or written, and equal programs are compiled once. --compare prints what
differs, and ends with 1 if anything does, as does a run in which a case raised what is no refusal.

With --modules nothing is compiled, and all cases take half a minute: a line has the digest of the generated
module, which is all that follows from planning.

Cases come from this checkout's tests (ptx_cases.py): tests/ and tests/numeric/ are put on sys.path. Those of
attention-gym's mods are left out where it is not installed.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.metadata
import multiprocessing
import os
import pickle
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "numeric"), str(ROOT / "scripts")]

CHIPS, PASSES = ("sm_90a", "sm_100a"), ("forward", "backward")
MOST_BYTES = 3 << 30
"""Memory of a worker beyond which another takes its place: compilers never give back all of theirs."""

AT_ONCE = 8
"""Cases that a worker plans before it asks for more."""

WORKERS = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
"""Environment of workers: each has a processor, and none takes memory of a GPU."""

EVERY = 10.0
"""Seconds between two lines about progress."""

GAP = "  "
"""Separator of the parts of a line; single blanks are within them."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--out", type=Path, help="the file to write")
    what.add_argument("--compare", type=Path, nargs=2, metavar=("BEFORE", "AFTER"))
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="worker processes")
    parser.add_argument("--only", type=re.compile, metavar="REGEX", help="cases in whose names this is found")
    parser.add_argument("--chips", nargs="+", choices=CHIPS, default=CHIPS)
    parser.add_argument("--passes", nargs="+", choices=PASSES, default=PASSES)
    parser.add_argument("--modules", action="store_true", help="digests of generated modules, not of PTX")
    given = parser.parse_args(arguments)
    if given.out is not None and not given.out.parent.is_dir():
        parser.error(f"{given.out.parent} is no folder")
    if given.compare:
        found = list(differences(*(path.read_text() for path in given.compare)))
        print(*found, f"{len(found)} differences", sep="\n")
        return int(bool(found))
    return run(given)


# --- comparing --------------------------------------------------------------------------------------------


def differences(before: str, after: str) -> Iterator[str]:
    """Differences between two records, a line for each kernel."""
    old, new = (dict(_named(text)) for text in (before, after))
    for name in sorted(old.keys() | new.keys()):
        if name not in new:
            yield f"{name}: only before"
        elif name not in old:
            yield f"{name}: only after"
        elif old[name] != new[name]:
            yield f"{name}: {_difference(old[name], new[name])}"


def _named(text: str) -> Iterator[tuple[str, list[str]]]:
    for line in text.splitlines():
        name, *parts = line.split(GAP)
        yield name, parts


def _difference(old: list[str], new: list[str]) -> str:
    if len(old) == len(new) == 2:
        code = [f"code {old[0][:12]} became {new[0][:12]}"] * (old[0] != new[0])
        return ", ".join([*code, *[f"launch ({old[1]}) became ({new[1]})"] * (old[1] != new[1])])
    return f"{GAP.join(old)} became {GAP.join(new)}"


# --- all cases --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Failed:
    """Reason why there is no kernel: a refusal, or an error of the project or the compiler."""

    refused: bool
    reason: str

    def __str__(self) -> str:
        return f"{'refused' if self.refused else 'error'}: {' '.join(self.reason.split())}"


Kernels = list[str] | Failed
"""Kernels of a case as lines tell them."""


def run(given: argparse.Namespace) -> int:
    start = time.monotonic()
    os.environ |= WORKERS
    with Workers(given.jobs) as workers:
        found, count = results(workers, chosen(workers, given), given.modules)
    text = [f"# compiler{GAP}{compiler()}", *sorted(lines(found))]
    given.out.write_text("\n".join(text) + "\n")
    errors = [name for name, x in found.items() if isinstance(x, Failed) and not x.refused]
    for name in errors:
        say(f"{name}: {found[name]}")
    refused = sum(isinstance(x, Failed) for x in found.values()) - len(errors)
    distinct = {one.split(GAP)[0] for x in found.values() if not isinstance(x, Failed) for one in x}
    say(
        f"{len(found)} cases, {refused} of them refused and {len(errors)} errors; {count} programs;"
        f" {len(distinct)} distinct kernels; {time.monotonic() - start:.0f} s"
    )
    return int(bool(errors))


def chosen(workers: Workers, given: argparse.Namespace) -> list[str]:
    """The names of the cases that are asked for."""
    ((_, known),) = workers.results(names, {"": None})
    if isinstance(known, Failed):
        sys.exit(str(known))
    if not any(" gym " in name for name, *_ in known):
        say("attention-gym is not installed: without cases of its mods")
    asked = given.only or re.compile("")
    found = [
        name
        for name, chip, direction in known
        if chip in given.chips and direction in given.passes and asked.search(name)
    ]
    if not found:
        sys.exit(f"no case is one of {given.chips}, of {given.passes}, and has {asked.pattern!r} in its name")
    return found


def results(workers: Workers, wanted: Sequence[str], modules: bool) -> tuple[dict[str, Kernels], int]:
    """Kernels of each case, or its generated module, and the number of distinct programs."""
    failed: dict[str, Kernels] = {}
    keys: dict[str, str] = {}
    programs: dict[str, bytes] = {}
    parts = {first: wanted[first : first + AT_ONCE] for first in range(0, len(wanted), AT_ONCE)}
    for first, planned in progress("parts planned", parts, workers.results(plan, parts)):
        for name in parts[first]:
            one = planned if isinstance(planned, Failed) else planned[name]
            if isinstance(one, Failed):
                failed[name] = one
            else:
                keys[name], programs[one[0]] = one
    if modules:
        return failed | {name: [module(programs[key])] for name, key in keys.items()}, len(programs)
    compiled = dict(progress("programs compiled", programs, workers.results(compile_one, programs)))
    return failed | {name: compiled[key] for name, key in keys.items()}, len(programs)


def lines(found: dict[str, Kernels]) -> Iterator[str]:
    for name, kernels in found.items():
        if isinstance(kernels, Failed):
            yield f"{name}{GAP}{kernels}"
            continue
        for number, kernel in enumerate(kernels, 1):
            which = f" {number}/{len(kernels)}" if len(kernels) > 1 else ""
            yield f"{name}{which}{GAP}{kernel}"


def compiler() -> str:
    packages = (x for x in importlib.metadata.distributions() if x.name.startswith("nvidia-cutlass-dsl"))
    return ", ".join(sorted({f"{x.name} {x.version}" for x in packages}))


def progress(what: str, tasks: Sized, done: Iterable[Any]) -> Iterator[Any]:
    last = start = time.monotonic()
    for number, one in enumerate(done, 1):
        yield one
        now = time.monotonic()
        if now - last >= EVERY or number == len(tasks):
            last = now
            say(f"{number} of {len(tasks)} {what}, {now - start:.0f} s")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# --- what workers do --------------------------------------------------------------------------------------


def names(_: None) -> list[tuple[str, str, str]]:
    """Names of all cases, with their chip and pass."""
    from ptx_cases import cases

    return [(name, case.chip, case.direction) for name, case in cases().items()]


def plan(part: Sequence[str]) -> dict[str, tuple[str, bytes] | Failed]:
    """Program of each case, pickled, after its key."""
    from ptx_cases import cases
    from ptx_compile import PASSES

    def planned(name: str) -> tuple[str, bytes]:
        case = cases()[name]
        program = PASSES[case.direction](case)
        return program.key, pickle.dumps(program)

    return {name: caught(planned, name) for name in part}


def module(program: bytes) -> str:
    """Digest of the module that the compiler is given, and of the kinds of its arguments."""
    source, _, signature = pickle.loads(program).given
    return hashlib.sha256(f"{source.key} {signature}".encode()).hexdigest()


def compile_one(program: bytes) -> Kernels:
    from ptx_compile import compiled

    return caught(lambda: list(map(str, compiled(pickle.loads(program)))))


def caught(function: Callable[..., Any], *given: Any) -> Any:
    from fa4flex.errors import UnsupportedError

    try:
        return function(*given)
    except UnsupportedError as error:
        return Failed(True, str(error).partition("\n")[0])
    except Exception as error:
        traceback.print_exc()
        return Failed(False, traceback.format_exception_only(error)[-1])


# --- workers ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Worker:
    process: Any
    pipe: Connection


class Workers:
    """Processes that call functions, one at a time each. One that has grown, failed or ended is replaced."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.idle: list[Worker] = []
        self.busy: dict[Connection, tuple[Worker, Any]] = {}

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *error: object) -> None:
        for worker in (*self.idle, *(worker for worker, _ in self.busy.values())):
            worker.process.terminate()

    def results(self, function: Callable[[Any], Any], tasks: dict[Any, Any]) -> Iterator[tuple[Any, Any]]:
        """Label and result of each task, as they come; Failed where the process ended."""
        waiting = list(reversed(tasks.items()))
        while waiting or self.busy:
            while waiting and len(self.busy) < self.count:
                worker = self.idle.pop() if self.idle else _started()
                label, task = waiting.pop()
                worker.pipe.send((function, task))
                self.busy[worker.pipe] = worker, label
            for pipe in wait(list(self.busy)):
                worker, label = self.busy.pop(pipe)  # type: ignore[arg-type]
                yield label, self._result(worker)

    def _result(self, worker: Worker) -> Any:
        try:
            result, size = worker.pipe.recv()
        except (EOFError, OSError):
            worker.process.join()
            return Failed(False, f"the process ended with {worker.process.exitcode}")
        if size < MOST_BYTES and not isinstance(result, Failed):
            self.idle.append(worker)
        else:
            worker.pipe.send(None)
            worker.pipe.close()
        return result


def _started() -> Worker:
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=(there,), daemon=True)
    process.start()
    there.close()  # so that the end of the process is the end of the pipe
    return Worker(process, here)


def _serve(pipe: Connection) -> None:
    with contextlib.suppress(EOFError):  # nobody waits for results any longer
        while (given := pipe.recv()) is not None:
            function, task = given
            pipe.send((caught(function, task), _bytes()))


def _bytes() -> int:
    """Memory that this process has now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    sys.exit(main())
