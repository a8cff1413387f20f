"""Every mod of attention-gym for tests on a GPU: longer than on the CPU, and what they read moved."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
from cuda_cases import DEVICE, Composition, Sizes, on_device
from torch import Tensor

Key = tuple[str, str]
"""The argument that takes a mod, and its name."""


@lru_cache(maxsize=1)
def instances() -> dict[Key, Any]:
    """Mods of attention-gym; none where it is not installed."""
    try:
        import gym
    except ImportError:
        return {}
    return gym.instances(777, 520)


KEYS = tuple(instances())
"""Keys alone: nothing is moved to a GPU before tests run."""

LEARNED = tuple(key for key, x in instances().items() if x.differentiable)
installed = pytest.mark.skipif(not KEYS, reason="attn_gym is not installed")


def sizes_of(key: Key) -> Sizes:
    x = instances()[key]
    return Sizes(x.B, x.H, x.H, x.q_len, x.kv_len)


def composed(key: Key) -> tuple[Composition, list[Tensor]]:
    """Composition of a mod on the device, and its tables that gradients can reach, which ask for none."""
    assert DEVICE is not None
    x = instances()[key]
    tables = [table.detach().to(DEVICE) for table in x.differentiable]
    known = {id(table): moved for table, moved in zip(x.differentiable, tables, strict=True)}
    return {key[0]: on_device(x.fn, DEVICE, known)}, tables
