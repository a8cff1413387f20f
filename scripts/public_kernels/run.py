"""Run public CuTe-DSL kernels on the simulated GPUs: each has to be right under every timing.

    python scripts/public_kernels --checkout ~/cutlass --out public_kernels.md
    python scripts/public_kernels --only "flash-attn" --results results.json

Kernels of CUTLASS's examples are read from a checkout of CUTLASS, those of flash-attn-4 and quack-kernels
from the installed packages. A kernel runs on a small problem under the timings eager and late and three
random ones; its results are compared with float64 (with the examples' own tolerances where these check
themselves), and what the simulator finds is listed. The exit status is 1 unless at least 95 % of the kernels
are right and every finding has an explanation (findings.py).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path

import cutlass  # noqa: F401 - once, for all processes
import cutlass_examples
import flash_attention
import flash_attention_features
import quack_further
import quack_kernels
from findings import explanation
from kernel_case import Case, Outcome, measure
from table import table

WANTED = 0.95
"""Share of kernels that must be right."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--checkout", type=Path, help="a checkout of CUTLASS (default: leave its examples out)"
    )
    parser.add_argument("--only", nargs="+", default=[""], help="parts of the names of kernels")
    parser.add_argument("--out", type=Path, help="where the table goes besides the terminal")
    parser.add_argument(
        "--results", type=Path, help="a file that keeps outcomes: those in it are not run again"
    )
    parser.add_argument("--seconds", type=float, default=900, help="for each kernel (default: %(default)s)")
    given = parser.parse_args()
    cases = [*flash_attention.cases(), *flash_attention_features.cases()]
    cases += [*quack_kernels.cases(), *quack_further.cases()]
    if given.checkout is not None:
        cases = [*cutlass_examples.cases(given.checkout.resolve()), *cases]
    cases = [case for case in cases if any(part in case.name for part in given.only)]
    names = {case.name for case in cases}
    for name, module in (
        ("quack", quack_kernels),
        ("flash-attn-4", flash_attention),
    ):  # the latter needs quack
        if any(each.startswith(name) for each in names):
            module.load()
    kept = Kept(given.results)
    for case in cases:
        if case.name not in kept.outcomes:
            kept.add(_apart(case, given.seconds))
            print(_line(kept.outcomes[case.name]), flush=True)
    outcomes = [kept.outcomes[case.name] for case in cases]
    text = table(outcomes)
    print(f"\n{text}")
    if given.out is not None:
        given.out.write_text(text)
    sys.exit(not _good(outcomes))


class Kept:
    """Outcomes by name, in a file where one is given."""

    def __init__(self, file: Path | None) -> None:
        self.file = file
        read = json.loads(file.read_text()) if file is not None and file.exists() else []
        self.outcomes = {each["name"]: Outcome(**each) for each in read}

    def add(self, outcome: Outcome) -> None:
        self.outcomes[outcome.name] = outcome
        if self.file is not None:
            self.file.write_text(json.dumps([asdict(each) for each in self.outcomes.values()], indent=1))


def _apart(case: Case, seconds: float) -> Outcome:
    """The outcome of a case in a process of its own: a compiler that aborts ends this case alone."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(case, there))
    process.start()
    there.close()
    outcome = Outcome(case.name, case.arch, "the process ended early")
    try:
        if here.poll(seconds):
            outcome = here.recv()
        else:
            outcome.error = f"not done after {seconds:.0f} seconds"
            process.kill()
    except EOFError:
        pass
    process.join()
    return outcome


def _send(case: Case, to: Connection) -> None:
    os.environ["CUTE_DSL_ARCH"] = case.arch
    to.send(measure(case))
    to.close()
    os._exit(0)


def _line(outcome: Outcome) -> str:
    how = f"right, error {outcome.worst:.1e}" if outcome.right else outcome.error.splitlines()[0][:150]
    lines = [f"{outcome.name}: {how}; {len(outcome.findings)} findings; {outcome.seconds:.0f} s"]
    for kind, text in outcome.findings:
        why = explanation(outcome.name, kind, text)
        lines.append(f"    {text.splitlines()[0]}\n      {why or 'NOT EXPLAINED'}")
        lines += [f"      {line.strip()}" for line in text.splitlines()[1:] if not why]
    return "\n".join(lines)


def _good(outcomes: Sequence[Outcome]) -> bool:
    right = sum(outcome.right for outcome in outcomes)
    explained = all(explanation(o.name, kind, text) for o in outcomes for kind, text in o.findings)
    return right >= WANTED * len(outcomes) and explained
