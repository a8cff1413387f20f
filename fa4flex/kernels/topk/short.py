"""The k largest scores of short rows: a warp has a row, whose keys it keeps in registers.

The k-th largest key is found bit by bit, the highest first: a bit is set if k keys are at least as large
then. Of few, it is the largest one, then the largest below it, and so on. Units above the k-th largest are
selected, and of those that are equal to it the first ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass
from cuda.bindings import driver as cuda
from cutlass import Boolean, Float32, Int32, const_expr, cute, range_constexpr, select_

from fa4flex.kernels.topk.config import FEW, ShortConfig
from fa4flex.kernels.topk.rows import LOWEST, NONE, Rule, TopkArguments, key_of, rule_of


class ShortRows:
    direction = "topk"
    """Schema of its arguments."""

    def __init__(self, config: ShortConfig) -> None:
        self.config = config
        self.warps = config.threads // 32

    @cute.jit
    def __call__(self, arguments: TopkArguments, stream: cuda.CUstream) -> None:
        self.device(arguments).launch(
            grid=[cute.ceil_div(Int32(arguments.scores.shape[0]), self.warps), 1, 1],
            block=[self.config.threads, 1, 1],
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def device(self, arguments: TopkArguments) -> None:
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        row = cute.arch.block_idx()[0] * self.warps + cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if row < arguments.scores.shape[0]:
            self.select(arguments, row)

    @cute.jit
    def select(self, arguments: TopkArguments, row: Int32) -> None:
        """A warp's: the units of a row."""
        units = Int32(arguments.scores.shape[1])
        rule, seen = rule_of(arguments, row, units), units
        room = Int32(arguments.ids.shape[1])
        if const_expr(rule is not None):
            room, seen = room - rule.count, rule.open
        keys = self.keys(arguments.scores[row, None], seen, rule)
        least = self.least(keys, room)
        equals = room - self.count(keys, lambda key: key > least)
        tied = self.count(keys, lambda key: (key == least) & (key != NONE)) > equals
        self.write(arguments, row, keys, (least, equals, tied), rule)

    def count(self, keys: cute.Tensor, test: Callable[[Int32], Boolean]) -> Int32:
        """Number of a row's keys of which something is true: lanes count their own, as counting the lanes of
        a ballot takes a quarter of a multiprocessor's rate."""
        mine = Int32(0)
        for i in range(self.config.each):
            mine = mine + Int32(test(keys[i]))
        return Int32(cute.arch.warp_redux_sync(mine, "add"))

    @cute.jit
    def keys(self, scores: cute.Tensor, units: Int32, rule: Rule | None) -> Any:
        """Keys of units 32 i + lane, of which the first `units` may be selected."""
        lane = cute.arch.lane_idx()
        keys = cute.make_rmem_tensor((self.config.each,), Int32)
        for i in range_constexpr(self.config.each):
            unit = 32 * i + lane
            keys[i] = Int32(NONE)
            if unit < units:
                keys[i] = key_of(Float32(scores[unit]), unit, rule)
        return keys

    @cute.jit
    def least(self, keys: cute.Tensor, room: Int32) -> Int32:
        """The key of number `room` from the largest; NONE where fewer may be selected, the largest number
        where none."""
        some = self.count(keys, lambda key: key >= LOWEST)
        least = Int32(NONE)
        if some > room:
            if room <= FEW:
                least = self.by_maxima(keys, room)
            else:
                least = self.by_bits(keys, room)
        return Int32(select_(room <= 0, Int32(0x7FFFFFFF), least))

    @cute.jit
    def by_maxima(self, keys: cute.Tensor, room: Int32) -> Int32:
        """The key of number `room` of more: the largest one, the largest below it, and so on."""
        least, count = Int32(0x7FFFFFFF), Int32(0)
        while count < room:
            mine = Int32(NONE)
            for i in range_constexpr(self.config.each):
                mine = cutlass.max(mine, select_(keys[i] < least, keys[i], Int32(NONE)))
            least = Int32(cute.arch.warp_redux_sync(mine, "max"))
            count = count + self.count(keys, lambda key: key == least)  # noqa: B023  it is called at once
        return least

    @cute.jit
    def by_bits(self, keys: cute.Tensor, room: Int32) -> Int32:
        """The key of number `room` of more, bit by bit."""
        least = Int32(NONE)
        for step in cutlass.range(31, -1, -1, unroll=1):
            # The sign's bit is set for negative numbers: NONE with it flipped is 0.
            raised = least ^ (Int32(1) << step)
            count = self.count(keys, lambda key: key >= raised)  # noqa: B023  it is called at once
            least = select_(count >= room, raised, least)
        return least

    @cute.jit
    def write(
        self,
        arguments: TopkArguments,
        row: Int32,
        keys: cute.Tensor,
        chosen: cutlass.Constexpr,
        rule: Rule | None,
    ) -> None:
        """Selected units, ascending: those above a key, and so many of those that have it, of which there may
        be more, if `tied`."""
        least, equals, tied = chosen
        lane, before = cute.arch.lane_idx(), cute.arch.lanemask_lt()
        ids, place, met = arguments.ids[row, None], Int32(0), Int32(0)
        for i in range_constexpr(self.config.each):
            unit = 32 * i + lane
            selected = (keys[i] >= least) & (keys[i] != NONE)
            if tied:
                equal = cute.arch.vote_ballot_sync(keys[i] == least)
                rank = met + cute.arch.popc(Int32(equal & before))
                selected = (keys[i] > least) | ((keys[i] == least) & (rank < equals))
                met = met + cute.arch.popc(equal)
            if const_expr(rule is not None):
                selected = selected | (rule.forces(unit) & (unit < rule.units))
            mask = cute.arch.vote_ballot_sync(Boolean(selected))
            if selected:
                ids[place + cute.arch.popc(Int32(mask & before))] = unit
            place = place + cute.arch.popc(mask)
        for i in cutlass.range(place + lane, arguments.ids.shape[1], 32, unroll=1):
            ids[i] = Int32(-1)
        if lane == 0:
            arguments.counts[row] = place
