"""Tests of a GPU that a CPU can run: one case of each, lest they fail on a GPU for a reason of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FILES = [f"test_cuda_{name}.py" for name in ("forward", "backward", "rows_of_groups")]
RUN = """
import random, sys, pytest
seed, *arguments = sys.argv[1:]

class OneOfEach:
    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        random.Random(seed).shuffle(items)
        items[:] = {item.originalname: item for item in items}.values()

sys.exit(pytest.main(arguments, plugins=[OneOfEach()]))
"""


@pytest.mark.parametrize("name", FILES)
def test_of_a_gpu(name: str, seed: int) -> None:
    options = ["-q", "-p", "no:xdist", "-p", "no:cacheprovider", "--override-ini", "addopts="]
    options += ["-m", "not exhaustive", str(Path(__file__).with_name(name))]
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(seed), *options],
        env={**os.environ, "FA4FLEX_GPU_TESTS_ON": "cpu"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4_000:] + done.stderr[-2_000:]
    assert "passed" in done.stdout, done.stdout
