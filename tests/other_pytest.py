"""Tests of other files, run by a pytest in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

OPTIONS = ("-q", "-p", "no:xdist", "-p", "no:cacheprovider", "--override-ini", "addopts=")


def check_passes(script: str, argument: str, marks: str, files: Sequence[Path], **variables: str) -> None:
    """Assert that the tests of `files` that `marks` choose pass, and that there are some. `script` is Python
    that runs pytest, and is handed `argument` and then pytest's own; `variables` are of its environment."""
    options = [argument, *OPTIONS, "-m", marks, *map(str, files)]
    done = subprocess.run(
        [sys.executable, "-c", script, *options],
        env={**os.environ, **variables}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4_000:] + done.stderr[-2_000:]
    assert "passed" in done.stdout, done.stdout
