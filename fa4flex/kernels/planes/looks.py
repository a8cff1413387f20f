"""Heads that look at their plane, and numbers that the kernels of planes share."""

from __future__ import annotations

import math
from typing import Any

from cutlass import Boolean, Int32

from fa4flex.kernels.planes.config import EVERY

LOG2E, LN2 = math.log2(math.e), math.log(2)
INFINITY = math.inf


def looks(a: Any, b: Int32, h: Int32) -> Boolean:
    """True if a head looks at its plane: it was worth its bytes at the last look, or its turn has come."""
    return (a.share[b, h] >= a.worth) | (Int32(a.step[0] % EVERY) == 0)
