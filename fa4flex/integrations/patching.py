"""Functions of other libraries that an integration replaces."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def patch(owner: Any, name: str, replacement: Callable[..., Any]) -> None:
    """Replace a function of a module or a class, once, where this version of the library has it.

    `replacement` takes the original first, which answers for all that is not ours. The signature stays the
    original's."""
    original = getattr(owner, name, None)
    if original is None or hasattr(original, "fa4flex"):
        return

    @functools.wraps(original)
    def patched(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs)

    patched.fa4flex = True  # type: ignore[attr-defined]
    setattr(owner, name, patched)
