"""Barriers at which warps meet that look at lists, as data."""

from __future__ import annotations

from fa4flex.kernels.plan.barriers import NamedRow
from fa4flex.kernels.plan.topology import WARP, WARPGROUP

ENTRIES = NamedRow("entries", 8, WARP * WARPGROUP, "producers have looked at all entries of a list")


KNOWN = "it is known which entries of a list count"


def listed(warps: int, meaning: str = f"queries are written, and {KNOWN}") -> NamedRow:
    """The barrier at which all warps of a block meet."""
    return NamedRow("listed", 9, WARP * warps, meaning)
