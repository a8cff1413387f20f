"""Tests of a GPU that a CPU can run: one case of each, lest they fail on a GPU for a reason of their own."""

from __future__ import annotations

from pathlib import Path

import pytest
from other_pytest import check_passes

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
    check_passes(
        RUN, str(seed), "not exhaustive", [Path(__file__).with_name(name)], FA4FLEX_GPU_TESTS_ON="cpu"
    )
