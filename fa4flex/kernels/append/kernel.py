"""Appends tokens to sequences whose keys lie in pages: a block writes one token's keys and values, further
blocks write the new lengths.

A token's place follows from the length of its sequence before the call. What has no place, as the table ends
or an entry is no page, is not written, and told by the next call.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
from cuda.bindings import driver as cuda
from cutlass import Boolean, Int32, Int64, const_expr, cute, select_

from fa4flex.kernels.append.config import Config
from fa4flex.kernels.append.heads import THREADS, Angles, Heads, Way
from fa4flex.kernels.common.arguments import named
from fa4flex.kernels.common.faults import report
from fa4flex.kernels.plan.arguments import APPEND

_Arguments: Any = named("AppendArguments", APPEND.read_by("kernel"))


class AppendArguments(_Arguments):
    """k, v, q [B, S, H, D], or packed [T, H, D]; k_pool, v_pool [pages, page_size, H, D]; rotated: as q.
    page_table [B, columns], paged_keys [B] and cu_seqlens_q [B + 1], seqused_q [B]: int32 or int64 of any
    stride; new_keys [B]: lengths after the call. cos, sin [positions, half]; axes [half], the axis of each
    angle; positions [axes, B, S], or packed [axes, T]; q_weight, k_weight [D], and eps, of norms; k_scales,
    v_scales [pages, page_size, H]. None where absent."""


class Token(NamedTuple):
    """A token of the call: its sequence, its number there, its place among all keys of that, and whether it
    takes part."""

    b: Int32
    i: Int32
    position: Int64
    exists: Boolean


class Slot(NamedTuple):
    """Slot that a token's keys and values go to, if they are written."""

    page: Int32
    number: Int32
    exists: Boolean


class Append:
    direction = "append"
    """Schema of its arguments."""

    def __init__(self, config: Config) -> None:
        self.config, self.heads = config, Heads(config)

    @cute.jit
    def __call__(self, arguments: AppendArguments, stream: cuda.CUstream) -> None:
        blocks = self.tokens(arguments) + cute.ceil_div(Int32(arguments.page_table.shape[0]), THREADS)
        self.device(arguments).launch(grid=[blocks, 1, 1], block=[THREADS, 1, 1], stream=stream)

    def tokens(self, arguments: AppendArguments) -> Int32:
        """Tokens of the call."""
        k = arguments.k
        return Int32(k.shape[0] if self.config.packed else k.shape[0] * k.shape[1])

    @cute.kernel
    def device(self, arguments: AppendArguments) -> None:
        number, thread = cute.arch.block_idx()[0], cute.arch.thread_idx()[0]
        tokens = self.tokens(arguments)
        if number < tokens:
            self.write(arguments, number, thread)
        else:
            b = (number - tokens) * THREADS + thread
            if b < arguments.page_table.shape[0]:
                self.lengthen(arguments, b)

    # --- a token --------------------------------------------------------------------------------------------

    @cute.jit
    def write(self, arguments: AppendArguments, number: Int32, thread: Int32) -> None:
        a = arguments
        token = self.token(a, number)
        slot = self.slot(a, token, thread)
        angles = self.angles(a, token, number, thread)
        k, v = (self.of_token(x, token, number) for x in (a.k, a.v))
        if slot.exists:
            k_to, v_to = (x[slot.page, slot.number, None, None] for x in (a.k_pool, a.v_pool))
            k_scales, v_scales = (
                None if x is None else x[slot.page, slot.number, None] for x in (a.k_scales, a.v_scales)
            )
            self.carry(Way(k, k_to, angles, a.k_weight, a.eps, k_scales), thread)
            self.carry(Way(v, v_to, scales=v_scales), thread)
        if const_expr(a.q is not None):
            q, rotated = (self.of_token(x, token, number) for x in (a.q, a.rotated))
            if token.exists:
                self.carry(Way(q, rotated, angles, a.q_weight, a.eps), thread)
            else:
                self.heads.move(q, rotated, thread)

    @cute.jit
    def carry(self, way: Way, thread: Int32) -> None:
        """Heads to their destination."""
        same = way.source.element_type is way.target.element_type
        if const_expr(same and way.angles is None and way.weight is None):
            self.heads.move(way.source, way.target, thread)
        else:
            self.heads.carry(way, thread)

    @cute.jit
    def angles(self, arguments: AppendArguments, token: Token, number: Int32, thread: Int32) -> Angles | None:
        """Angles of a token, the last ones where there are none for its position, which is told."""
        a = arguments
        if const_expr(a.cos is None):
            return None
        else:
            rows, position, places = a.cos.shape[0], token.position, None
            if const_expr(a.positions is not None):
                if const_expr(self.config.packed):
                    places = a.positions[None, number]
                else:
                    places = a.positions[None, token.b, token.i]
                position = Int64(places[0])
                if token.exists and thread < places.shape[0]:
                    self.check_position(a, Int64(places[thread]))
            elif token.exists and thread == 0:
                self.check_position(a, position)
            if const_expr(a.axes is not None):
                self.check_axes(a, places.shape[0], select_(number == 0, thread, a.axes.shape[0]))
            row = Int32(cutlass.max(cutlass.min(position, Int64(rows) - 1), Int64(0)))
            return Angles(a.cos, a.sin, row, a.axes, places)

    @cute.jit
    def check_position(self, arguments: AppendArguments, position: Int64) -> None:
        rows = Int64(arguments.cos.shape[0])
        if position < 0 or position >= rows:
            report(arguments.faults, "rotary beyond", (position, rows))

    @cute.jit
    def check_axes(self, arguments: AppendArguments, count: Int32, first: Int32) -> None:
        for i in cutlass.range(first, arguments.axes.shape[0], THREADS, unroll=1):
            axis = arguments.axes[i]
            if axis < 0 or axis >= count:
                report(arguments.faults, "rotary axis", (Int64(axis), Int64(count)))

    @cute.jit
    def token(self, arguments: AppendArguments, number: Int32) -> Token:
        """The token of a number among all of the call."""
        b, i, exists = Int32(0), number, Boolean(True)
        if const_expr(self.config.packed):
            cu = arguments.cu_seqlens_q
            low, high = Int32(0), Int32(arguments.page_table.shape[0])
            while high - low > 1:
                middle = (low + high) // 2
                behind = Int64(cu[middle]) > number
                high = select_(behind, middle, high)
                low = select_(behind, low, middle)
            start = Int64(cu[low])
            exists = (start >= 0) & (start <= number) & (Int64(cu[low + 1]) > number)
            b, i = low, number - select_(exists, Int32(start), number)
        else:
            length = arguments.k.shape[1]
            b, i = number // length, number % length
        if const_expr(arguments.seqused_q is not None):
            exists = exists & (i < Int64(arguments.seqused_q[b]))
        return Token(b, i, Int64(arguments.paged_keys[b]) + i, exists)

    @cute.jit
    def slot(self, arguments: AppendArguments, token: Token, thread: Int32) -> Slot:
        table, (pages, page_size) = arguments.page_table, arguments.k_pool.shape[:2]
        page, number, exists = Int32(0), Int32(0), Boolean(False)
        # A negative length is told of where lengths are written.
        if token.exists and token.position >= token.i and token.position < Int64(table.shape[1]) * page_size:
            column = Int32(token.position // page_size)
            given = Int64(table[token.b, column])
            exists = (given >= 0) & (given < pages)
            page = select_(exists, Int32(given), Int32(0))
            number = Int32(token.position % page_size)
            if not exists and thread == 0:
                report(arguments.faults, "page missing", (given, Int64(pages)))
        return Slot(page, number, exists)

    def of_token(self, tensor: cute.Tensor, token: Token, number: Int32) -> cute.Tensor:
        """The heads of a token [H, D]."""
        if self.config.packed:
            return tensor[number, None, None]
        return tensor[token.b, token.i, None, None]

    # --- a sequence -----------------------------------------------------------------------------------------

    @cute.jit
    def lengthen(self, arguments: AppendArguments, b: Int32) -> None:
        """Write the new length of a sequence, and tell what is wrong with its lengths. It counts tokens whose
        entry is no page: they are keys of zeros."""
        count = self.count(arguments, b)
        given = Int64(arguments.paged_keys[b])
        most = Int64(arguments.page_table.shape[1]) * arguments.k_pool.shape[1]
        new = given + count
        if given < 0:
            report(arguments.faults, "used_keys negative", (given,))
            new = Int64(0)
        elif new > most:
            report(arguments.faults, "append beyond", (given, Int64(count), most))
            new = most
        arguments.new_keys[b] = new.to(arguments.new_keys.element_type)

    @cute.jit
    def count(self, arguments: AppendArguments, b: Int32) -> Int64:
        """New tokens of a sequence, none past the last of the call."""
        a, length = arguments, Int64(0)
        if const_expr(self.config.packed):
            tokens, last = Int64(self.tokens(a)), Int32(a.page_table.shape[0]) - 1
            here, following = Int64(a.cu_seqlens_q[b]), Int64(a.cu_seqlens_q[b + 1])
            if b == 0 and here != 0:
                report(a.faults, "cu_seqlens_q starts", (here,))
            if following < here:
                report(a.faults, "cu_seqlens_q decreases", (Int64(b), here, following))
            if b == last and following != tokens:
                report(a.faults, "cu_seqlens_q ends", (following, tokens))
            start = cutlass.min(cutlass.max(here, Int64(0)), tokens)
            length = cutlass.max(cutlass.min(following, tokens) - start, Int64(0))
        else:
            length = Int64(a.k.shape[1])
        if const_expr(a.seqused_q is not None):
            used = Int64(a.seqused_q[b])
            if used < 0:
                report(a.faults, "seqused_q negative", (used,))
            if used > length:
                report(a.faults, "seqused_q beyond", (Int64(b), used, length))
            length = cutlass.max(cutlass.min(used, length), Int64(0))
        return length
