"""Models under test: eager with masks that stay finite in float64 (see scripts/model_families.py)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


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
