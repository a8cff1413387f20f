"""Attention over random codes is the formula over what they stand for, or is refused in words.

`python tests/properties/test_random_codes.py --draws 500` is the long run; `--device cuda` runs kernels of
codes, `--device sm_90a` those of a simulated GPU; `--replay seed:number` prints one draw, and runs it.
"""

from __future__ import annotations

import argparse
import collections
import os
import random
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pytest
import torch
from algebra_check import CHIPS, Outcome
from codes_check import outcome_of
from codes_draws import CodesDraw, drawn_codes

DRAWS = int(os.environ.get("FA4FLEX_RANDOM_CODES", "60"))
MOST_REFUSED = 0.1


@dataclass
class Report:
    """Counts of a run."""

    draws: int = 0
    kinds: collections.Counter[str] = field(default_factory=collections.Counter)
    refused: collections.Counter[str] = field(default_factory=collections.Counter)
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, draw: CodesDraw, outcome: Outcome, where: str) -> None:
        self.draws += 1
        self.kinds[f"{draw.kind} {draw.placement}"] += 1
        if outcome.kind == "refused":
            self.refused["+".join(draw.conflicts)] += 1
        elif not outcome.fine:
            self.failures.append(
                f"{outcome.kind}: {outcome.words}\n"
                f"python tests/properties/test_random_codes.py --replay {draw.name} {where}"
            )

    def table(self) -> str:
        refused = ", ".join(f"{name} {n}" for name, n in self.refused.most_common())
        kinds = ", ".join(f"{name} {n}" for name, n in sorted(self.kinds.items()))
        return (
            f"{self.draws} draws in {self.seconds:.0f} s: {len(self.failures)} wrong, "
            f"{sum(self.refused.values())} refused ({refused})\n{kinds}"
        )


def dtype_of(seed: int, at: int, device: str) -> str:
    """The dtype in which q, k and v of a draw are given."""
    weights = (5, 4, 1) if device == "cpu" else (1, 6, 2)
    return random.Random(f"{seed}:{at}:dtype").choices(("float32", "bfloat16", "float16"), weights)[0]


def run(seed: int, numbers: Any, device: str = "cpu", say: Any = None) -> Report:
    report, start = Report(), time.monotonic()
    for at in numbers:
        draw, before = drawn_codes(seed, at, kernels=device != "cpu"), len(report.failures)
        torch.manual_seed(at)
        report.add(draw, outcome_of(draw, device, dtype_of(seed, at, device)), f"--device {device}")
        if say is not None and len(report.failures) > before:
            say(report.failures[-1], flush=True)
    report.seconds = time.monotonic() - start
    return report


def check(report: Report) -> None:
    assert not report.failures, "\n\n".join([report.table(), *report.failures])
    assert sum(report.refused.values()) <= max(4, MOST_REFUSED * report.draws), report.table()


@pytest.mark.parametrize("part", range(2))
def test_random_codes_are_what_they_stand_for(part: int, seed: int) -> None:
    check(run(seed + part, range(DRAWS // 2)))


@pytest.mark.slow
def test_random_codes_on_a_simulated_gpu(seed: int) -> None:
    check(run(seed, range(3), "sm_90a"))


def test_draws_have_all_kinds(seed: int) -> None:
    """Kinds of codes by placement, formats, and what is special of contents."""
    draws = [drawn_codes(seed, at) for at in range(2000)]
    placed = {(draw.kind, draw.placement) for draw in draws if draw.placement != "paged"}
    assert len(placed) == 4 * 5
    assert ("cache", "paged") in {(draw.kind, draw.placement) for draw in draws}
    assert len({draw.formats for draw in draws if draw.kind == "quantize"}) == 4 * 2
    assert sum(not draw.learns for draw in draws) < len(draws)
    assert any(any("float('nan')" in line for line in draw.lines) for draw in draws)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python tests/properties/test_random_codes.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--draws", type=int, default=500)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda", *CHIPS))
    parser.add_argument("--seed", type=int)
    parser.add_argument("--first", type=int, default=0, help="number of the first draw")
    parser.add_argument("--replay", default="", help="seed:number of one draw")
    given = parser.parse_args(arguments)
    seed = random.SystemRandom().randrange(2**31) if given.seed is None else given.seed
    torch.set_num_threads(1)
    if given.replay:
        seed, given.first = map(int, given.replay.split(":"))
        given.draws = 1
        draw = drawn_codes(seed, given.first, kernels=given.device != "cpu")
        print(draw.source(device=given.device, dtype=dtype_of(seed, given.first, given.device)))
        print(f"# {draw.kind}, formats {draw.formats}")
    report = run(seed, range(given.first, given.first + given.draws), given.device, print)
    print(f"--seed {seed}\n{report.table()}")
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
