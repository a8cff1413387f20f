"""Models under test: eager with masks that stay finite in float64 (see scripts/model_families.py).

Engines under test: their adapters, over stubs where they are not installed.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from engines import with_stubs

from fa4flex.integrations import layers


@pytest.fixture(autouse=True)
def finite_masks() -> Iterator[None]:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    from models import model_families

    masks = transformers.AttentionMaskInterface._global_mapping
    before = masks["eager"]
    transformers.AttentionMaskInterface.register("eager", model_families.finite_eager_mask)
    yield
    transformers.AttentionMaskInterface.register("eager", before)
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def sglang() -> Iterator[ModuleType]:
    yield from with_stubs("sglang")


@pytest.fixture(scope="module")
def vllm() -> Iterator[ModuleType]:
    yield from with_stubs("vllm")


@pytest.fixture(autouse=True)
def no_assignments() -> Iterator[None]:
    """No mods are assigned to layers before a test, nor after it."""
    layers.clear()
    yield
    layers.clear()
