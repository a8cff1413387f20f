"""One seed for every test, printed when the test fails; re-run with --seed to reproduce."""

from __future__ import annotations

import random

import numpy
import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=None, help="seed of every test (default: fresh)")
    parser.addoption("--update-golden", action="store_true", help="rewrite golden files from this run")


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
