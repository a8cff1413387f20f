"""A softmax warpgroup that leaves out the exponentials of key tiles whose scores tell that they hold next to
nothing.

Each warp decides for its 32 rows. Its probabilities are then zeros: one product has the rows of all warps,
and its order among the others is what the pipeline's hand-overs rest on.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Float32, Int32, cute

from fa4flex.kernels.common.barriers import Pipes
from fa4flex.kernels.common.hooks import At
from fa4flex.kernels.common.keys import KeyTiles
from fa4flex.kernels.common.skipping import depth_of, some_count
from fa4flex.kernels.common.softmax import Running
from fa4flex.kernels.fwd_sm100.config import FRAGMENT
from fa4flex.kernels.fwd_sm100.resources import Shared
from fa4flex.kernels.fwd_sm100.rows import largest_or_nan, total_of
from fa4flex.kernels.fwd_sm100.softmax import Place, Softmax, Tile


@dataclass(frozen=True)
class SkippingTile(Tile):
    """depth: see depth_of."""

    depth: Float32


class SkippingSoftmax(Softmax):
    largest_of = staticmethod(largest_or_nan)

    def tile(self, at: At, row: Int32, state: Running, keys: KeyTiles) -> SkippingTile:
        tile = super().tile(at, row, state, keys)
        depth = depth_of(tile.softmax, keys.count * self.config.tile_n, self.config.skip)
        return SkippingTile(tile.fragment, tile.softmax, tile.dropout, depth)

    @cute.jit
    def step(
        self,
        tile: cutlass.Constexpr[SkippingTile],
        place: cutlass.Constexpr[Place],
        shared: cutlass.Constexpr[Shared],
        pipes: cutlass.Constexpr[Pipes],
        which: tuple[Int32, Int32, Int32],
        masked: cutlass.Constexpr[bool],
    ) -> None:
        """The key tile of this number, the i-th of its row, whose scores come in this phase."""
        key_tile, i, phase = which
        kv_first = key_tile * self.config.tile_n
        rows, largest = self.awaited(tile, place, pipes.s_full, (kv_first, phase), masked)
        keep = cute.arch.vote_any_sync(some_count(tile.softmax, [largest], tile.depth))
        self.raise_maximum(tile.softmax, largest)
        self.hand_scale(tile, place, shared, pipes, i)
        if keep:
            pairs = self.probabilities(tile, place, rows, pipes, kv_first)
            total = tile.softmax.state.total
            total[0] = total_of(pairs, total[0])
        else:
            self.zeros(place, pipes)

    def zeros(self, place: Place, pipes: Pipes) -> None:
        """Probabilities of a tile that is left out."""
        nothing = cute.make_rmem_tensor((FRAGMENT // 2,), Float32)
        nothing.fill(0.0)
        for f in range(self.fragments):
            place.probabilities.put(f, nothing)
            self.handed_over(pipes, place, f)
