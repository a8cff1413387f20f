"""A consumer warpgroup that leaves out tiles of keys whose scores tell that they hold next to nothing.

Scores of every tile are multiplied. Where all 64 rows leave a tile out, nothing is exponentiated, and the
next step issues no product with its values: their stage is freed as it comes.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Float32, Int32, cute, pipeline
from cutlass.cute.nvgpu import warpgroup

from fa4flex.kernels.common.barriers import any_of
from fa4flex.kernels.common.fragment import as_operand, multiply, narrow
from fa4flex.kernels.common.keys import RowEnds
from fa4flex.kernels.common.skipping import depth_of, highest_of, some_count
from fa4flex.kernels.common.softmax import passed, raise_maxima, rescale
from fa4flex.kernels.common.transfer import States
from fa4flex.kernels.fwd_sm90.consumer import Consumer, Mine, Tile
from fa4flex.kernels.fwd_sm90.roles import WRITTEN


@dataclass(frozen=True)
class SkippingTile(Tile):
    """kept: [1], not 0 if values of the last key tile are to be multiplied; depth: see depth_of."""

    kept: cute.Tensor
    depth: Float32


class SkippingConsumer(Consumer):
    def tile(self, mine: Mine, ends: RowEnds | None) -> SkippingTile:
        tile = super().tile(mine, ends)
        kept = cute.make_rmem_tensor((1,), Int32)
        kept[0] = Int32(1)
        depth = depth_of(tile.softmax, mine.keys.count * self.config.tile_n, self.config.skip)
        own = {"kept": kept, "depth": depth}
        return SkippingTile(**{name: getattr(tile, name) for name in Tile.__dataclass_fields__}, **own)

    @cute.jit
    def step(
        self,
        tile: cutlass.Constexpr[SkippingTile],
        key_tile: Int32,
        states: States,
        masked: cutlass.Constexpr[bool],
    ) -> States:
        """Scores of this key tile, and values of the one before if it is kept."""
        (k_state, v_state), pipes, products = states, tile.pipes, tile.products
        begun, v = self.issue(tile, key_tile, states, masked)
        if tile.kept[0] != 0:
            multiply(products.values, products.out, products.p, v, True)
            self.give_turn(self.next(tile.group))
            warpgroup.wait_group(1)
        else:
            self.give_turn(self.next(tile.group))
            warpgroup.wait_group(0)
        pipes.k.consumer_release(k_state)
        self.modify(begun, tile, masked)
        grid, rows = begun.grid, (tile.softmax,)
        highest = [highest_of(tile.softmax, grid)]
        tile.softmax.note(highest[0])
        keep = any_of(WRITTEN, some_count(tile.softmax, highest[0], tile.depth), tile.group)
        raised = passed(rows, highest)
        if raised:
            raise_maxima(rows, highest)
        warpgroup.wait_group(0)
        pipes.v.consumer_release(v_state)
        tile.kept[0] = Int32(keep)
        if keep:
            tile.softmax.exponentiate(grid)
            narrow(as_operand(begun.scores), products.p)
            self.drop(begun, tile)
            if raised:
                rescale(products.out, rows)
        return self.following(tile, key_tile, k_state, masked)

    @cute.jit
    def last(self, tile: cutlass.Constexpr[SkippingTile], v_state: pipeline.PipelineState) -> None:
        """Values of the last key tile, if it is kept."""
        pipes, products = tile.pipes, tile.products
        pipes.v.consumer_wait(v_state)
        if tile.kept[0] != 0:
            v = products.v[None, None, None, v_state.index]
            multiply(products.values, products.out, products.p, v, True)
            warpgroup.wait_group(0)
        pipes.v.consumer_release(v_state)
