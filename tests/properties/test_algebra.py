"""Attention composed at random of 3 to 6 primitives is the formula, or is refused in words.

`python tests/properties/test_algebra.py --draws 2000 --jobs 2` is the long run; `--device cuda` runs kernels,
`--device sm_90a` those of a simulated one, and `--replay seed:number` one draw, whose code is printed.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import os
import random
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pytest
import torch
from algebra_check import CHIPS, Outcome, outcome_of
from algebra_draws import OF_CPU, OF_GPU, PRIMITIVES, Draw, drawn

DRAWS = int(os.environ.get("FA4FLEX_RANDOM_ALGEBRA", "60"))
PARTS = 3
"""Tests that draw as many together, each in its time."""

MOST_REFUSED = 0.15
"""Largest share of draws that may be refused: those with a conflict that was left in to see it refused."""

REPEAT_ON_GPU = 4
"""Draws of one composition on a GPU, which share kernels."""


@dataclass
class Report:
    """Counts of a run."""

    draws: int = 0
    refused: collections.Counter[str] = field(default_factory=collections.Counter)
    failures: list[str] = field(default_factory=list)
    pairs: collections.Counter[str] = field(default_factory=collections.Counter)
    seconds: float = 0.0

    def add(self, draw: Draw, outcome: Outcome, dtype: str, device: str) -> None:
        self.draws += 1
        self.pairs.update("+".join(pair) for pair in itertools.combinations(sorted(draw.has), 2))
        if outcome.kind == "refused":
            self.refused["+".join(draw.conflicts)] += 1
        elif not outcome.fine:
            self.failures.append(told(draw, outcome, dtype, device))

    def join(self, other: dict[str, Any]) -> None:
        self.draws += other["draws"]
        self.refused.update(other["refused"])
        self.failures += other["failures"]
        self.pairs.update(other["pairs"])

    def table(self) -> str:
        every = ["+".join(pair) for pair in itertools.combinations(sorted(PRIMITIVES), 2)]
        least = min(every, key=lambda pair: self.pairs[pair])
        missing = [pair for pair in every if not self.pairs[pair]]
        refused = ", ".join(f"{name} {n}" for name, n in self.refused.most_common())
        return "\n".join([
            f"{self.draws} draws in {self.seconds:.0f} s: {len(self.failures)} wrong, "
            f"{sum(self.refused.values())} refused ({refused})",
            f"pairs of primitives drawn: {len(every) - len(missing)} of {len(every)}, the rarest {least} "
            f"{self.pairs[least]} times",
        ])  # fmt: skip


PASTED = """
attn = fa4flex.compile(**composition)
print(attn(q, k, v, **call))
"""


def told(draw: Draw, outcome: Outcome, dtype: str, device: str) -> str:
    """A failure, with the code that makes its call."""
    return "\n".join([
        f"{outcome.kind}: {outcome.words}",
        f"python tests/properties/test_algebra.py --replay {draw.name} --device {device}",
        draw.source(device=device, dtype=dtype) + PASTED,
    ])  # fmt: skip


def dtype_of(seed: int, at: int, device: str) -> str:
    """The dtype of a draw."""
    if device != "cpu":
        return "bfloat16"
    return random.Random(f"{seed}:{at}:dtype").choices(("float64", "float32", "bfloat16"), (6, 2, 2))[0]


def run(seed: int, numbers: Any, device: str = "cpu", repeat: int = 1, say: Any = None) -> Report:
    report, start = Report(), time.monotonic()
    for at in numbers:
        draw = drawn(seed, at, OF_CPU if device == "cpu" else OF_GPU, repeat)
        dtype = dtype_of(seed, at, device)
        torch.manual_seed(at)
        before = len(report.failures)
        report.add(draw, outcome_of(draw, device, dtype), dtype, device)
        if say is not None and len(report.failures) > before:
            say(report.failures[-1], flush=True)
    report.seconds = time.monotonic() - start
    return report


@pytest.mark.parametrize("part", range(PARTS))
def test_random_compositions_are_the_formula(part: int, seed: int) -> None:
    report = run(seed + part, range(DRAWS // PARTS))
    assert not report.failures, "\n\n".join([report.table(), *report.failures])
    assert sum(report.refused.values()) <= max(4, MOST_REFUSED * report.draws), report.table()


def test_draws_have_all_pairs_of_primitives(seed: int) -> None:
    pairs: set[tuple[str, str]] = set()
    for at in range(4000):
        draw = drawn(seed, at)
        assert 3 <= len(draw.has) <= 6
        pairs |= set(itertools.combinations(sorted(draw.has), 2))
    assert pairs == set(itertools.combinations(sorted(PRIMITIVES), 2))


# --- the long run -------------------------------------------------------------------------------------------


def many(arguments: argparse.Namespace, seed: int) -> Report:
    """Draws in processes of their own, which compile and compare at once."""
    report, start, jobs = Report(), time.monotonic(), []
    gpus = torch.cuda.device_count() if arguments.device == "cuda" else 0
    share = -(-arguments.draws // arguments.jobs)
    share += -share % arguments.repeat
    for job, first in enumerate(range(0, arguments.draws, share)):
        count = min(share, arguments.draws - first)
        command = [
            sys.executable,
            __file__,
            "--seed",
            str(seed),
            "--first",
            str(first),
            "--draws",
            str(count),
        ]
        command += ["--device", arguments.device, "--repeat", str(arguments.repeat), "--json"]
        more = {"CUDA_VISIBLE_DEVICES": str(job % gpus)} if gpus else {}
        more |= {"OMP_NUM_THREADS": "1"}
        jobs.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **more}))
    for process in jobs:
        said, _ = process.communicate()
        lines = said.strip().splitlines()
        if process.returncode == 0 and lines:
            report.join(json.loads(lines[-1]))
        else:
            report.failures.append(f"a process ended with status {process.returncode}: {said[-2000:]}")
    report.seconds = time.monotonic() - start
    return report


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python tests/properties/test_algebra.py", description=__doc__)
    parser.add_argument("--draws", type=int, default=2000)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda", *CHIPS))
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--first", type=int, default=0, help="number of the first draw")
    parser.add_argument("--repeat", type=int, help="draws in succession of one composition")
    parser.add_argument("--replay", default="", help="seed:number of one draw")
    parser.add_argument("--json", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    given.repeat = given.repeat or (1 if given.device == "cpu" else REPEAT_ON_GPU)
    seed = random.SystemRandom().randrange(2**31) if given.seed is None else given.seed
    torch.set_num_threads(1)
    if given.replay:
        seed, given.first = map(int, given.replay.split(":"))
        given.draws = 1
        draw = drawn(seed, given.first, OF_CPU if given.device == "cpu" else OF_GPU, given.repeat)
        print(draw.source(device=given.device, dtype=dtype_of(seed, given.first, given.device)) + PASTED)
    if given.jobs > 1:
        print(f"--seed {seed}", flush=True)
        report = many(given, seed)
    else:
        numbers = range(given.first, given.first + given.draws)
        report = run(seed, numbers, given.device, given.repeat, None if given.json else print)
    if given.json:
        print(json.dumps({name: getattr(report, name) for name in ("draws", "refused", "failures", "pairs")}))
        return 0
    print("\n\n".join([*(report.failures if given.jobs > 1 else ()), f"--seed {seed}\n{report.table()}"]))
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
