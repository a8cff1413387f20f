"""A public kernel with a small problem, how it is run, and what came of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from timings import TIMINGS, Runner

from ptxsim.watch.findings import Finding


@dataclass(frozen=True)
class Case:
    """`run` makes tensors, launches, and gives what it finds to `Checks.compare`. Within it there is a
    simulated GPU of `arch` with `sms` multiprocessors. `plain` and `in_order` as in Runner."""

    name: str
    arch: str
    run: Callable[[Checks], None] = field(repr=False)
    sms: int = 4
    plain: tuple[str, ...] = ()
    in_order: bool = False


@dataclass
class Checks:
    """Errors of results: root of the mean square over that of what is expected."""

    errors: list[float] = field(default_factory=list)

    def compare(self, found: torch.Tensor, expected: torch.Tensor, bound: float) -> None:
        """Raises AssertionError for an error beyond the bound, or a number that is none."""
        error = self.add(found, expected)
        assert error <= bound, f"error {error:.2g}, bound {bound:.2g}"

    def add(self, found: torch.Tensor, expected: torch.Tensor) -> float:
        wide, reference = found.detach().double(), expected.detach().double()
        scale = reference.norm().item() or 1.0
        error = ((wide - reference).norm() / scale).item()
        self.errors.append(error if error == error else float("inf"))
        return self.errors[-1]

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within, torch.testing.assert_close also adds its error."""
        original = torch.testing.assert_close

        def assert_close(actual: Any, expected: Any, *args: Any, **kwargs: Any) -> None:
            if isinstance(actual, torch.Tensor) and isinstance(expected, torch.Tensor):
                self.add(actual, expected)
            original(actual, expected, *args, **kwargs)

        with patch.object(torch.testing, "assert_close", assert_close):
            yield


@dataclass
class Outcome:
    """`error` is what was raised, or ""; `worst` the largest error of its results."""

    name: str
    arch: str
    error: str = ""
    worst: float = 0.0
    launches: int = 0
    findings: list[tuple[str, str]] = field(default_factory=list)
    """Kind and text."""
    seconds: float = 0.0
    in_order: bool = False

    @property
    def right(self) -> bool:
        return not self.error


def measure(case: Case, seed: int = 0) -> Outcome:
    """The case under all timings: at once where they leave the same bits, else one by one as well."""
    from host import machine

    outcome, started = Outcome(case.name, case.arch, in_order=case.in_order), time.perf_counter()
    found: dict[str, Finding] = {}
    rounds: list[Any] = [TIMINGS]
    while rounds and not outcome.error:
        runner, checks = Runner(case.arch, rounds.pop(), case.plain, case.in_order), Checks()
        torch.manual_seed(seed)
        try:
            with machine(runner, case.sms), checks.watching(), torch.no_grad():
                case.run(checks)
            if not checks.errors:
                outcome.error = "nothing was compared"
            elif not runner.launches:
                outcome.error = "nothing was launched"
        except BaseException as error:
            text = str(error).strip() or repr(error)
            outcome.error = f"{type(error).__name__}: {text}"
        if runner.varies:
            rounds = [[timing] for timing in TIMINGS]
        outcome.worst = max(outcome.worst, *checks.errors, 0.0)
        outcome.launches = max(outcome.launches, runner.launches)
        found = runner.findings | found
    outcome.findings = [(finding.kind, str(finding)) for finding in found.values()]
    outcome.seconds = time.perf_counter() - started
    return outcome
