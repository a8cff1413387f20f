"""In how many parts a backward kernel takes the query heads that share keys. Data only.

A tile of keys that meets all heads of a wide group is long: few of them keep few multiprocessors busy, and
all wait for the last one. Part by part there are more and shorter ones; dK and dV of parts are then added up.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from fa4flex.kernels.plan.backward_time import BackwardTime
from fa4flex.kernels.plan.candidates import Candidate, among, least
from fa4flex.kernels.plan.inputs import Inputs
from fa4flex.kernels.plan.kernel_time import Heads
from fa4flex.kernels.plan.pipeline import BackwardPlan

PART_ROWS = 200
"""Cost of one more tile of keys, in queries of one head that it might meet meanwhile, as measured on an H200:
its keys come, its dK and dV are written, and read again."""

LAUNCH_ROWS = 100
"""Cost of one more kernel launch, likewise."""

APART = 7
"""Under a mask, multiprocessors end apart by the longest tile of keys over this, as measured there. These
three stand for masks whose tiles a plan cannot count, as numbers or contents of a call decide (a window's
width, documents, maps), and for ordered sums, whose blocks wait for each other: the model knows neither."""


MOST_KNOWN = 1024
"""Extents whose number of parts is kept."""


@dataclass(frozen=True)
class Groups:
    """group          query heads that share keys
    kv_heads       number of KV heads
    time           what the time of a call follows from
    counted        whether the model can count the tiles' steps
    """

    group: int
    kv_heads: int
    time: BackwardTime
    counted: bool = True

    def parts(self, batch: int, q_len: int, kv_len: int) -> int:
        """A divisor of the group, for calls of these extents: the one that costs least, of equals the
        smallest."""
        # By extents alone: a hash of all that the time follows from takes longer than a launch's arguments.
        extents = batch, q_len, kv_len
        found = self._known.get(extents)
        if found is None:
            found = self._least(*extents) if self.counted else self._cheapest(*extents)
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            self._known[extents] = found
        return found

    @cached_property
    def _known(self) -> dict[tuple[int, int, int], int]:
        """Numbers of parts of earlier calls."""
        return {}

    def _least(self, batch: int, q_len: int, kv_len: int) -> int:
        found: list[float] = []
        best, divisors = float("inf"), self.divisors
        for one in self.time.predictions(self.sizes(batch, q_len, kv_len), divisors):
            found.append(one.seconds)
            best = min(best, one.seconds)
            if one.shortest >= best:
                break  # more parts are more work, however evenly it is dealt out
        return divisors[least(found, self.time.kernel.constants.backward.error)]

    def _cheapest(self, batch: int, q_len: int, kv_len: int) -> int:
        """The estimate for tiles that the model cannot count."""
        tile_n, size = self.time.tile[1], self.sizes(batch, q_len, kv_len)
        of_head = kv_len // tile_n + batch if self.time.packed else -(-kv_len // tile_n) * batch
        tiles, queries = of_head * self.kv_heads, q_len // max(batch, 1) if self.time.packed else size.q_len
        workers = max(self.time.target.multiprocessors // self.time.ctas, 1)

        def cost(parts: int) -> float:
            longest = self.group * queries / parts
            waves = -(-tiles * parts // workers)
            late = longest / APART if self.time.form != "full" else longest * waves
            return late + (parts > 1) * (PART_ROWS * parts * tiles / workers + LAUNCH_ROWS)

        return min(self.divisors, key=cost)

    def candidates(self, batch: int, q_len: int, kv_len: int) -> list[Candidate[int]]:
        """Numbers of parts, and what each would take."""
        size = self.sizes(batch, q_len, kv_len)
        return among(self.divisors, _in_parts, lambda parts: self.time.predict(size, parts))

    @cached_property
    def divisors(self) -> tuple[int, ...]:
        return tuple(n for n in range(1, self.group + 1) if self.group % n == 0)

    def sizes(self, batch: int, q_len: int, kv_len: int) -> Heads:
        """The call; of packed sequences of the average length."""
        each = max(batch, 1) if self.time.packed else 1
        return Heads(batch, self.group * self.kv_heads, self.kv_heads, -(-q_len // each), -(-kv_len // each))


def _in_parts(parts: int) -> str:
    return "all heads of a group" if parts == 1 else f"{parts} parts of a group"


def groups_of(inputs: Inputs, plan: BackwardPlan) -> Groups | None:
    """None where a kernel takes query heads that share keys together, or none do."""
    if not plan.problem.grouped:
        return None
    group, time = inputs.extents.heads // inputs.kv_heads, plan.time
    assert time is not None, "kernels that take groups in parts have a model of their time"
    return Groups(group, inputs.kv_heads, time, time.form != "other" and not plan.problem.deterministic)
