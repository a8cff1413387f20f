"""Processes of a group, forked from one that has imported what they run: to import torch takes each 3 s.

    python tests/forked.py WORKER WORLD RESULTS NAME ...

WORKER is a file with `main(rank, world, results, names)`, which each process runs.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def run(worker: Path, world: int, results: Path, names: list[str], seconds: float) -> None:
    """Run main of `worker` in `world` processes; what a rank says is in results/log.<rank>. Processes that
    take longer are killed."""
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests")))
    space = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    command = [sys.executable, __file__, str(worker), str(world), str(results), *names]
    with (results / "log.0").open("w") as log:
        first = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, env=space, start_new_session=True
        )
        try:
            first.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(first.pid, signal.SIGKILL)
            first.wait()


def imported(path: Path) -> Any:
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def main(worker: Path, world: int, results: Path, names: list[str]) -> None:
    module = imported(worker)
    children = [_forked(module, rank, world, results, names) for rank in range(world)]
    for child in children:
        os.waitpid(child, 0)


def _forked(module: Any, rank: int, world: int, results: Path, names: list[str]) -> int:
    child = os.fork()
    if child:
        return child
    if rank:
        log = os.open(results / f"log.{rank}", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
    try:
        module.main(rank, world, results, names)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
