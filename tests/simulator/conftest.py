"""Every launch of this library's kernels in this folder does at barriers what the graph of its plan says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
from decoding import chip  # noqa: F401
from executed import Compared, comparing

from ptxsim.doors.device import Gpu
from ptxsim.run.coverage import coverage
from ptxsim.run.launch import Result


@pytest.fixture(autouse=True)
def launches() -> Iterator[Compared]:
    with comparing() as compared:
        yield compared
    assert not compared.differences, "\n".join(compared.differences[:3])


@pytest.fixture(autouse=True)
def kernel_coverage(request: pytest.FixtureRequest, launches: Compared) -> Iterator[None]:
    """With --kernel-coverage, in one process, prints which share of each kernel the test's launches
    executed."""
    if not request.config.getoption("--kernel-coverage"):
        yield
        return
    results: list[Result] = []
    run = Gpu.run

    def keeping(gpu: Gpu, launch: Any) -> None:
        run(gpu, launch)
        results.append(gpu.results[-1])

    with patch.object(Gpu, "run", keeping):
        yield
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        for each in coverage(results):
            print(f"\n{request.node.name}: {each.kernel[:48]}: {each}", end="")
