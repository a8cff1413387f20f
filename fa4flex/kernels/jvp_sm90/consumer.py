"""A consumer warpgroup: 64 query rows; products by wgmma, softmax and tangents of scores between them.

With S = q k^T, its tangent is T = tq k^T + q tk^T, which a score mod multiplies by its derivative. With P for
exp(S - m), P v adds to the output's accumulator, and (P T) v + P tv to its tangent's; what is pushed in a
row is the sum of P T. All three are rescaled with the maximum. T is counted from its mean over the first
tile.

Scores and operands of values would together take more registers than there are: a warpgroup waits for the
values of a tile before it multiplies the next one's scores. It takes turns with the other one, whose products
run under its softmax.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int32, const_expr, cute, pipeline, select_
from cutlass.cute.nvgpu import warpgroup

from fa4flex.kernels.common.arguments import Arguments
from fa4flex.kernels.common.barriers import Pipes
from fa4flex.kernels.common.fragment import as_operand, multiply, narrow, rows_and_columns
from fa4flex.kernels.common.hooks import Hooks
from fa4flex.kernels.common.keys import KeyTiles, RowEnds, row_ends, tile_at
from fa4flex.kernels.common.pointwise import terms_of
from fa4flex.kernels.common.products import ROWS, Mmas, zero_past
from fa4flex.kernels.common.softmax import OnlineSoftmax, rescale, running, take_maxima
from fa4flex.kernels.common.tile_scheduler import TileScheduler
from fa4flex.kernels.common.transfer import States
from fa4flex.kernels.common.work import Grid, Work
from fa4flex.kernels.fwd_sm90 import consumer as forward
from fa4flex.kernels.fwd_sm90.consumer import Mine
from fa4flex.kernels.fwd_sm90.roles import WRITTEN
from fa4flex.kernels.jvp_sm90.config import Config
from fa4flex.kernels.jvp_sm90.epilogue import Epilogue
from fa4flex.kernels.jvp_sm90.resources import Running, Shared, TangentProducts


@dataclass(frozen=True)
class Tile(forward.Tile):
    """Besides: tiles of keys, and terms of the score's derivative that are computed once per row."""

    products: TangentProducts
    keys: KeyTiles
    slopes: tuple[tuple[Any, ...], ...]


@dataclass(frozen=True)
class Scores:
    """Scores of one key tile and their tangents as accumulators; None: they have none."""

    scores: cute.Tensor
    tangents: cute.Tensor | None


class Consumer(forward.Consumer):
    config: Config

    def __init__(self, config: Config, hooks: Hooks, scheduler: TileScheduler) -> None:
        super().__init__(config, hooks, scheduler)
        self.epilogue = Epilogue(config, hooks)

    def walk(
        self, attend: Any, arguments: Arguments, grid: Grid, shared: Any, pipes: Pipes, states: States
    ) -> None:
        """Tile after tile of a block, whose place is in registers that all lanes have in common."""

        @cute.jit
        def attend_uniform(work: Work, phase: Int32, states: States) -> States:
            tile, h, b = (cute.arch.make_warp_uniform(x) for x in (work.tile, work.h, work.b))
            return attend(work._replace(tile=tile, h=h, b=b), phase, states)

        super().walk(attend_uniform, arguments, grid, shared, pipes, states)

    def running(self) -> Running:
        base = running(2)
        pushed, centre = (cute.make_rmem_tensor((2,), Float32) for _ in range(2))
        own = {"pushed": pushed, "centre": centre}
        return Running(base.largest, base.shift, base.ceiling, base.total, base.scale, **own)

    def products(  # type: ignore[override]
        self, mma: Mmas, shared: Shared, lane: Int32, group: Int32
    ) -> TangentProducts:
        base = super().products(mma, shared, lane, group)  # type: ignore[arg-type]
        scores, values = mma.scores, mma.values
        tq, tk, tv = shared.tq, shared.tk, shared.tv
        one, two = scores.get_slice(lane), values.get_slice(lane)
        return TangentProducts(
            base.scores,
            base.values,
            base.q,
            base.k,
            base.p,
            base.v,
            base.v_shared,
            base.out,
            None if tq is None else scores.make_fragment_A(one.partition_A(tq[None, None, group])),
            None if tk is None else scores.make_fragment_B(one.partition_B(tk)),
            None if tv is None else values.make_fragment_B(two.partition_B(tv)),
            tv,
            cute.make_rmem_tensor_like(base.p),
            cute.make_rmem_tensor_like(base.out),
        )

    def tile(self, mine: Mine, ends: RowEnds | None) -> Tile:
        base = super().tile(mine, ends)
        rows = base.fragment.rows
        places = (mine.at.but(q=q, q_float=x) for q, x in zip(rows.q, rows.q_float, strict=True))
        slopes = tuple(terms_of(self.hooks.slope, "row", place) for place in places)
        products: Any = mine.products
        kept = base.pipes, products, base.group, base.fragment, base.softmax, base.dropout
        return Tile(*kept, mine.keys, slopes)

    @cute.jit
    def attend(self, mine: cutlass.Constexpr[Mine], arguments: Arguments, states: States) -> States:
        """All keys of a warpgroup's rows, and what they give. The first tile of keys is one like the others:
        accumulators of zeros beside code of its own would spill."""
        pipes, keys = mine.pipes, mine.keys
        tile = self.tile(mine, row_ends(arguments.tables, mine.at, self.config.row_ends))
        tile.products.out.fill(0.0)
        tile.products.tout.fill(0.0)
        tile.softmax.state.clear()
        cute.arch.mbarrier_wait(pipes.q_full + mine.place, mine.phase)

        @cute.jit
        def steps(first: Any, end: Any, states: States, masked: cutlass.Constexpr[bool]) -> States:
            k_state, v_state = states
            for i in cutlass.range(first, end, unroll=1):
                k_state, v_state = self.step(tile, i, (k_state, v_state), masked)
            return k_state, v_state

        if const_expr(self.config.one_body):
            states = steps(Int32(0), keys.count, states, True)
        else:
            states = steps(Int32(0), keys.masked_count, states, True)
            states = steps(keys.masked_count, keys.count, states, False)
        self.release_queries(pipes, mine.place)
        k_state, v_state = states
        self.last(tile, v_state)
        self.epilogue.run(arguments, mine, tile, mine.lane)
        return k_state, v_state

    @cute.jit
    def step(
        self,
        tile: cutlass.Constexpr[Tile],
        i: Int32,
        states: States,
        masked: cutlass.Constexpr[bool],
    ) -> States:
        """Values of the key tile before, then scores and softmax of this one, number i of its query tile."""
        (k_state, v_state), pipes, products = states, tile.pipes, tile.products
        key_tile = tile_at(tile.keys, i)
        pipes.k.consumer_wait(k_state)
        if i > 0:
            pipes.v.consumer_wait(v_state)
        self.take_turn(tile.group)
        if i > 0:
            self.multiply_values(products, v_state.index)
            warpgroup.wait_group(0)
        begun = self.multiply_keys(products, k_state.index)
        self.give_turn(self.next(tile.group))
        if i > 0:
            pipes.v.consumer_release(v_state)
        warpgroup.wait_group(0)
        pipes.k.consumer_release(k_state)
        self.finish_scores(tile, begun, key_tile, masked)
        raised = take_maxima((tile.softmax,), (rows_and_columns(begun.scores),))
        if raised:
            self.rescale(tile)
        tile.softmax.exponentiate(rows_and_columns(begun.scores))
        if const_expr(masked and self.config.scores_move):  # noqa: SIM102  one is decided when compiled
            if i == 0:
                centre(begun, moments(tile), tile.softmax)
        self.operands(tile, begun)
        return self.following(tile, key_tile, k_state, masked)

    @cute.jit
    def last(self, tile: cutlass.Constexpr[Tile], v_state: pipeline.PipelineState) -> None:
        """Values of the last key tile."""
        tile.pipes.v.consumer_wait(v_state)
        self.multiply_values(tile.products, v_state.index)
        warpgroup.wait_group(0)
        tile.pipes.v.consumer_release(v_state)

    @cute.jit
    def clear_past_end(
        self, tile: cutlass.Constexpr[Tile], key_tile: Int32, v_state: pipeline.PipelineState
    ) -> None:
        """Zero the values of a masked tile past the end of a sequence, and their tangents. Dense tensors end
        where TMA fills in zeros itself."""
        if const_expr(self.config.lengths != "dense"):
            end = tile.fragment.at.kv_len - key_tile * self.config.tile_n
            if end < self.config.tile_n:
                tile.pipes.v.consumer_wait(v_state)
                zero_past(tile.products.v_shared[None, None, v_state.index], end, WRITTEN.at(tile.group))
                if const_expr(tile.products.tv_shared is not None):
                    zero_past(tile.products.tv_shared[None, None, v_state.index], end, WRITTEN.at(tile.group))

    # --- products ---------------------------------------------------------------------------------------

    def multiply_keys(self, products: TangentProducts, stage: Int32) -> Scores:
        """Issue the products of scores and of their tangents."""
        shape = products.scores.partition_shape_C((ROWS, self.config.tile_n))
        scores = cute.make_rmem_tensor(shape, Float32)
        k, depth = products.k[None, None, None, stage], self.config.depth
        multiply(products.scores, scores, products.q, k, False, depth)
        if not self.config.scores_move:
            return Scores(scores, None)
        tangents = cute.make_rmem_tensor(shape, Float32)
        if products.tq is not None:
            multiply(products.scores, tangents, products.tq, k, False, depth)
        if products.tk is not None:
            tk = products.tk[None, None, None, stage]
            multiply(products.scores, tangents, products.q, tk, products.tq is not None, depth)
        return Scores(scores, tangents)

    def multiply_values(self, products: TangentProducts, stage: Int32) -> None:
        """Issue the products that add to the output and its tangent."""
        v = products.v[None, None, None, stage]
        multiply(products.values, products.out, products.p, v, True)
        if self.config.scores_move:
            multiply(products.values, products.tout, products.pt, v, True)
        if products.tv is not None:
            multiply(products.values, products.tout, products.p, products.tv[None, None, None, stage], True)

    # --- between products -------------------------------------------------------------------------------

    def finish_scores(self, tile: Tile, begun: Scores, key_tile: Int32, masked: bool) -> None:
        """q.k becomes what the softmax is taken of, and its tangent that of the modified score: 0 where the
        mask hides a pair, whatever is there."""
        fragment, kv_first = tile.fragment, key_tile * self.config.tile_n
        scores = rows_and_columns(begun.scores)
        tangents = None if begun.tangents is None else rows_and_columns(begun.tangents)
        if tangents is None:
            fragment.change(self.hooks, scores, kv_first, masked)
        else:
            self.modify_both(tile, scores, tangents, kv_first, masked)
        if masked:
            fragment.mask(scores, kv_first, fragment.allowed(self.hooks, kv_first), tangents)

    def modify_both(
        self, tile: Tile, scores: cute.Tensor, tangents: cute.Tensor, kv_first: Int32, masked: bool
    ) -> None:
        """The modified scores of q.k, and their tangents. Of an element, both follow from the same q.k: what
        they share would else be kept for all elements."""
        fragment, scale = tile.fragment, tile.fragment.at.scale
        for r in range(cute.size(tangents, mode=[0])):
            row = tangents[r, None]
            row.store(row.load() * scale)
        slope, score = self.hooks.slope, self.hooks.score
        if slope is None:
            fragment.change(self.hooks, scores, kv_first, masked)
            return
        slopes = fragment.by_groups(slope, tangents, kv_first, masked, tile.slopes)
        if score is None:
            for r, c, at in slopes:
                tangents[r, c] = tangents[r, c] * slope.element(at.but(score=scores[r, c]))
            fragment.change(self.hooks, scores, kv_first, masked)
            return
        modified = fragment.by_groups(score, scores, kv_first, masked, fragment.rows.score)
        for (r, c, at), (_, _, here) in zip(slopes, modified, strict=True):
            raw = scores[r, c]
            tangents[r, c] = tangents[r, c] * slope.element(at.but(score=raw))
            scores[r, c] = score.element(here.but(score=raw))

    def rescale(self, tile: Tile) -> None:
        """Multiply what there is of earlier tiles by what the last raise of maxima says."""
        rescale(tile.products.out, (tile.softmax,))
        rescale(tile.products.tout, (tile.softmax,))
        state = moments(tile)
        for r in range(state.rows):
            state.pushed[r] = state.pushed[r] * state.scale[r]

    def operands(self, tile: Tile, begun: Scores) -> None:
        """Probabilities, up to the denominator, and these times tangents, as operands; part of what is
        pushed in each row."""
        if begun.tangents is not None:
            weigh(rows_and_columns(begun.scores), rows_and_columns(begun.tangents), moments(tile))
            narrow(as_operand(begun.tangents), tile.products.pt)
        narrow(as_operand(begun.scores), tile.products.p)


def moments(tile: Tile) -> Running:
    """Running numbers of a thread's rows."""
    state = tile.softmax.state
    assert isinstance(state, Running)
    return state


def centre(begun: Scores, state: Running, softmax: OnlineSoftmax) -> None:
    """Take the means of the first tile's tangents, from which all are counted: what rounding leaves of P T
    and of the output times its mean would not cancel where few keys have all the weight."""
    assert begun.tangents is not None
    p, tangents = rows_and_columns(begun.scores), rows_and_columns(begun.tangents)
    for r in range(state.rows):
        total = Float32(0.0)
        for c in range(cute.size(p, mode=[1])):
            total = total + p[r, c] * tangents[r, c]
        whole = softmax.reduce(state.total[r], operator.add)
        mean = softmax.reduce(total, operator.add) * cute.arch.rcp_approx(whole)
        state.centre[r] = select_(whole == 0.0, Float32(0.0), mean)


def weigh(p: cute.Tensor, tangents: cute.Tensor, state: Running) -> None:
    """Tangents (row, column) less the rows' centres become p times that, whose sums are added to what is
    pushed."""
    for r in range(cute.size(p, mode=[0])):
        chains = [state.pushed[r], Float32(0.0)]
        for c in range(cute.size(p, mode=[1])):
            weighed = p[r, c] * (tangents[r, c] - state.centre[r])
            tangents[r, c] = weighed
            chains[c % 2] = chains[c % 2] + weighed
        state.pushed[r] = chains[0] + chains[1]
