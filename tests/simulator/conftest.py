"""Every launch of this library's kernels in this folder does at barriers what the graph of its plan says."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from executed import comparing


@pytest.fixture(autouse=True)
def does_what_its_graph_says() -> Iterator[None]:
    with comparing() as compared:
        yield
    assert not compared.differences, "\n".join(compared.differences[:3])
