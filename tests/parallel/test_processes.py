"""Context parallelism in 2, 3 and 4 processes: tests/parallel/worker.py has what each of them runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WORKER = Path(__file__).with_name("worker.py")
SCENARIOS = re.findall(r"@scenario\ndef (\w+)", WORKER.read_text())
SECONDS = 180
"""Most that all scenarios together may take, on a machine that has other work to do."""


def run(world: int, results: Path) -> Path:
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests")))
    space = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    logs = [(results / f"log.{rank}").open("w") for rank in range(world)]
    processes = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(rank), str(world), str(results), *SCENARIOS],
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=space,
        )
        for rank, log in enumerate(logs)
    ]
    try:
        for process in processes:
            process.wait(SECONDS)
    except subprocess.TimeoutExpired:
        pass  # the scenario at which they stopped has left no result
    finally:
        for process in processes:
            process.kill()
            process.wait()
        for log in logs:
            log.close()
    return results


MANY = [pytest.param(world, marks=pytest.mark.exhaustive) for world in (2, 4)]


@pytest.fixture(scope="module", params=[3, *MANY])
def processes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Path]:
    """Number of processes, and the results of all scenarios, which run once."""
    return request.param, run(request.param, tmp_path_factory.mktemp(f"ranks{request.param}"))


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(processes: tuple[int, Path], name: str) -> None:
    world, results = processes
    for rank in range(world):
        said = results / f"{name}.{rank}"
        assert said.exists(), f"rank {rank} did not finish:\n{(results / f'log.{rank}').read_text()}"
        assert said.read_text() == "", f"rank {rank} of {world}"
