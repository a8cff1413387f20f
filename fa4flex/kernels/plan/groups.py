"""In how many parts a backward kernel takes the query heads that share keys. Data only.

A tile of keys that meets all heads of a wide group is long: few of them keep few multiprocessors busy, and
all wait for the last one. Part by part there are more and shorter ones; dK and dV of parts are then added up.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from fa4flex.kernels.plan.inputs import Inputs
from fa4flex.kernels.plan.pipeline import BackwardPlan

PART_ROWS = 200
"""Cost of one more tile of keys, in queries of one head that it might meet meanwhile, as measured on an H200:
its keys come, its dK and dV are written, and read again."""

LAUNCH_ROWS = 100
"""Cost of one more kernel launch, likewise."""

APART = 7
"""Under a mask, multiprocessors end apart by the longest tile of keys over this, as measured there."""


@dataclass(frozen=True)
class Groups:
    """group          query heads that share keys
    kv_heads       number of KV heads
    tile_n         keys of a tile
    workers        tiles that are worked on at a time: multiprocessors, or pairs of them; at least 1
    masked         whether tiles of keys meet more or fewer queries
    packed         whether sequences lie one after another
    """

    group: int
    kv_heads: int
    tile_n: int
    workers: int
    masked: bool
    packed: bool = False

    def parts(self, batch: int, q_len: int, kv_len: int) -> int:
        """A divisor of the group, for calls of these extents: the one that costs least, of equals the
        smallest."""
        if self.packed:
            tiles, queries = kv_len // self.tile_n + batch, q_len // max(batch, 1)
        else:
            tiles, queries = -(-kv_len // self.tile_n) * batch, q_len
        return _cheapest(self, tiles * self.kv_heads, queries)


@lru_cache(maxsize=1024)
def _cheapest(groups: Groups, tiles: int, queries: int) -> int:
    """The number of parts for so many tiles of keys, as long as they meet this many queries of each head."""

    def cost(parts: int) -> float:
        longest = groups.group * queries / parts
        late = longest / APART if groups.masked else longest * -(-tiles * parts // groups.workers)
        return late + (parts > 1) * (PART_ROWS * parts * tiles / groups.workers + LAUNCH_ROWS)

    return min((n for n in range(1, groups.group + 1) if groups.group % n == 0), key=cost)


def groups_of(inputs: Inputs, plan: BackwardPlan) -> Groups | None:
    """None where a kernel takes query heads that share keys together, or none do."""
    if not plan.problem.grouped:
        return None
    return Groups(
        inputs.extents.heads // inputs.kv_heads,
        inputs.kv_heads,
        plan.tile[1],
        max(plan.target.multiprocessors // plan.ctas, 1),
        plan.problem.mask_form != "none",
        inputs.lengths == "packed",
    )
