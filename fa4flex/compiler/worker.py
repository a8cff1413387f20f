"""A process that compiles one kernel into the cache on disk: `python -m fa4flex.compiler.worker < job`.

A job comes from the process that started this one (compile.py: compile_ahead).
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from fa4flex.compiler import cache
from fa4flex.compiler.compile import build_object, kernel_key, without_collector

if TYPE_CHECKING:
    from fa4flex.compiler.compile import Job


def work(job: Job, folder: Path) -> None:
    """Put the kernel of a job into a folder, unless it is there."""
    source, problem, signature, arch = job
    key = kernel_key(source.key, problem, signature, arch)
    with without_collector():
        cache.obtain(folder, key, lambda: build_object(source, problem, signature, arch))


if __name__ == "__main__":
    work(*pickle.load(sys.stdin.buffer))
