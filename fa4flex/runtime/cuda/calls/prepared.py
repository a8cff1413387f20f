"""Tuples of arguments as the calling convention has them, made once and not at each launch."""

from __future__ import annotations

from typing import Any


def prepared(arguments: tuple[Any, ...] | None) -> Any:
    """The tuple for any number of launches; it keeps its tensors alive."""
    if arguments is None:
        return None
    import tvm_ffi

    return tvm_ffi.convert(arguments)
