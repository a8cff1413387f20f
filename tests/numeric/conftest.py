"""The device of tests that need a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from cuda_cases import DEVICE


@pytest.fixture
def on_the_device(seed: int) -> Iterator[None]:
    """New tensors are made on the device, where there is one; the seed is the test's."""
    if DEVICE is None:
        yield
        return
    with torch.device(DEVICE):
        yield
