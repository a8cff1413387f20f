"""Older versions of transformers: the tests of masks, caches and continuous batching pass with them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from other_pytest import check_passes

FOLDER = Path(sys.prefix, "transformers")
"""Folder that `make test` installs them in, each in one of its own."""

VERSIONS = sorted((path.name for path in FOLDER.glob("*")), key=lambda name: [*map(int, name.split("."))])
FILES = [
    Path(__file__).with_name(f"test_{name}.py")
    for name in ("transformers", "caches", "continuous_batching", "model_mask")
]
RUN = """
import sys, pytest, transformers
version, *arguments = sys.argv[1:]
assert transformers.__version__ == version, transformers.__file__
sys.exit(pytest.main(arguments))
"""
NONE = f"no older versions in {FOLDER}: `make test` installs them"
needed = pytest.mark.skipif(not VERSIONS, reason=NONE)


@needed
def test_the_oldest_version_is_among_them() -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    from fa4flex.integrations.transformers import OLDEST

    assert tuple(map(int, VERSIONS[0].split(".")[:2])) == OLDEST


@needed
@pytest.mark.parametrize("version", VERSIONS)
def test_passes_with(version: str) -> None:
    path = os.pathsep.join([str(FOLDER / version), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    check_passes(RUN, version, "not exhaustive and not gpu and not slow", FILES, PYTHONPATH=path)
