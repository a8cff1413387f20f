"""Registry of functions that make backends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

ATTENTION_BACKENDS: dict[str, Any] = {}


def register_attention_backend(name: str) -> Callable[[Any], Any]:
    def keep(make: Any) -> Any:
        ATTENTION_BACKENDS[name] = make
        return make

    return keep
