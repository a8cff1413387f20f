"""A consumer warpgroup of codes: the forward kernel's, with products of 8 bits.

Products of queries and keys are multiplied by the scales of their row and tile. Where nothing else happens to
scores, the softmax does it with the factor that it multiplies by anyway. A tile's output is summed up apart,
and added where the output of all others is rescaled: one multiply-add in place of a multiplication.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from cutlass import Boolean, Float32, Int32, cute, pipeline
from cutlass.cute.nvgpu import warpgroup

from fa4flex.kernels.common.arguments import Arguments, kv_heads
from fa4flex.kernels.common.code_softmax import CodeSoftmax
from fa4flex.kernels.common.codes import KeyScales, of_query
from fa4flex.kernels.common.fragment import (
    as_operand,
    compute_before,
    computed_once,
    multiply,
    narrow,
    narrow_to_bytes,
    rows_and_columns,
)
from fa4flex.kernels.common.hooks import At, Hooks
from fa4flex.kernels.common.products import ROWS, Mmas, Products, products_of
from fa4flex.kernels.common.softmax import Running
from fa4flex.kernels.common.tile_scheduler import TileScheduler
from fa4flex.kernels.fwd_8bit_sm90.config import HEADROOM, Config
from fa4flex.kernels.fwd_8bit_sm90.epilogue import Epilogue
from fa4flex.kernels.fwd_sm90 import consumer as forward
from fa4flex.kernels.fwd_sm90.consumer import Begun, Mine, Tile
from fa4flex.kernels.fwd_sm90.resources import Shared

LEAST_SHARE = 4
"""Scores of a row that are exponentiated at once, at least: sums of them have as many chains."""


@dataclass(frozen=True)
class CodesTile(Tile):
    """q_scale, q_bias   of a thread's rows; None where the bias is 0, or the softmax has it
    k_scales          of the tiles of keys of the head
    lift              by row: what makes scores of the products of the tile at hand, see CodeSoftmax
    sums, before      the output of a tile, apart, and by row what the output of earlier tiles is multiplied
                      by as that is added; None where nothing is apart
    """

    q_scale: tuple[Float32, ...]
    q_bias: tuple[Float32, ...] | None
    k_scales: KeyScales
    lift: cute.Tensor
    sums: cute.Tensor | None
    before: cute.Tensor | None


@dataclass(frozen=True)
class CodesBegun(Begun):
    """numbers: the same registers as `grid`, which scores are converted to if they are integers; scale: that
    of the keys."""

    numbers: cute.Tensor
    scale: Float32


class Consumer(forward.Consumer):
    config: Config

    def __init__(self, config: Config, hooks: Hooks, scheduler: TileScheduler) -> None:
        super().__init__(config, hooks, scheduler)
        self.epilogue = Epilogue(config, hooks)
        self.starts = False

    @property
    def clears(self) -> bool:
        """Transposed values have zeros past the end of a sequence."""
        return self.config.lengths != "dense" and not self.config.transposed

    def products(self, mma: Mmas, shared: Shared, lane: Int32, group: Int32) -> Products:
        if not self.config.transposed:
            return super().products(mma, shared, lane, group)
        tiles = shared.q[None, None, group], shared.k, shared.v
        n, dv = self.config.tile_n, self.config.head_dim_v
        p = cute.make_rmem_tensor(((4, 2, 2), 1, n // 32), shared.v.element_type)
        return replace(products_of(mma, tiles, (n, dv), lane), p=p)

    def weights(self, at: At, state: Running) -> CodeSoftmax:
        softmax = CodeSoftmax.of(self.hooks, at, self.config.rescale_threshold, state)
        softmax = replace(softmax, headroom=HEADROOM if self.config.transposed else 0.0)
        if not self.hooks.plain:
            return softmax
        return replace(softmax, lift=cute.make_rmem_tensor((2,), Float32))

    def told(self, tile: Tile, mine: Mine, arguments: Arguments) -> CodesTile:
        """The tile, with scales of its rows and of its head's keys."""
        work, at = mine.work, mine.at
        softmax: Any = tile.softmax

        def of_rows(given: cute.Tensor, lane: Int32 = mine.lane) -> tuple[Float32, ...]:
            first = work.tile * self.config.tile_m + mine.group * ROWS + lane // 32 * 16 + lane % 32 // 4
            return tuple([of_query(given, *self.rows.place(work, first + 8 * r)) for r in range(2)])

        q_bias = None
        if arguments.q_bias is not None:
            if self.hooks.plain:
                # It moves neither maxima nor probabilities: what it adds to sums is added at the end.
                def late() -> tuple[Float32, ...]:
                    return of_rows(arguments.q_bias, computed_once(mine.lane))

                softmax = replace(softmax, late=late)
            else:
                q_bias = of_rows(arguments.q_bias)
        kv_head = at.h // (at.num_heads // kv_heads(arguments))
        lift = cute.make_rmem_tensor((2,), Float32) if softmax.lift is None else softmax.lift
        sums = before = None
        if self.config.promote:
            shape = mine.products.values.partition_shape_C((ROWS, self.config.apart))
            sums = cute.make_rmem_tensor(shape, Float32)
            before = cute.make_rmem_tensor((2,), Float32)
        for r in range(2):
            softmax.state.scale[r] = Float32(1.0)
        tile = replace(tile, softmax=softmax)
        return CodesTile(
            **{name: getattr(tile, name) for name in Tile.__dataclass_fields__},
            q_scale=of_rows(arguments.q_scale),
            q_bias=q_bias,
            k_scales=KeyScales.of(arguments, work.b, kv_head),
            lift=lift,
            sums=sums,
            before=before,
        )

    def begin(self, tile: Any, key_tile: Int32, masked: bool) -> CodesBegun:
        shape = tile.products.scores.partition_shape_C((ROWS, self.config.tile_n))
        scores = found = cute.make_rmem_tensor(shape, Int32 if self.config.qk == "int8" else Float32)
        if self.config.qk == "int8":
            found = cute.make_rmem_tensor(shape, Float32)
        kv_first = key_tile * self.config.tile_n
        early = tile.fragment.prepare(self.hooks, kv_first, masked) if self.hooks.start is None else None
        allowed = tile.fragment.allowed(self.hooks, kv_first) if masked else None
        scale = tile.k_scales.at(kv_first)
        return CodesBegun(scores, rows_and_columns(found), kv_first, early, allowed, found, scale)

    def modify(self, begun: Any, tile: Any, masked: bool) -> None:
        """Products of codes become what the softmax is taken of. It is told how, where no pair is masked and
        nothing else happens to scores: a scale that is NaN would make NaN of those that are masked."""
        integers = begun.numbers is not begun.scores
        for r in range(2):
            tile.lift[r] = tile.q_scale[r] * begun.scale
        if self.hooks.plain and not masked:
            if integers:
                begun.numbers.store(begun.scores.load().to(Float32))
            return
        given = rows_and_columns(begun.scores)
        for r in range(2):
            row = begun.grid[r, None]
            scores = given[r, None].load().to(Float32) * tile.lift[r]
            row.store(scores if tile.q_bias is None else scores + tile.q_bias[r])
            tile.lift[r] = Float32(1.0)
        if self.hooks.start is not None:
            tile.fragment.change(self.hooks, begun.grid, begun.kv_first, masked)
        else:
            tile.fragment.modify(self.hooks, begun.grid, begun.early)
        if masked:
            tile.fragment.mask(begun.grid, begun.kv_first, begun.allowed)

    def narrow(self, begun: Any, products: Products) -> None:
        if self.config.transposed:
            narrow_to_bytes(begun.grid, products.p)
        else:
            narrow(as_operand(begun.numbers), products.p)

    def storing_lane(self, lane: Int32, tile: Tile) -> Int32:
        """Beside a tile's output that is apart there is no room for addresses of the epilogue."""
        return computed_once(lane)

    def issue_values(self, tile: Any, v: cute.Tensor) -> None:
        multiply_part(tile, v)

    def take_values(self, tile: Any, v: cute.Tensor, v_state: Any) -> None:
        """The same; what was apart is added to the output of earlier tiles."""
        warpgroup.wait_group(0)
        if self.config.parts == 1:
            tile.pipes.v.consumer_release(v_state)
            add_up(tile)
        else:
            self.add_all(tile, v)
            tile.pipes.v.consumer_release(v_state)

    def weigh(
        self,
        tile: Any,
        grid: cute.Tensor,
        v: cute.Tensor,
        v_state: pipeline.PipelineState,
        is_finite: bool,
    ) -> None:
        """The same; a share of the scores under each product that is waited for."""
        parts, columns = self.config.parts, cute.size(grid, mode=[1])
        if parts == 1:
            super().weigh(tile, grid, v, v_state, is_finite)
            return
        count = max(n for n in range(1, parts + 1) if columns % (LEAST_SHARE * n) == 0)
        shares = cute.logical_divide(grid, (None, columns // count))

        def share(part: int) -> None:
            if part < count:
                mine = shares[None, (None, part)]
                tile.softmax.exponentiate(mine, is_finite=is_finite)
                compute_before(mine[1, columns // count - 1])

        warpgroup.wait_group(0)
        self.add_all(tile, v, share)
        tile.pipes.v.consumer_release(v_state)
        share(parts - 1)

    def raise_maxima(self, tile: Any, grid: cute.Tensor) -> Boolean:
        keep_scales(tile)
        return super().raise_maxima(tile, grid)

    def rescales(self, tile: Any) -> bool:
        return tile.sums is None

    @property
    def finite(self) -> bool:
        """False: scales may be anything."""
        return False

    def last(self, tile: Any, v_state: Any) -> None:
        keep_scales(tile)
        super().last(tile, v_state)

    def add_all(self, tile: CodesTile, v: cute.Tensor, meanwhile: Any = None) -> None:
        """Add the first columns of a tile's output, and multiply and add the others; `meanwhile` does what
        can be done under the product of each of these."""
        add_up(tile)
        for part in range(1, self.config.parts):
            multiply_part(tile, v, part)
            if meanwhile is not None:
                meanwhile(part - 1)
            warpgroup.wait_group(0)
            add_up(tile, part)
        # Nothing that follows has registers beside these.
        compute_before(tile.products.out[cute.size(tile.products.out) - 1])


def multiply_part(tile: CodesTile, v: cute.Tensor, part: int = 0) -> None:
    """Issue the product with a tile of values, added to that of those before; or apart, with a part of their
    columns."""
    products, apart = tile.products, tile.sums
    if apart is None:
        multiply(products.values, products.out, products.p, v, True)
        return
    # (columns of an instruction, columns, keys): the second mode counts parts
    one = cute.logical_divide(v, (None, 1, None))[None, (None, part), None]
    multiply(products.values, apart, products.p, one, False)


def keep_scales(tile: CodesTile) -> None:
    """Keep what the last raise of maxima multiplies the output by, which has not been yet."""
    if tile.before is not None:
        for r in range(2):
            tile.before[r] = tile.softmax.state.scale[r]


def add_up(tile: CodesTile, part: int = 0) -> None:
    """Add a part of the columns of a tile's output to that of those before."""
    if tile.sums is None or tile.before is None:
        return
    first = tile.products.out.iterator + part * cute.size(tile.sums)
    out = rows_and_columns(cute.make_tensor(first, tile.sums.layout))
    sums = rows_and_columns(tile.sums)
    for r in range(2):
        row = out[r, None]
        row.store(row.load() * tile.before[r] + sums[r, None].load())
