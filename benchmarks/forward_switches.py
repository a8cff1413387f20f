"""Hopper forward kernels with constants of their plans set otherwise, beside cuDNN.

    python benchmarks/forward_switches.py [--switch short divisors] [--rows "short*"] [--peers cuDNN FA4]
    python benchmarks/forward_switches.py --warm     # compile all of them, in processes beside each other
    python benchmarks/forward_switches.py --smoke    # small rows on the simulator: no GPU, no times

Each setting is chosen in a process of its own, whose planner is told so; "off" is as the library plans, with
the peers beside it. All begin at the same time and compile what they need; then they take turns, row by row,
in random order. Before it is timed, each result is compared with float64 attention: rows with an error of
more than twice that of PyTorch are told and left out. Printed are medians over the rounds: microseconds of a
call, and its speed over that of "off" and of peers in the same round. Rows are those of the bench:
fa4flex/bench/suites.py.
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import select
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

PLAN, TILES = "fa4flex.kernels.fwd_sm90.plan", "fa4flex.kernels.fwd_sm90.tiles"
SPECIALIZE = "fa4flex.codegen.plan.specialize"

Settings = dict[tuple[str, str], Any]
"""Values of constants, by module and name."""

DIVISORS: Settings = {(PLAN, "DIVISORS"): True}
SHORT: Settings = {(SPECIALIZE, "QUERIES_APART"): True}
DEEP: Settings = {(TILES, "NARROW_STAGES"): 4}
AHEAD: Settings = {(TILES, "QUERY_STAGES"): 2}
SECTIONS: Settings = {(PLAN, "SECTION_BYTES"): 8 << 20, (PLAN, "SECTION_WAVES"): 1.5}
TURNS: Settings = {(PLAN, "PINGPONG_WIDEST"): 256}
ONE_SETTLED: Settings = {(PLAN, "SETTLED_ROWS"): 1}
BOTH_SETTLED: Settings = {(PLAN, "SETTLED_ROWS"): 2}

OFF = "off"
SWITCHES: dict[str, tuple[Settings, str]] = {
    "divisors": (DIVISORS, "narrow causal"),
    "short": (SHORT, "narrow"),
    "deep": (DEEP, "narrow"),
    "ahead": (AHEAD, "narrow causal"),
    "short+ahead": (SHORT | AHEAD, "narrow"),
    "short+ahead+divisors": (SHORT | AHEAD | DIVISORS, "narrow"),
    "short+ahead+deep+divisors": (SHORT | AHEAD | DEEP | DIVISORS, "narrow"),
    "sections": (SECTIONS, "causal wide"),
    "sections16": ({(PLAN, "SECTION_BYTES"): 16 << 20}, "causal wide"),
    "sections+divisors": (SECTIONS | DIVISORS, "causal"),
    "sections+ahead+divisors": (SECTIONS | AHEAD | DIVISORS, "causal"),
    "turns": (TURNS, "wide"),
    "settled1": (ONE_SETTLED, "wide"),
    "settled2": (BOTH_SETTLED, "wide"),
    "turns+settled1": (TURNS | ONE_SETTLED, "wide"),
}
"""Settings by name, and the groups of rows that they may matter to."""

ROWS = {
    "narrow": ("short d64 full", "odd 1000 d64", "d64 full 4k"),
    "causal": ("b32 s512 d128", "b16 s1k d128", "odd 3001 d128", "32:8 s2k d128", "d128 causal 4k"),
    "wide": ("d160", "d192", "d256 4k", "d256 16k", "d256 4k full"),
}
OURS = "fa4flex"
SAMPLES, SMOKE_LENGTH = 5, 256
LIMIT = 240
"""Seconds that a process may take to answer, on a GPU: one whose kernel hangs is ended."""


def choose(switch: str) -> None:
    """Tells the planner, before anything is planned, what is otherwise."""
    for (module, name), value in ({} if switch == OFF else SWITCHES[switch][0]).items():
        owner = importlib.import_module(module)
        assert hasattr(owner, name), f"{module} has no {name}"
        setattr(owner, name, value)


def rows_of(switch: str, patterns: list[str]) -> list[str]:
    """Names of the rows of a setting, of those that were asked for."""
    from fa4flex.bench.suites import select_all

    groups = list(ROWS) if switch == OFF else SWITCHES[switch][1].split()
    known = [name for group in groups for name in ROWS[group]]
    chosen = select_all(["shapes", "dense"], patterns)
    asked = {row.name for rows in chosen.values() for row in rows}
    return [name for name in known if name in asked]


# --- a process of one setting ---------------------------------------------------------------------------


def calls_of(name: str, beside: list[str], smoke: bool) -> dict[str, Any]:
    """Calls of this library, which are right, and of those peers `beside` it that are there, by name."""
    import torch

    from fa4flex.bench import peers, suites

    row = next(row for suite in ("shapes", "dense") for row in suites.SUITES[suite] if row.name == name)
    if smoke:
        row = replace(row.small(), length=min(row.length, SMOKE_LENGTH))
    problem = peers.make_problem(row, torch.device("cpu" if smoke else "cuda"), 0)
    found = {}
    for peer in peers.PEERS:
        call = peers.attempt(peer, problem) if peer.name in (OURS, *beside) else peers.Absent("not asked")
        if not isinstance(call, peers.Absent):
            found[peer.name] = call
        elif peer.name == OURS:
            raise WrongError(call.reason)
    with torch.no_grad():
        check(problem, found[OURS]())
    return found


class WrongError(Exception):
    """A result that is worse than it may be, or none."""


def check(problem: Any, out: Any) -> None:
    """Compares the last head of the last batch entry with float64, in its first and last 128 queries: its
    error may be twice that of the same maths in PyTorch, whose probabilities are rounded too."""
    import torch

    row = problem.row
    q, k, v = (x[-1, -1] for x in (problem.q, problem.k, problem.v))
    some = torch.arange(row.length, device=q.device)
    some = torch.cat([some[:128], some[128:][-128:]])
    last = some[:, None] + row.keys - row.length if row.mask == "causal" else some[:, None] * 0 + row.keys
    hidden = torch.arange(row.keys, device=q.device) > last
    scores = (q[some].double() @ k.double().mT * row.head_dim**-0.5).masked_fill(hidden, -torch.inf)
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    expected = weights @ v.double() / weights.sum(-1, keepdim=True)
    plain = (weights.to(v.dtype).float() @ v.float() / weights.sum(-1, keepdim=True).float()).to(v.dtype)
    mine, theirs = ((x.double() - expected).abs().max().item() for x in (out[-1, -1, some], plain))
    if not mine <= 2 * theirs:
        raise WrongError(f"an error of {mine}, where PyTorch has {theirs}")


@contextmanager
def device(smoke: bool) -> Iterator[None]:
    import fa4flex

    with fa4flex.simulator.device("sm_90a", 0, "random") if smoke else nullcontext() as gpu:
        yield
        for result in gpu.results if smoke else ():
            assert result.fault is None and not result.findings, result.findings


def serve(switch: str, names: list[str], beside: list[str], smoke: bool) -> None:
    """Makes all rows ready, with the peers `beside`, and says why one is not; then times each that standard
    input names."""
    from fa4flex.bench.measure import DeviceClock, WallClock, interleave

    choose(switch)
    with device(smoke):
        calls, wrong = {}, {}
        for name in names:
            try:
                calls[name] = calls_of(name, beside, smoke)
            except WrongError as error:
                wrong[name] = str(error)
        print(json.dumps(wrong), flush=True)
        for line in sys.stdin:
            mine = calls[line.strip()]
            if smoke:
                seconds = {peer: WallClock().time(call, 1) for peer, call in mine.items()}
            else:
                times = interleave(mine, DeviceClock(), SAMPLES)
                seconds = {peer: samples.median for peer, samples in times.items()}
            print(json.dumps(seconds), flush=True)


# --- all of them ------------------------------------------------------------------------------------------


class Process:
    """A process of one setting."""

    def __init__(self, switch: str, rows: list[str], beside: list[str], smoke: bool) -> None:
        self.switch, self.rows, self.limit = switch, rows, None if smoke else LIMIT
        command = [sys.executable, __file__, "--serve", switch, "--rows", *rows, *["--smoke"] * smoke]
        command += ["--peers", *beside]
        self.told = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.told, text=True
        )

    def answer(self) -> str:
        """The next line, or "" where the process has ended, or is ended after its time."""
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], self.limit)[0]:
            self.process.kill()
        return self.process.stdout.readline().strip()

    def ready(self) -> bool:
        """Waits; True if all its results are right. Rows that are not are left out."""
        answer = self.answer()
        wrong = json.loads(answer) if answer else dict.fromkeys(self.rows, self.end()[-2000:])
        for row in wrong:
            print(f"{self.switch}, {row}: {wrong[row]}", flush=True)
        self.rows = [row for row in self.rows if row not in wrong]
        return not wrong

    def time(self, row: str) -> dict[str, float]:
        """Seconds by whose they are; none where the process has ended, which then has no rows any more."""
        assert self.process.stdin is not None
        self.process.stdin.write(row + "\n")
        self.process.stdin.flush()
        answer = self.answer()
        if not answer:
            print(f"{self.switch}, {row}: {self.end()[-2000:]}", flush=True)
            self.rows = []
        found: dict[str, float] = json.loads(answer) if answer else {}
        return found

    def end(self) -> str:
        """What it wrote to its standard error."""
        self.process.communicate()
        self.told.seek(0)
        return self.told.read()


Found = dict[tuple[str, str], list[dict[str, float]]]
"""Seconds by whose they are, round by round, by row and switch."""


def measure(processes: list[Process], rounds: int) -> Found:
    found: Found = defaultdict(list)
    for _ in range(rounds):
        for row in {row: None for process in processes for row in process.rows}:
            having = [process for process in processes if row in process.rows]
            for process in random.sample(having, len(having)):
                found[row, process.switch].append(process.time(row))
    return {key: times for key, times in found.items() if len(times) == rounds and all(times)}


def report(found: Found) -> None:
    for (row, switch), mine in found.items():
        ours = statistics.median(x[OURS] for x in mine)
        cells = [f"{ours * 1e6:9.1f} us"]
        others = found.get((row, OFF), [])
        for peer in sorted({peer for x in others for peer in x}):
            # Round by round: what the chip's heat does to one, it does to the next.
            ratio = statistics.median(x[peer] / y[OURS] for x, y in zip(others, mine, strict=True))
            if (peer, switch) != (OURS, OFF):
                cells.append(f"{ratio:.3f} of {OFF if peer == OURS else peer}")
        print(f"{row:18} {switch:24}" + " | ".join(cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--switch", nargs="+", choices=SWITCHES, default=list(SWITCHES))
    parser.add_argument("--rows", nargs="+", default=[], help="patterns of names; default: all that matter")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peers", nargs="*", default=["cuDNN"], help="also FA4, which compiles for each row")
    parser.add_argument("--warm", action="store_true", help="compile and compare, and time nothing")
    parser.add_argument("--smoke", action="store_true", help="small rows on the simulator")
    parser.add_argument("--serve", choices=[OFF, *SWITCHES], help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve(given.serve, given.rows, given.peers, given.smoke)
        return
    planned = {switch: rows_of(switch, given.rows) for switch in given.switch}
    wanted = {row for rows in planned.values() for row in rows}
    planned = {OFF: [row for row in rows_of(OFF, given.rows) if row in wanted]} | planned
    processes = [
        Process(switch, rows, given.peers if switch == OFF else [], given.smoke)
        for switch, rows in planned.items()
        if rows
    ]
    right = sum([process.ready() for process in processes])
    print(f"{right} of {len(processes)} settings are ready and right", flush=True)
    ready = [process for process in processes if process.rows]
    if not given.warm:
        found = measure(ready, 1 if given.smoke else given.rounds)
        if not given.smoke:
            order = [process.switch for process in ready]
            report({key: found[key] for key in sorted(found, key=lambda x: (x[0], order.index(x[1])))})
    for process in ready:
        if process.rows:
            process.end()
    sys.exit(right < len(processes))


if __name__ == "__main__":
    main()
