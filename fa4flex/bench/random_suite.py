"""`python -m fa4flex bench --suite random`: problems that nobody has named, beside the peers of their
kind."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fa4flex.bench import random_report
from fa4flex.bench.command import Options, environment_of, options_of, write_plot
from fa4flex.bench.isolated import Answer, Worker
from fa4flex.bench.random_rows import KINDS, WIDTHS, Drawing, chosen, widths_of
from fa4flex.bench.report import OURS
from fa4flex.bench.suites import Row
from fa4flex.errors import InputError

ROWS, MINUTES = 100, 20.0
"""Rows of each kind, and minutes of a run, where the command line does not say."""
ROW_SECONDS = 180.0
"""Seconds after which a row's process is ended: it hangs, as compilers take less."""
OVER = "time budget"

BESIDE = {
    "dense": ("cuDNN", "FA4", "FA3"),
    "packed": ("FA4", "FA3"),
    "masks": ("cuDNN-flex", "FA4", "flex"),
}
"""Peers of each kind, unless `--peers` names others. flex compiles for every shape anew, some ten seconds, so
that it stands where few others do; FA2 is behind FA3 on the chips that have it."""
BESIDE_SMOKE = {"dense": ("SDPA",), "packed": ("flex",), "masks": ("flex",)}

Json = dict[str, Any]


@dataclass
class Run:
    """A run's rows so far: what is asked of the process that does them, and how they turned out."""

    options: Options
    peers: tuple[str, ...]
    """Peers that the user named; without any, those of each row's kind."""
    worker: Worker = field(default_factory=lambda: Worker([sys.executable, "-m", "fa4flex.bench.row_worker"]))

    def row(self, row: Row, kind: str) -> Json:
        """The row as JSON, with its problem. A peer that ends or hangs the process is noted, and the row done
        again without it; where fa4flex does, or where it is not known who did, that is said."""
        absent: dict[str, str] = {}
        usual = BESIDE_SMOKE if self.options.smoke else BESIDE
        offered = [name for name in self.peers or usual[kind] if name != OURS]
        while True:
            left = self.options.deadline - time.monotonic()
            if left <= 0:
                return self._about(row, kind, {"not run": OVER})
            answer = self.worker.ask(self._request(row, offered), min(left, ROW_SECONDS))
            if answer.late and left < ROW_SECONDS:
                return self._about(row, kind, {"not run": OVER})
            why = _trouble(answer)
            if not why and answer.said is not None:
                found = answer.said
                found["peers"] |= {name: {"reason": reason} for name, reason in absent.items()}
                return self._about(row, kind, found)
            guilty = [answer.at] if answer.at in offered else offered
            if answer.at == OURS or not guilty:
                return self._about(row, kind, {"error": why})
            told = why if answer.at in offered else f"not compared: while all were timed, {why}"
            absent |= dict.fromkeys(guilty, told)
            offered = [name for name in offered if name not in guilty]

    def _request(self, row: Row, offered: Sequence[str]) -> Json:
        o = self.options
        asked = {"device": str(o.device), "smoke": o.smoke, "rounds": o.rounds, "seed": o.seed}
        return {"row": asdict(row), "peers": list(offered), **asked}

    def _about(self, row: Row, kind: str, found: Json) -> Json:
        """An outcome of a row, with the problem that makes it again."""
        which = {"row": row.name, "kind": kind, "pass": "backward" if row.backward else "forward"}
        problem = {name: value for name, value in asdict(row).items() if name != "targets"}
        return {**which, "problem": problem, **found}


def _trouble(answer: Answer) -> str:
    """Reason why a row was not answered; empty where it was."""
    return answer.why if answer.said is None else str(answer.said.get("error", ""))


def run(arguments: argparse.Namespace) -> int:
    """Exit status: 1 where fa4flex failed, was wrong, or missed a row's target, or where no row ran; else
    0."""
    options = options_of(arguments, MINUTES)
    drawing = drawing_of(arguments, options.seed)
    rows = chosen(drawing.drawn(), _words(arguments.only))
    about = {"drawing": _as_json(drawing), "environment": environment_of(options)}
    print(f"{'rows':20} {len(rows)} of kinds {', '.join(drawing.kinds)}", flush=True)
    doing, found, start = Run(options, tuple(_words(arguments.peers))), [], time.monotonic()
    try:
        for row in rows:
            found.append(doing.row(row, drawing.kind(int(row.name.split()[0]))))
            if "not run" not in found[-1]:
                passed = f"{len(found):4d}/{len(rows)} {time.monotonic() - start:5.0f} s"
                print(f"{passed}  {random_report.line(found[-1])}", flush=True)
            path = _write(arguments.out, about, found)
    finally:
        doing.worker.close()
    print(f"\n{random_report.text(found)}")
    curves = {name: ratios.values for name, ratios in random_report.by_pass(found).items()}
    title = f"random rows, seed {drawing.seed}: {about['environment']['device']}"
    write_plot(path, arguments.format, lambda plot, picture: plot.save_ratios(curves, title, picture))
    return status(found)


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def drawing_of(arguments: argparse.Namespace, seed: int) -> Drawing:
    """Raises InputError for other suites beside this one, and for numbers, kinds and widths that do not
    exist."""
    if arguments.suite != ["random"]:
        raise InputError(
            f"--suite {' '.join(arguments.suite)}", "random alone", "run the other suites by another command"
        )
    text = arguments.rows or str(ROWS)
    if not text.isdecimal() or not int(text):
        expected = "the number of rows to draw, 1 or more"
        raise InputError(f"--rows {text!r}", expected, "name rows that were drawn by --only")
    kinds = tuple(dict.fromkeys(_words(arguments.kind))) or KINDS[:1]
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise InputError(f"--kind {unknown[0]!r}", f"some of {', '.join(KINDS)}", "leave it out for dense")
    return Drawing(seed, int(text), kinds, widths_of(arguments.widths or WIDTHS))


def status(found: Sequence[Json]) -> int:
    verdicts = [verdict for row in found for verdict in row.get("verdicts", [])]
    missed = any(verdict["passed"] is False for verdict in verdicts)
    ran = any("not run" not in row for row in found)
    return 1 if missed or random_report.failures(found) or not ran else 0


def _as_json(drawing: Drawing) -> Json:
    return {**asdict(drawing), "widths": ",".join(map(str, drawing.widths))}


def _write(out: Path, about: Json, found: Sequence[Json]) -> Path:
    """Write all rows so far: a run that is broken off has left them."""
    out.mkdir(parents=True, exist_ok=True)
    summary = {name: ratios.summary() for name, ratios in random_report.by_pass(found).items()}
    path = out / "bench-random.json"
    text = json.dumps({"suite": "random", **about, "summary": summary, "rows": found}, indent=1)
    path.write_text(f"{text}\n")
    return path
