"""Deprecated: the model of time is `ptxsim.model`."""

from __future__ import annotations

from typing import Any

from fa4flex.simulator import moved
from ptxsim.model import __all__ as __all__


def __getattr__(name: str) -> Any:
    return moved(name, "ptxsim.model")
