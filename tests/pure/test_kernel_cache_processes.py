"""Kernels on disk are compiled once by many processes. A process imports this file, and little else."""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path

from fa4flex.compiler import cache

KEY = "k" * 64
CODE = b"the same code" * 1000


def _obtain_slowly(folder: str, results: multiprocessing.Queue) -> None:
    def build() -> tuple[str, bytes]:
        time.sleep(0.5)
        return ".so", CODE

    path, built = cache.obtain(Path(folder), KEY, build)
    results.put((built, path.read_bytes() == cache.seal(CODE)))


def test_processes_that_start_at_once_build_one_kernel(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    results = spawn.Queue()
    processes = [spawn.Process(target=_obtain_slowly, args=(str(tmp_path), results)) for _ in range(4)]
    for process in processes:
        process.start()
    found = [results.get(timeout=120) for _ in processes]
    for process in processes:
        process.join()
    assert all(right for _, right in found)
    assert sum(built for built, _ in found) == 1
    assert [path.name for path in tmp_path.iterdir()] == [f"{KEY}.so"]
