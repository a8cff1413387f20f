"""Gradients of captured tensors from tiles in which a lane holds a key and a register a query."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cutlass import Float32, Int32, cute, select_

from fa4flex.kernels.common.fragment import packed
from fa4flex.kernels.common.hooks import Share
from fa4flex.kernels.common.operand_gradients import Collector, Target, Values, halved

LANES = 32


@dataclass(frozen=True)
class LaneCollector(Collector):
    """A collector for the 32 keys of a warp, and 32 queries at a time, the first of which is `q_first`."""

    key_lanes: ClassVar[int] = 1

    def take_row(self, i: int, share: Share, values: Values, q_first: Int32, guard: bool) -> None:
        """Each lane ends with the sum of one query."""
        sums = list(values.values())
        for distance in (16, 8, 4, 2, 1):
            sums = halved(sums, distance, self.lane)
        self.add_to_row(share, q_first + self.lane, sums[0])

    def take_diagonal(self, i: int, share: Share, values: Values, q_first: Int32, guard: bool) -> None:
        """Key l and query c are l - c apart: lane t gets, of query c, what lane t + c has, which is t apart
        or, around the end, t - 32."""
        near, far = Float32(0.0), Float32(0.0)
        for (_, c), value in values.items():
            moved = cute.arch.shuffle_sync(value, (self.lane + c) % LANES)
            inside = self.lane + c < LANES
            near = near + select_(inside, moved, Float32(0.0))
            far = far + select_(inside, Float32(0.0), moved)
        for sum_, back in ((near, 0), (far, LANES)):
            self.add_to_diagonal(share, self.slab.kv_first - q_first - back, sum_)

    def write_pairs(self, share: Share, target: Target, values: Values, q_first: Int32, guard: bool) -> None:
        """Lanes write two queries at a time: one with an even key takes the first, and the next one the
        second; each has then two neighbouring keys of its query."""
        odd = self.lane % 2
        write = target.writer(share, self.slab.at, q_first + odd, self.slab.kv_first - odd, guard)
        order = select_(odd == 1, Int32(0x3276), Int32(0x5410))
        for c in range(0, len(self.slab.queries), 2):
            word = packed(values[0, c], values[0, c + 1], target.gradient.element_type)
            other = cute.arch.shuffle_sync_bfly(word, offset=1)
            both = cute.arch.inline_ptx(
                "prmt.b32 {$w0}, {$r0}, {$r1}, {$r2};",
                write_only_types=[Int32],
                read_only_args=[word, other, order],
            )
            write(c, 0, both)
