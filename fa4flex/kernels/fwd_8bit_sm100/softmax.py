"""A softmax warpgroup of codes: the forward kernel's, with products of 8 bits.

Products of queries and keys are multiplied by the scales of their row and tile. Where nothing else happens to
scores, the softmax does it with the factor that it multiplies by anyway.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from cutlass import Float32, Int32, cute

from fa4flex.kernels.common.arguments import Arguments, kv_heads
from fa4flex.kernels.common.code_softmax import LaneCodeSoftmax
from fa4flex.kernels.common.codes import KeyScales, of_query
from fa4flex.kernels.common.fragment import computed_once
from fa4flex.kernels.common.hooks import At
from fa4flex.kernels.common.keys import KeyTiles, tile_at
from fa4flex.kernels.common.softmax import Running
from fa4flex.kernels.common.work import Work
from fa4flex.kernels.fwd_8bit_sm100.config import HEADROOM, Config
from fa4flex.kernels.fwd_8bit_sm100.rows import (
    brought_to_scale,
    in_float32,
    integers,
    largest_number,
    narrowed_to_bytes,
)
from fa4flex.kernels.fwd_sm100 import softmax as forward
from fa4flex.kernels.fwd_sm100.resources import Shared
from fa4flex.kernels.fwd_sm100.rows import CHAINS, Moments, Pair, Row, add
from fa4flex.kernels.fwd_sm100.softmax import Place, Tile


@dataclass(frozen=True)
class CodesTile(Tile):
    """q_scale, q_bias   of a thread's row; None where the bias is 0, or the softmax has it
    keys, k_scales    tiles of keys that are visited, and scales of those of the head
    coming            scale of the next of these
    lift              what makes scores of the products of the tile at hand, see CodeSoftmax
    """

    q_scale: Float32
    q_bias: Float32 | None
    keys: KeyTiles
    k_scales: KeyScales
    coming: cute.Tensor
    lift: cute.Tensor


class Softmax(forward.Softmax):
    config: Config
    largest_of = staticmethod(largest_number)

    def weights(self, at: At, state: Running) -> LaneCodeSoftmax:
        softmax = LaneCodeSoftmax.of(self.hooks, at, self.config.rescale_threshold, state)
        softmax = replace(softmax, headroom=HEADROOM if self.config.transposed else 0.0)
        return replace(softmax, lift=self.one()) if self.hooks.plain else softmax

    def one(self) -> cute.Tensor:
        """A register for the lift."""
        return cute.make_rmem_tensor((1,), Float32)

    def told(self, tile: Tile, work: Work, keys: KeyTiles, arguments: Arguments) -> CodesTile:
        """The tile, with scales of its row and of its head's keys."""
        at, q = tile.fragment.at, tile.fragment.first_row
        softmax: Any = tile.softmax
        q_bias = None
        if arguments.q_bias is not None:
            if self.hooks.plain:
                # It moves neither maxima nor probabilities: what it adds to sums is added at the end.
                bias = computed_once(of_query(arguments.q_bias, work, q))
                softmax = replace(softmax, late=lambda: (bias,))
            else:
                q_bias = of_query(arguments.q_bias, work, q)
        kv_head = at.h // (at.num_heads // kv_heads(arguments))
        k_scales, coming = KeyScales.of(arguments, work.b, kv_head), self.one()
        coming[0] = k_scales.at(tile_at(keys, Int32(0)) * self.config.tile_n)
        return CodesTile(
            tile.fragment,
            softmax,
            tile.dropout,
            q_scale=of_query(arguments.q_scale, work, q),
            q_bias=q_bias,
            keys=keys,
            k_scales=k_scales,
            coming=coming,
            lift=self.one() if softmax.lift is None else softmax.lift,
        )

    def begin(self, tile: Any, i: Int32) -> None:
        """The scale of the next keys is read now: it comes from memory while these are worked on."""
        tile.lift[0] = tile.q_scale * tile.coming[0]
        tile.coming[0] = tile.k_scales.at(tile_at(tile.keys, i + 1) * self.config.tile_n)

    def lifts(self, masked: bool) -> bool:
        """True if scores are brought to scale before the softmax sees them: where some are hidden, as a scale
        that is NaN would make NaN of these, and where hooks modify them."""
        return masked or not self.hooks.plain

    def taken(
        self, tile: Any, place: Place, kv_first: Int32, words: list[Int32] | None
    ) -> tuple[list[list[Float32]], Any]:
        rows, largest = super().taken(tile, place, kv_first, words)
        if self.lifts(words is not None):
            tile.lift[0] = Float32(1.0)
            return rows, largest
        return rows, Float32(largest) * tile.lift[0]

    def scores(self, tile: Any, taken: cute.Tensor, masked: bool) -> Row:
        """Integers stay such until exponentials are taken, where nothing else happens to them: what can be
        done beside those need not be done before."""
        row = Row(taken)
        if self.config.qk == "int8":
            row.numbers = integers(row.numbers)
        if self.lifts(masked):
            row.numbers = brought_to_scale(in_float32(row.numbers), tile.lift[0], tile.q_bias)
        return row

    def exponentials(self, softmax: Any, row: Any, f: int, moments: Moments | None) -> list[Pair]:
        return super().exponentials(softmax, in_float32(row), f, moments)

    def gathered(self, pairs: list[Pair], found: list[Pair]) -> list[Pair]:
        """The same; in one CTA they are added up beside exponentials: its softmax warpgroups wait for
        products at different times, and what the one does then keeps the other from its exponentials."""
        if self.config.ctas > 1:
            return super().gathered(pairs, found)
        chains, rest = (pairs, found) if pairs else (found[:CHAINS], found[CHAINS:])
        for i, two in enumerate(rest):
            at = i % CHAINS
            chains = [*chains[:at], add(chains[at], two), *chains[at + 1 :]]
        return chains

    def narrowed(self, row: list[Pair], kind: Any) -> cute.Tensor:
        return narrowed_to_bytes(row) if self.config.transposed else super().narrowed(row, kind)

    def hand_last(self, shared: Shared, place: Place, scale: Float32, softmax: Any) -> None:
        """The same, and the sum of the row's probabilities: less than 1 beside a sink, and 0 without keys."""
        super().hand_last(shared, place, scale, softmax)
        if self.config.transposed:
            shared.finals[place.row, self.config.q_tiles + place.tile] = softmax.state.total[0] * scale
