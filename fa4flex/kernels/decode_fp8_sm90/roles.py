"""Barriers of a block besides those of the rings, which are those for 16-bit keys, as data."""

from __future__ import annotations

from fa4flex.kernels.plan.barriers import NamedRow
from fa4flex.kernels.plan.topology import WARP, WARPGROUP

MEET = NamedRow("warps", 1, WARP * WARPGROUP, "the consumer's warps have read all keys, or written all sums")
