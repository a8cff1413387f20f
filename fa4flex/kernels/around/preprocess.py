"""Before a backward pass: what its main kernel needs of every row, and zeros for what it adds up.

delta = dLSE - rowsum(dO * O): with it dS = P * (dP + delta), since dO . O = sum over keys of P dP
(FlashAttention-2, Dao 2023, section 3.1; the first term is the gradient of the log-sum-exp). With this sign a
sum may start from it as it is. A gradient g of the entropy H adds -P g (log P + H): delta has -g H. Dropout's
factor of what is kept is taken into the log-sum-exp, and out of delta: see ColumnDropout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass
from cuda.bindings import driver as cuda
from cutlass import Float32, Int32, const_expr, cute, select_

from fa4flex.kernels.common.arguments import named
from fa4flex.kernels.common.backward import backwards, first_row, sequence_of_row, token_of
from fa4flex.kernels.common.dropout import changed
from fa4flex.kernels.common.softmax import LN_2, LOG2_E
from fa4flex.kernels.plan.arguments import BACKWARD

THREADS = 256
WIDE = 8
"""Elements of 16 bits that a thread loads at once."""

FOUR = 4
"""float32 that it stores at once."""


_Arguments: Any = named("PreprocessArguments", BACKWARD.read_by("preprocess"))


class PreprocessArguments(_Arguments):
    """out, dout [B, S, H, D]; lse, dlse, entropy, dentropy float32 [B, H, S]; lse2, delta, pulled float32 [B,
    H, R], R >= S, and dq_sum [B, H, R * head_dim]: see BackwardArguments. Packed: [T, H, D], [H, T], [H, R],
    [H, R * head_dim].
    cu_seqlens_q int32 [B + 1], seqused_q [B]."""


_WithSections: Any = named("SectionArguments", tuple(row.name for row in BACKWARD.rows))


class SectionArguments(_WithSections):
    """The same, and what tells sections of heads, where sums of the first section alone are cleared here."""


class Preprocess:
    """`width` is D: `lanes` threads next to each other take a row together. `config` is the main kernel's:
    tile_m, head_dim, and dq_order, in which the sums of a tile lie. first_heads: how many heads of queries
    the first section has, where that kernel clears the sums of all others. threshold: the slot of dropout's
    among captured numbers. summed: whether weights of a row have a sum; else nothing depends on delta, and dO
    and O are not read."""

    def __init__(
        self,
        width: int,
        config: Any,
        first_heads: Callable[[SectionArguments], Int32] | None = None,
        threshold: int | None = None,
        summed: bool = True,
    ) -> None:
        self.width = width
        self.config = config
        self.first_heads = first_heads
        self.threshold = threshold
        self.summed = summed
        self.lanes = 1
        while self.lanes * WIDE < width:
            self.lanes *= 2

    @cute.jit
    def __call__(self, arguments: PreprocessArguments | SectionArguments, stream: cuda.CUstream) -> None:
        *batch, heads, rows = arguments.delta.shape
        blocks = cute.ceil_div(rows, THREADS // self.lanes)
        grid = [blocks, heads, *batch] if len(batch) else [blocks, heads, 1]
        self.device(*self.read(arguments)).launch(grid=grid, block=[THREADS, 1, 1], stream=stream)

    def read(
        self, arguments: PreprocessArguments | SectionArguments
    ) -> tuple[PreprocessArguments, Int32 | None, Int32 | None]:
        """Parameters of the device function: arguments; heads whose sums it clears, if not all; and
        dropout's threshold."""
        heads = None if self.first_heads is None else self.first_heads(arguments)
        threshold = None if self.threshold is None else Int32(arguments.scalars[self.threshold])
        read = (getattr(arguments, name) for name in PreprocessArguments._fields)
        return PreprocessArguments(*read), heads, threshold

    @cute.kernel
    def device(
        self, arguments: PreprocessArguments, first_heads: Int32 | None, threshold: Int32 | None
    ) -> None:
        # The next kernel's blocks may take the places of these, and wait there until all have ended.
        cute.arch.griddepcontrol_launch_dependents()
        block, h, b = backwards()
        thread = cute.arch.thread_idx()[0]
        row = block * (THREADS // self.lanes) + thread // self.lanes
        lane = thread % self.lanes
        b, q, first, length = self.place(arguments, row, b, thread)
        q_len = length
        if const_expr(arguments.seqused_q is not None):
            q_len = cutlass.min(length, Int32(arguments.seqused_q[b]))
        total = Float32(0.0)
        if const_expr(self.summed):
            if q < q_len and lane * WIDE < self.width:
                out, dout = (token_of(x, b, first, q, h) for x in (arguments.out, arguments.dout))
                total = self.dot(out, dout, lane)
            total = cute.arch.warp_reduction_sum(total, threads_in_group=self.lanes)
        cleared = row < arguments.delta.shape[-1]
        if const_expr(first_heads is not None):
            cleared = cleared & (b * arguments.delta.shape[1] + h < first_heads)
            if row + lane == 0:
                arguments.cleared[b, h] = 0
        if cleared:
            self.clear(
                None if self.config.stores_dq else _of(arguments.dq_sum, b, h), row, row - q + length, lane
            )
        lses, lse2s, deltas = (_of(x, b, h) for x in (arguments.lse, arguments.lse2, arguments.delta))
        if lane == 0 and row < arguments.delta.shape[-1]:
            lse2, pulled = Float32.inf, Float32(0.0)
            if q < q_len:
                total = -total
                if const_expr(arguments.pulled is not None):
                    g = _of(arguments.dentropy, b, h)[first + q]
                    total = total - g * _of(arguments.entropy, b, h)[first + q]
                    pulled = g * LN_2
                if const_expr(arguments.dlse is not None):
                    total = total + _of(arguments.dlse, b, h)[first + q]
                lse = lses[first + q]
                # A row without keys has probabilities 0 whatever its scores are.
                lse2 = select_(lse == -Float32.inf, Float32.inf, lse * LOG2_E)
            if const_expr(threshold is not None):
                lse2, total = changed(lse2, total, threshold)
            lse2s[row] = lse2
            deltas[row] = total
            if const_expr(arguments.pulled is not None):
                _of(arguments.pulled, b, h)[row] = pulled

    @cute.jit
    def clear(self, sums: cutlass.Constexpr[cute.Tensor | None], row: Int32, end: Int32, lane: Int32) -> None:
        """Clears as many of a head's sums of dQ as a row has, if there are sums. Those of rows from `end` on,
        to which a tile may be padded, stay as they are: nobody reads them."""
        if const_expr(sums is not None):
            config, order = self.config, self.config.dq_order
            zeros = cute.make_rmem_tensor((FOUR,), Float32)
            zeros.fill(0.0)
            fours, count = cute.logical_divide(sums, cute.make_layout(FOUR)), config.head_dim // FOUR
            tile = row // config.tile_m
            for first in cutlass.range_constexpr(0, count, self.lanes):
                number = row * count + first + lane
                place, column = order.place((number - tile * (config.tile_m * count)) * FOUR)
                wanted = (first + lane < count) & (tile * config.tile_m + place < end)
                if const_expr(config.columns is not None):
                    wanted = wanted & (column < config.columns)
                if wanted:
                    cute.autovec_copy(zeros, fours[None, number])

    def place(
        self, arguments: PreprocessArguments, row: Int32, b: Int32, thread: Int32
    ) -> tuple[Int32, Int32, Int32, Int32]:
        """(sequence, row within it, its first token, its length) of a row of the statistics."""
        q, first, length = row, Int32(0), Int32(arguments.out.shape[1])
        if arguments.cu_seqlens_q is not None:
            cu = arguments.cu_seqlens_q
            # All rows of a warp are of one sequence.
            b = sequence_of_row(cute.arch.make_warp_uniform(row - thread % 32 // self.lanes), cu)
            q, first, length = row - first_row(cu, b), cu[b], cu[b + 1] - cu[b]
        return b, q, first, length

    def dot(self, x: cute.Tensor, y: cute.Tensor, lane: Int32) -> Float32:
        """Dot product of this lane's elements of two rows."""
        parts = [self.piece(one, lane) for one in (x, y)]
        total = Float32(0.0)
        for i in range(WIDE):
            total = total + parts[0][i].to(Float32) * parts[1][i].to(Float32)
        return total

    def piece(self, row: cute.Tensor, lane: Int32) -> Any:
        mine = cute.make_rmem_tensor((WIDE,), row.element_type)
        cute.autovec_copy(cute.logical_divide(row, cute.make_layout(WIDE))[None, lane], mine)
        return mine


def _of(statistic: cute.Tensor, b: Int32, h: Int32) -> cute.Tensor:
    """A head of [B, H, R], or of packed [H, R]."""
    return statistic[b, h, None] if cute.rank(statistic) == 3 else statistic[h, None]
