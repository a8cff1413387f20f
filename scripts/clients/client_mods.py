"""A score mod for layers of a served model: FA4FLEX_LAYERS="0=scripts/clients/client_mods.py:nearer"."""

from __future__ import annotations

from typing import Any


def nearer(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, q_len: Any, kv_len: Any) -> Any:
    """Farther keys count less."""
    return score - 0.1 * (q_idx + kv_len - q_len - kv_idx)
