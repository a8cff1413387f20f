"""Measuring rows of the sparse suite: all peers in turns, each judged before any is timed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from fa4flex.bench.accuracy import Accuracy, poison
from fa4flex.bench.environment import state_under_load
from fa4flex.bench.measure import interleave
from fa4flex.bench.peers import Absent, Run, absent
from fa4flex.bench.report import OURS, Measured, RowReport
from fa4flex.bench.sparse_peers import OTHER, SparsePeer, gradients
from fa4flex.bench.sparse_rows import Problem, SparseRow, judged
from fa4flex.bench.suites import Draw

if TYPE_CHECKING:
    from fa4flex.bench.command import Options


def measure_group(
    rows: Sequence[SparseRow], offered: Sequence[SparsePeer], options: Options
) -> list[RowReport]:
    """Rows that are compared with one another, and peers that have such rows, taken in turns; of one draw."""
    problems = {row.name: problem_of(row, options.device, options.seed) for row in rows}
    runs: dict[tuple[str, str], Run] = {}
    measured: dict[str, dict[str, Measured]] = {}
    for row in rows:
        measured[row.name] = {}
        for peer in offered:
            options.tell(peer.name)
            prepared, accuracy = attempt(peer, problems[row.name])
            why = prepared.reason if isinstance(prepared, Absent) else ""
            if why == OTHER:
                continue
            found = Measured(accuracy=accuracy, reason=why, aside=not peer.same)
            measured[row.name][peer.name] = found
            if not isinstance(prepared, Absent) and not found.why:
                runs[row.name, peer.name] = prepared
    options.tell("")
    times = interleave(runs, options.clock, options.rounds)
    for (name, peer_name), samples in times.items():
        measured[name][peer_name] = replace(measured[name][peer_name], samples=samples)
    reports = []
    for row in rows:
        run, own = runs.get((row.name, OURS)), times.get((row.name, OURS))
        state = state_under_load(options.device, run, own.median) if run and own else {}
        reports.append(RowReport(row, problems[row.name].work, measured[row.name], state))
    return reports


def problem_of(row: SparseRow, device: torch.device, seed: int) -> Problem:
    """The row's problem. One seed gives one problem; rows with a base have its tensors."""
    return row.problem(Draw(torch.Generator(device).manual_seed(seed)))


def attempt(peer: SparsePeer, problem: Problem) -> tuple[Run | Absent, Accuracy | None]:
    """A peer's call, and the errors of its result where it is the row's; or the reason why there is none."""
    try:
        run = peer.prepare(problem) if problem.dout is None else gradients(peer, problem)
        if isinstance(run, Absent):
            return run, None
        with torch.no_grad():
            run()
            poison(problem.q)
            result = run()
            accuracy = judged(problem, result, peer.name == OURS) if peer.same else None
    except Exception as error:  # whatever a peer raises, the others are timed
        return absent(error), None
    return run, accuracy
