"""Deprecated: the simulator is the package `ptxsim`."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import fa4flex.errors  # noqa: F401  (what it raises is then of this package's classes, too)
from ptxsim import __all__ as __all__


def moved(name: str, home: str) -> Any:
    """Attribute `name` of the module `home`, with a warning at the line that uses its old place."""
    if name.startswith("_"):
        raise AttributeError(f"module 'fa4flex.simulator' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    text = f"fa4flex.simulator is deprecated and goes in 0.3: use {home}.{name}"
    warnings.warn(text, FutureWarning, stacklevel=3)
    return value


def __getattr__(name: str) -> Any:
    return moved(name, "ptxsim")
