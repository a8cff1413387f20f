"""Every mod of attention-gym for tests on a GPU: longer than on the CPU, and what they read moved."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
from cuda_cases import DEVICE, Composition, Sizes, on_device
from torch import Tensor

Key = tuple[str, str]
"""The argument that takes a mod, and its name."""


@lru_cache(maxsize=1)
def instances() -> dict[Key, Any]:
    """Made on the CPU, with whose generator attention-gym draws; none where that is not installed."""
    try:
        from gym import mask_instances, score_instances
    except ImportError:
        return {}
    with torch.device("cpu"):
        kinds = (("mask", mask_instances(777)), ("score_mod", score_instances(520)))
    return {(kind, x.name): x for kind, found in kinds for x in found}


KEYS = tuple(instances())
"""Nothing is moved before tests run."""

LEARNED = tuple(key for key, x in instances().items() if x.differentiable)
installed = pytest.mark.skipif(not KEYS, reason="attn_gym is not installed")


def sizes_of(key: Key) -> Sizes:
    x = instances()[key]
    return Sizes(x.B, x.H, x.H, x.q_len, x.kv_len)


def composed(key: Key) -> tuple[Composition, list[Tensor]]:
    """And the tables that gradients can reach, which ask for none."""
    assert DEVICE is not None
    x = instances()[key]
    tables = [table.detach().to(DEVICE) for table in x.differentiable]
    known = {id(table): moved for table, moved in zip(x.differentiable, tables, strict=True)}
    return {key[0]: on_device(x.fn, DEVICE, known)}, tables
