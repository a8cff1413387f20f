"""Why what the simulator finds in public kernels is there: by kernel, kind and instruction."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Explanation:
    """`kernel`, `kind` and `text` are patterns that are searched in the kernel's name and in the finding."""

    kernel: str
    kind: str
    text: str
    why: str


EXPLANATIONS: tuple[Explanation, ...] = ()


def explanation(kernel: str, kind: str, text: str) -> str:
    """Why the finding is true, or "" where nobody has explained it."""
    for known in EXPLANATIONS:
        if re.search(known.kernel, kernel) and re.search(known.kind, kind) and re.search(known.text, text):
            return known.why
    return ""
