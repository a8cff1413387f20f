"""Barriers of a block besides those of the forward kernel, as data."""

from __future__ import annotations

from fa4flex.kernels.mixed_sm90.config import GROUPS
from fa4flex.kernels.plan.barriers import NamedRow
from fa4flex.kernels.plan.topology import WARP, WARPGROUP

BOTH = NamedRow(
    "both", 8, GROUPS * WARP * WARPGROUP, "both consumers have written what they hand over, or read it"
)
