"""One seed for every test, printed when the test fails, and golden files; see tests/README.md."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import torch

GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=None, help="seed of every test (default: fresh)")
    parser.addoption("--update-golden", action="store_true", help="rewrite golden files from this run")


def pytest_configure(config: pytest.Config) -> None:
    in_ci = os.environ.get("CI", "").lower() not in ("", "0", "false")
    if in_ci and config.getoption("--update-golden"):
        raise pytest.UsageError("--update-golden where CI is set: update on your machine and read the diff")


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> int:
    """A fresh seed, already given to torch, numpy and random; it stands in the report of a failing test."""
    given = request.config.getoption("--seed")
    value = given if given is not None else random.SystemRandom().randrange(2**31)
    request.node.add_report_section("setup", "seed", f"--seed {value}")
    random.seed(value)
    numpy.random.seed(value % 2**32)
    torch.manual_seed(value)
    return int(value)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """`golden(text)`: text must equal tests/golden/<test name>.txt, which --update-golden rewrites."""
    path = GOLDEN / f"{re.sub(r'[^a-z0-9]+', '_', request.node.name.lower()).strip('_')}.txt"

    def compare(text: str) -> None:
        text = text.rstrip() + "\n"
        if request.config.getoption("--update-golden"):
            path.write_text(text)
        assert path.exists(), f"{path} does not exist: run with --update-golden and read the file"
        assert text == path.read_text(), f"differs from {path}: if that is meant, run with --update-golden"

    return compare
