"""In how many parts a backward kernel takes the query heads that share keys. Data only.

A tile of keys that meets all heads of a wide group is long: few of them keep few multiprocessors busy, and
all wait for the last one. Part by part there are more and shorter ones; dK and dV of parts are then added up.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from fa4flex.codegen.plan.inputs import Inputs
from fa4flex.codegen.plan.pipeline import BackwardPlan

PART_ROWS = 100
"""What one more tile of keys takes, in queries of one head that it might meet meanwhile. Its dK and dV are
written and read again, as many bytes, at any width of heads, as half of these queries take operations."""

LAUNCH_ROWS = 100
"""What one more kernel takes, likewise."""


@dataclass(frozen=True)
class Groups:
    """group          query heads that share keys
    kv_heads       heads of keys
    tile_n         keys of a tile
    workers        multiprocessors
    packed         whether sequences lie one after another
    """

    group: int
    kv_heads: int
    tile_n: int
    workers: int
    packed: bool = False

    @lru_cache(maxsize=1024)
    def parts(self, batch: int, q_len: int, kv_len: int) -> int:
        """A divisor of the group, for calls of these extents: one that costs least, of equal ones the
        smallest. Multiprocessors end apart by half of a tile of keys that meets all queries of its heads."""
        if self.packed:
            tiles, queries = kv_len // self.tile_n + batch, q_len // max(batch, 1)
        else:
            tiles, queries = -(-kv_len // self.tile_n) * batch, q_len
        each = PART_ROWS * tiles * self.kv_heads / self.workers

        def cost(parts: int) -> float:
            more = each * parts + LAUNCH_ROWS if parts > 1 else 0.0
            return more + self.group * queries / (2 * parts)

        return min((n for n in range(1, self.group + 1) if self.group % n == 0), key=cost)


def groups_of(inputs: Inputs, plan: BackwardPlan) -> Groups | None:
    """None where a kernel takes query heads that share keys together, or none do."""
    if not plan.problem.grouped:
        return None
    group, packed = inputs.extents.heads // inputs.kv_heads, inputs.lengths == "packed"
    return Groups(group, inputs.kv_heads, plan.tile[1], plan.target.multiprocessors, packed)
