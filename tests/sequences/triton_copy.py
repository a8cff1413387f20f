"""A kernel of Triton that writes into a tensor: torch's version counter does not tell of it."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def copy(into, source, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(into + at, tl.load(source + at, mask=at < count), mask=at < count)
