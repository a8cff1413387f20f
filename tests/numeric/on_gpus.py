"""Marks of tests that need a GPU, and calls in a captured graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest
import torch

Result = TypeVar("Result")


def _marks(*capabilities: tuple[int, int]) -> list[pytest.MarkDecorator]:
    here = torch.cuda.is_available() and torch.cuda.get_device_capability() in capabilities
    names = ", ".join(f"{major}.{minor}" for major, minor in capabilities)
    reason = f"needs a CUDA device of compute capability {names}"
    return [pytest.mark.gpu, pytest.mark.skipif(not here, reason=reason)]


HOPPER, ANY = _marks((9, 0)), _marks((9, 0), (10, 0), (10, 3))
"""Marks of tests for Hopper alone, and for each chip that has kernels."""


def captured(step: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
    """CUDA graph of `step`, which is called once before, and the tensors that its replays write."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    return graph, found
