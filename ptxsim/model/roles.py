"""Role of a warp, told by its instructions."""

from __future__ import annotations

from collections import Counter

from ptxsim.model.events import Loaded, Multiplied, Stored
from ptxsim.model.machine import Walker


def role(walker: Walker) -> str:
    """Role of a warp, as its instructions tell it. Softmax warps are told apart by their warpgroup."""
    events = [e for _, found in walker.pieces for e in found.values()]
    kinds = {type(one) for e in events for one in (e if isinstance(e, tuple) else (e,))}
    costs = Counter(op.cost.name for piece, _ in walker.pieces for op in piece.ops)
    if Multiplied in kinds:
        return "mma"
    if costs["MUFU"] > 100:
        return f"softmax {walker.trace.index // 4}"
    if costs["tensor load"]:
        return "reduce" if Stored in kinds else "correction"
    return "load" if Loaded in kinds else "store" if Stored in kinds else "other"
