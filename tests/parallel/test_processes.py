"""Context parallelism in 2, 3 and 4 processes: worker.py and meshes.py have what each of them runs."""

from __future__ import annotations

from pathlib import Path

import forked
import pytest
from scenarios import SECONDS, check, scenarios_of

WORKER, MESHES = Path(__file__).with_name("worker.py"), Path(__file__).with_name("meshes.py")


def run(world: int, results: Path, worker: Path = WORKER, names: list[str] | None = None) -> Path:
    forked.run(worker, world, results, names or scenarios_of(worker), SECONDS)
    return results


MANY = [pytest.param(world, marks=pytest.mark.exhaustive) for world in (2, 4)]


@pytest.fixture(scope="module", params=[3, *MANY])
def processes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Path]:
    """Number of processes, and the results of all scenarios, which run once."""
    return request.param, run(request.param, tmp_path_factory.mktemp(f"ranks{request.param}"))


@pytest.mark.parametrize("name", scenarios_of(WORKER))
def test_scenario(processes: tuple[int, Path], name: str) -> None:
    check(*processes, name)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results of the scenarios over two dimensions of a mesh."""
    return run(4, tmp_path_factory.mktemp("meshes"), MESHES)


@pytest.mark.slow
@pytest.mark.parametrize("name", scenarios_of(MESHES))
def test_two_dimensions_of_a_mesh(four: Path, name: str) -> None:
    check(4, four, name)


@pytest.mark.slow
@pytest.mark.parametrize("world", (2, 4, pytest.param(8, marks=pytest.mark.exhaustive)))
def test_bytes_are_as_planned(world: int, tmp_path: Path) -> None:
    name = "bytes_are_as_planned"
    check(world, run(world, tmp_path, names=[name]), name)
