"""Every launch of this library's kernels in this folder does at barriers what the graph of its plan says."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from executed import Compared, comparing


@pytest.fixture(autouse=True)
def launches() -> Iterator[Compared]:
    with comparing() as compared:
        yield compared
    assert not compared.differences, "\n".join(compared.differences[:3])
