"""`python -m fa4flex bench`: plan, measure, print, write."""

from __future__ import annotations

import argparse
import json
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch

from fa4flex.bench import first_call, peers
from fa4flex.bench.accuracy import Truth, accuracy, truth
from fa4flex.bench.environment import environment, state_under_load
from fa4flex.bench.measure import Clock, Samples, clock_for, host_overhead, interleave
from fa4flex.bench.options import ROUNDS
from fa4flex.bench.peers import Absent, Peer, Problem, Run, absent, attempt, make_problem
from fa4flex.bench.report import (
    OURS,
    Measured,
    RowReport,
    Verdict,
    as_json,
    full_table,
    short_table,
    verdict_text,
    verdicts,
)
from fa4flex.bench.suites import SPARSE, Row, blocks_with_work, flops, groups, select_all
from fa4flex.errors import InputError

if TYPE_CHECKING:
    from fa4flex.bench.sparse_peers import SparsePeer

SMOKE_ROUNDS = 2
MOST_HOST = 15e-6
"""Seconds of host time per call."""
_HOST_ROW = Row("alibi+causal", 1, 2, 128, 64, "causal", "alibi")
_PLAIN_ROW = Row("causal", 1, 2, 128, 64, "causal")

Entry = tuple[str, str]
"""Names of a row and a peer."""


@dataclass(frozen=True)
class Options:
    """Options of the command line, checked."""

    device: torch.device
    smoke: bool
    rounds: int
    seed: int
    deadline: float
    peers: tuple[Peer, ...]
    tell: Callable[[str], None] = lambda name: None
    """Called with a peer's name before it is prepared, and with an empty one before all are timed."""
    sparse: tuple[SparsePeer, ...] = ()
    """Peers of the sparse suite, where that is asked for."""

    @property
    def clock(self) -> Clock:
        return clock_for(self.device)


def options_of(arguments: argparse.Namespace, minutes: float | None = None) -> Options:
    """Options, with `minutes` for a run whose command line has no limit. Raises InputError where there is no
    such device, or no such peer."""
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise InputError(
            "no CUDA device is visible", "a CUDA device", "add --device cpu --smoke for a dry run"
        )
    if arguments.device == "cpu" and not arguments.smoke:
        raise InputError("--device cpu", "--smoke with it", "full sizes would take hours on a CPU")
    rounds = arguments.rounds if arguments.rounds is not None else SMOKE_ROUNDS if arguments.smoke else ROUNDS
    if rounds < 1:
        raise InputError(f"--rounds {rounds}", "at least 1", "leave it out")
    offered: tuple[Peer, ...] = peers.SMOKE_PEERS if arguments.smoke else peers.PEERS
    offered = () if arguments.suite == [SPARSE] else offered
    sparse: tuple[SparsePeer, ...] = ()
    if SPARSE in arguments.suite:
        from fa4flex.bench.sparse_peers import peers_of

        sparse = peers_of(arguments.smoke)
    names = [name for name in arguments.peers.split(",") if name]
    _check_names(names, (*offered, *sparse))
    seconds = _seconds(arguments, minutes)
    return Options(
        torch.device(arguments.device),
        arguments.smoke,
        rounds,
        secrets.randbelow(2**31) if arguments.seed is None else arguments.seed,
        time.monotonic() + seconds,
        _chosen(offered, names),
        sparse=_chosen(sparse, names),
    )


def _seconds(arguments: argparse.Namespace, minutes: float | None) -> float:
    """Seconds that the run may take."""
    if arguments.time_limit is not None and arguments.minutes is not None:
        raise InputError("--time-limit and --minutes", "one of them", "leave one out")
    if arguments.time_limit is not None:
        return float(arguments.time_limit)
    minutes = minutes if arguments.minutes is None else arguments.minutes
    return float("inf") if minutes is None else 60.0 * minutes


def environment_of(options: Options) -> dict[str, str]:
    """Names and versions of the device, packages and peers, which are printed with the seed."""
    result = environment(options.device)
    offered: tuple[_Offered, ...] = (*options.peers, *options.sparse)
    result |= {f"peer {peer.name}": peer.version() for peer in offered}
    print("\n".join(f"{name:20} {value}" for name, value in result.items()))
    print(f"{'inputs':20} standard normal, bf16, seed {options.seed}")
    return result


class _Offered(Protocol):
    """A peer of any suite."""

    @property
    def name(self) -> str: ...

    def version(self) -> str: ...


AnyPeer = TypeVar("AnyPeer", bound=_Offered)


def _check_names(names: Sequence[str], offered: Sequence[_Offered]) -> None:
    """Raise InputError for names of no peer of the suites asked for."""
    if unknown := set(names) - {peer.name for peer in offered}:
        known = ", ".join(dict.fromkeys(peer.name for peer in offered))
        raise InputError(f"--peers {','.join(sorted(unknown))}", f"some of {known}", "check the spelling")


def _chosen(offered: tuple[AnyPeer, ...], names: Sequence[str]) -> tuple[AnyPeer, ...]:
    return tuple(peer for peer in offered if not names or peer.name in names or peer.name == OURS)


def run(arguments: argparse.Namespace) -> int:
    """Exit status: 1 where a target was missed, else 0. A smoke run judges errors alone."""
    options = options_of(arguments)
    _refuse_alien(arguments)
    chosen = select_all(arguments.suite, [pattern for pattern in arguments.rows.split(",") if pattern])
    result = environment_of(options)
    judged: list[Verdict] = []
    for name in arguments.suite:
        if name == "latency":
            judged += _latency(options, result, arguments.out)
            continue
        reports = _measure_suite(name, chosen[name], options)
        _write(name, reports, {"environment": result, "seed": options.seed}, arguments)
        print(f"\n{short_table(reports)}")
        judged += [verdict for report in reports for verdict in verdicts(report, reports)]
    failed = sum(verdict.passed is False for verdict in judged)
    if options.smoke:
        print("\nsmoke run: sizes are tiny, so times are not judged, only errors")
    unjudged = sum(verdict.passed is None for verdict in judged)
    print(f"\n{failed} of {len(judged)} targets missed, {unjudged} not judged")
    return 1 if failed else 0


def _refuse_alien(arguments: argparse.Namespace) -> None:
    """Raises InputError for options that named rows do not have."""
    for name in ("kind", "widths", "only"):
        if getattr(arguments, name):
            raise InputError(f"--{name} {getattr(arguments, name)}", "--suite random with it", "leave it out")


# --- suites -------------------------------------------------------------------------------------------------


def _measure_suite(name: str, rows: Sequence[Any], options: Options) -> list[RowReport]:
    offered: tuple[Any, ...] = options.sparse if name == SPARSE else options.peers
    offered = tuple(p for p in offered if p.name == OURS) if name == "cost" else offered
    measure: Callable[..., list[RowReport]] = measure_group
    if name == SPARSE:
        from fa4flex.bench import sparse_suite

        measure = sparse_suite.measure_group
    reports: list[RowReport] = []
    longest = 0.0
    for group in groups([row.small() for row in rows] if options.smoke else rows):
        start = time.monotonic()
        if start + longest > options.deadline:
            skipped = {peer.name: Measured(reason="not run: time limit") for peer in offered}
            reports += [RowReport(row, 0, skipped) for row in group]
            continue
        reports += measure(group, offered, options)
        longest = max(longest, time.monotonic() - start)
        print(f"\n{full_table(reports[-len(group) :])}", flush=True)
    return reports


def measure_group(rows: Sequence[Row], offered: Sequence[Peer], options: Options) -> list[RowReport]:
    """Rows and peers taken in turns, on the same q, k and v where shapes are equal. All are judged before any
    is timed, and what is wrong is not."""
    problems = {row.name: make_problem(row, options.device, options.seed) for row in rows}
    runs: dict[Entry, Run] = {}
    measured: dict[Entry, Measured] = {}
    for row in rows:
        problem = problems[row.name]
        known = truth(problem, options.seed)
        for peer in offered:
            options.tell(peer.name)
            entry, prepared = (row.name, peer.name), attempt(peer, problem)
            measured[entry] = _judged(prepared, problem, known)
            if not isinstance(prepared, Absent) and not measured[entry].why:
                runs[entry] = prepared
    options.tell("")
    times = interleave(runs, options.clock, options.rounds)
    measured |= {entry: replace(measured[entry], samples=samples) for entry, samples in times.items()}
    reports = []
    for row in rows:
        state = _state(options, runs.get((row.name, OURS)), times.get((row.name, OURS)))
        blocks = blocks_with_work(row, problems[row.name].mods.mask_mod, options.device)
        by_peer = {peer.name: measured[row.name, peer.name] for peer in offered}
        reports.append(RowReport(row, flops(row, blocks), by_peer, state))
    return reports


def _judged(prepared: Run | Absent, problem: Problem, known: Truth) -> Measured:
    """Errors of a call, or the reason why there are none."""
    try:
        if not isinstance(prepared, Absent):
            return Measured(accuracy=accuracy(problem, prepared, known))
    except Exception as error:
        prepared = absent(error)
    return Measured(reason=prepared.reason)


def _state(options: Options, call: Run | None, samples: Samples | None) -> dict[str, str]:
    if call is None or samples is None:
        return {}
    return state_under_load(options.device, call, samples.median)


def _write(
    name: str, reports: Sequence[RowReport], about: dict[str, Any], arguments: argparse.Namespace
) -> None:
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / f"bench-{name}.json"
    path.write_text(json.dumps({"suite": name, **about, "rows": as_json(reports)}, indent=1) + "\n")
    title = f"{name}: {about['environment']['device']}"
    write_plot(path, arguments.format, lambda plot, picture: plot.save(reports, title, picture))


def write_plot(path: Path, ending: str, draw: Callable[[Any, Path], None]) -> None:
    """Write the plot that belongs to a file of numbers, by `draw` of fa4flex.bench.plot, if that can be
    imported; tell of both files."""
    picture = path.with_suffix(f".{ending}")
    try:
        from fa4flex.bench import plot
    except ImportError as error:
        print(f"\nwrote {path}; no plot: {error}")
        return
    draw(plot, picture)
    print(f"\nwrote {path} and {picture}")


# --- latency ------------------------------------------------------------------------------------------------


def _latency(options: Options, about: dict[str, str], out: Path) -> list[Verdict]:
    """Host time per call on a small problem, and first calls in fresh processes."""
    results: dict[str, Any] = {"host": {}}
    offered = [peer for peer in peers.HOST_PEERS if not options.smoke or peer.name == OURS]
    runs: dict[str, Run] = {}
    for peer in offered:
        # Peers without mods are given the plain causal problem: their best case.
        row = _HOST_ROW if peer.name in (OURS, "flex") else _PLAIN_ROW
        prepared = attempt(peer, make_problem(row, options.device, options.seed))
        if isinstance(prepared, Absent):
            results["host"][peer.name] = {"reason": prepared.reason}
        else:
            runs[peer.name] = prepared
    for name, samples in host_overhead(runs, options.rounds).items():
        results["host"][name] = {"median_us": 1e6 * samples.median}
    results["first call"] = first_call.first_and_second(options.device.type)
    out.mkdir(parents=True, exist_ok=True)
    path = out / "bench-latency.json"
    path.write_text(json.dumps({"suite": "latency", "environment": about, **results}, indent=1) + "\n")
    print(f"\nwrote {path}\n")
    for name, value in results["host"].items():
        print(f"host time per call   {name:8} " + value.get("reason", f"{value.get('median_us', 0):.1f} us"))
    judged = latency_verdicts(results)
    if options.smoke:
        judged = [replace(verdict, passed=None) for verdict in judged]
    print("\n".join(verdict_text(verdict) for verdict in judged))
    return judged


def latency_verdicts(results: dict[str, Any]) -> list[Verdict]:
    """Host microseconds, and seconds of first calls, against their limits."""
    microseconds = results["host"].get(OURS, {}).get("median_us")
    first = results["first call"]
    reason = f": {first['reason']}" if "reason" in first else ""
    rows = [("host us per call", microseconds, 1e6 * MOST_HOST)]
    for which, most in first_call.MOST.items():
        rows.append((f"seconds of the {which} process{reason}", first.get(which, {}).get("call"), most))
    return [Verdict(says, value, limit, value is not None and value <= limit) for says, value, limit in rows]
