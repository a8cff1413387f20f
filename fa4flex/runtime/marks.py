"""Marks on results: what a later function has to know of them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

_NAME = "_fa4flex_output_mod"


def mark(lse: Tensor, mod: Any) -> None:
    """Remember that the output beside this log-sum-exp went through an output function."""
    setattr(lse, _NAME, repr(mod))


def marked(lse: Tensor) -> str | None:
    """The output function that an output went through, by its log-sum-exp, if it is known to have."""
    return getattr(lse, _NAME, None)
