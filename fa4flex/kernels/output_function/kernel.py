"""Output functions of rows that lie in memory, and their gradients: a thread has one piece of a row.

    y = f(x, b, h, q, d)                        reads x, writes y
    dx = dout * df/dx, dt = dout * df/dt        reads x and dout, writes dx and gradients of captured tensors

Both are bound by memory. With N elements of 2 bytes and a gate of that shape and dtype, the forward pass
moves 6 N bytes (x, gate, y), the backward pass 10 N (x, dout, gate, dx, and the gate's gradient). A tensor of
rows adds a number or two per row; sums over rows add 8 bytes per row, which a second launch reads. Nothing is
added up in memory: gradients are the same run after run.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
from cuda.bindings import driver as cuda
from cutlass import Boolean, Float32, Int32, Int64, Uint32, const_expr, cute, range_constexpr, select_

from fa4flex.kernels.common.ahead import HeldTable
from fa4flex.kernels.common.arguments import named
from fa4flex.kernels.common.hooks import At, Hooks, Pointwise
from fa4flex.kernels.common.pointwise import terms_of
from fa4flex.kernels.output_function.config import THREADS, TOGETHER, Config, Piecewise, Sum
from fa4flex.kernels.plan.arguments import OUTPUT, OUTPUT_BACKWARD

_Arguments: Any = named("OutputArguments", OUTPUT.read_by("kernel"))
_Backward: Any = named("OutputBackwardArguments", OUTPUT_BACKWARD.read_by("kernel"))


class OutputArguments(_Arguments):
    """x, y [B, S, H, D], or packed [T, H, D]; any strides whose last is 1. cu_seqlens_q [B + 1],
    seqused_q [B], positions [S], the q_idx of each row: int32 or int64, or None. q_len, first_head,
    num_heads: what the function is told of the whole that these rows and heads are part of."""


class OutputBackwardArguments(_Backward):
    """The same without y; dout, dx as x; gradients, one per sum of the config."""


class Row(NamedTuple):
    """A row of the output. b, q: of its sequence; s, h: in the tensors, packed s is the token; head: its
    number in the whole; q_len: rows of its sequence. inside: the row is in the tensors; valid: and belongs to
    a sequence."""

    b: Int32
    q: Int32
    s: Int32
    h: Int32
    head: Int32
    q_len: Int32
    inside: Boolean
    valid: Boolean

    def of(self, x: cute.Tensor) -> cute.Tensor:
        """This row of [B, S, H, D], or of packed [T, H, D]."""
        if cute.rank(x) == 3:
            return x[self.s, self.h, None]
        return x[self.b, self.s, self.h, None]

    def along(self, index: tuple[str, ...], table: cute.Tensor) -> tuple[Any, ...]:
        """Place in a captured tensor whose dimensions have these names, within it; None for channels."""
        values = {"b": self.b, "h": self.head, "q": self.q}
        return tuple(
            None if name == "kv" else cutlass.max(cutlass.min(values[name], Int32(size) - 1), Int32(0))
            for name, size in zip(index, table.shape, strict=True)
        )


class Loaded(HeldTable):
    """A captured tensor of which the element is in a register."""

    def __init__(self, table: cute.Tensor, value: Any) -> None:
        self.shape, self.value = table.shape, value

    def element(self, load: Any) -> Any:
        return self.value


class _Elementwise:
    """Rows and elements of both passes."""

    def __init__(self, config: Config, hooks: Hooks) -> None:
        self.config, self.hooks = config, hooks

    def count(self, arguments: Any) -> Int32:
        """Rows of all heads."""
        total = Int32(1)
        for extent in arguments.x.shape[:-1]:
            total = total * Int32(extent)
        return total

    def grid(self, arguments: Any) -> list[Any]:
        return [cute.ceil_div(self.count(arguments), self.config.rows), 1, 1]

    # --- rows -------------------------------------------------------------------------------------------

    @cute.jit
    def row(self, arguments: Any, thread: Int32) -> Row:
        """The row of a thread. Threads past the last row repeat it: none may leave before rows are summed."""
        a, count = arguments, self.count(arguments)
        given = cute.arch.block_idx()[0] * self.config.rows + thread // self.config.lanes
        number = cutlass.min(given, count - 1)
        *batch, length, heads = a.x.shape[:-1]
        b = Int32(0)
        if const_expr(len(batch) > 0):
            b, number = _parted(number, Int32(length) * Int32(heads))
        if const_expr(self.config.heads_inner):
            s, h = _parted(number, Int32(heads))
        else:
            h, s = _parted(number, Int32(length))
        q, q_len, valid = s, Int32(a.q_len), Boolean(True)
        if const_expr(self.config.packed):
            b, q, q_len, valid = self.place(a, s)
        else:
            if const_expr(a.positions is not None):
                q = Int32(a.positions[s])
            if const_expr(a.seqused_q is not None):
                q_len = Int32(a.seqused_q[b])
                valid = q < q_len
        return Row(b, q, s, h, h + a.first_head, q_len, given < count, valid)

    @cute.jit
    def place(self, arguments: Any, token: Int32) -> tuple[Int32, Int32, Int32, Boolean]:
        """(sequence, row in it, its length, whether it has the token), some row of it where it has not."""
        cu = arguments.cu_seqlens_q
        low, high = Int32(0), Int32(cu.shape[0]) - 1
        while high - low > 1:
            middle = (low + high) // 2
            behind = Int64(cu[middle]) > Int64(token)
            high = select_(behind, middle, high)
            low = select_(behind, low, middle)
        start, end = Int64(cu[low]), Int64(cu[low + 1])
        length = end - start
        if const_expr(arguments.seqused_q is not None):
            length = Int64(arguments.seqused_q[low])
        q = Int64(token) - start
        valid = (q >= 0) & (q < length) & (Int64(token) < end)
        return low, Int32(select_(valid, Int32(q), Int32(0))), Int32(length), Boolean(valid)

    # --- elements ---------------------------------------------------------------------------------------

    def at(self, arguments: Any, row: Row) -> At:
        """The place of a row, with what hooks compute once for it."""
        a = arguments
        place = At(
            b=row.b,
            h=row.head,
            q_len=row.q_len,
            num_heads=Int32(a.num_heads),
            operands=tuple(a.operands),
            scalars=tuple(a.scalars),
            q=row.q,
            q_float=row.q.to(Float32),
        )
        return place if self.hooks.uniform is None else place.but(uniform=self.hooks.uniform(place))

    def read(self, arguments: Any, row: Row, piece: Int32) -> dict[int, cute.Tensor]:
        """Pieces of captured tensors, by slot."""
        return {
            one.slot: load(_line(arguments.operands[one.slot], one, row), piece)
            for one in self.config.piecewise
        }

    def elements(self, at: At, pieces: dict[int, cute.Tensor], first: Int32, x: cute.Tensor) -> list[At]:
        """Places of a piece's elements, whose channels begin with `first`."""
        first_float, across = first.to(Float32), first - at.q
        across_float, results = across.to(Float32), []
        for e in range(TOGETHER):
            operands = tuple(
                Loaded(table, pieces[slot][e]) if slot in pieces else table
                for slot, table in enumerate(at.operands)
            )
            results.append(
                at.but(
                    operands=operands,
                    kv=first + e,
                    kv_float=first_float + Float32(e),
                    kv_base=first,
                    kv_base_float=first_float,
                    kv_step=e,
                    offset=across + e,
                    offset_float=across_float + Float32(e),
                    offset_base=across,
                    offset_base_float=across_float,
                    offset_step=e,
                    score=x[e].to(Float32),
                )
            )
        return results

    def lane(self, thread: Int32) -> tuple[Int32, Boolean]:
        """(piece of a thread, whether it is its own): threads past the last repeat it."""
        lane = thread % self.config.lanes
        if self.config.pieces == self.config.lanes:
            return lane, Boolean(True)
        return cutlass.min(lane, Int32(self.config.pieces - 1)), lane < self.config.pieces


class OutputFunction(_Elementwise):
    direction = "output"
    """Schema of its arguments."""

    @cute.jit
    def __call__(self, arguments: OutputArguments, stream: cuda.CUstream) -> None:
        self.device(arguments).launch(grid=self.grid(arguments), block=[THREADS, 1, 1], stream=stream)

    @cute.kernel
    def device(self, arguments: OutputArguments) -> None:
        thread = cute.arch.thread_idx()[0]
        row = self.row(arguments, thread)
        piece, own = self.lane(thread)
        x = load(row.of(arguments.x), piece)
        pieces = self.read(arguments, row, piece)
        places = self.elements(self.at(arguments, row), pieces, piece * TOGETHER, x)
        assert self.hooks.output is not None
        values = values_of(self.hooks.output, places)
        y = cute.make_rmem_tensor((TOGETHER,), x.element_type)
        for e in range_constexpr(TOGETHER):
            y[e] = select_(row.valid, values[e].to(x.element_type), x[e])
        if row.inside & own:
            store(y, row.of(arguments.y), piece)


class OutputGradient(_Elementwise):
    direction = "output_backward"
    """Schema of its arguments."""

    @cute.jit
    def __call__(self, arguments: OutputBackwardArguments, stream: cuda.CUstream) -> None:
        self.device(arguments).launch(grid=self.grid(arguments), block=[THREADS, 1, 1], stream=stream)

    @cute.kernel
    def device(self, arguments: OutputBackwardArguments) -> None:
        thread = cute.arch.thread_idx()[0]
        row = self.row(arguments, thread)
        piece, own = self.lane(thread)
        x, dout = (load(row.of(one), piece) for one in (arguments.x, arguments.dout))
        pieces = self.read(arguments, row, piece)
        places = self.elements(self.at(arguments, row), pieces, piece * TOGETHER, x)
        upstream = [dout[e].to(Float32) for e in range(TOGETHER)]
        dx = self.products(upstream, self.hooks.slope, places, row.valid, x.element_type)
        if row.inside & own:
            store(dx, row.of(arguments.dx), piece)
        for number in range_constexpr(len(self.config.sums)):
            one, target = self.config.sums[number], arguments.gradients[number]
            dtype = target.element_type if one.adding == "each" else Float32
            part = self.products(upstream, self.hooks.derivatives[number], places, row.valid, dtype)
            if const_expr(one.adding == "each"):
                self.write(one, target, row, part, piece, own)
            else:
                self.write_sum(one, target, row, part, thread, own)

    def products(
        self, upstream: list[Float32], slope: Pointwise | None, places: list[At], valid: Boolean, dtype: Any
    ) -> cute.Tensor:
        """Products of gradients and derivatives, in a dtype; zeros of rows of no sequence."""
        slopes = [None] * TOGETHER if slope is None else values_of(slope, places)
        results = cute.make_rmem_tensor((TOGETHER,), dtype)
        for e in range(TOGETHER):
            value = upstream[e] if slopes[e] is None else upstream[e] * slopes[e]
            results[e] = Float32(select_(valid, value, Float32(0.0))).to(dtype)
        return results

    @cute.jit
    def write(
        self,
        one: cutlass.Constexpr[Sum],
        target: cute.Tensor,
        row: Row,
        part: cute.Tensor,
        piece: Int32,
        own: Boolean,
    ) -> None:
        """Elements of a gradient that this row alone has."""
        if self.wanted(one, target, row) & own:
            if const_expr(one.pieces):
                store(part, target[row.along(one.index, target)], piece)
            else:
                line = target[row.along(one.index, target)]
                for e in range_constexpr(TOGETHER):
                    line[piece * TOGETHER + e] = part[e]

    @cute.jit
    def write_sum(
        self,
        one: cutlass.Constexpr[Sum],
        target: cute.Tensor,
        row: Row,
        part: cute.Tensor,
        thread: Int32,
        own: Boolean,
    ) -> None:
        """The sum over the channels of a row."""
        total = Float32(0.0)
        for e in range_constexpr(TOGETHER):
            total = total + part[e]
        total = Float32(select_(own, total, Float32(0.0)))
        total = cute.arch.warp_reduction_sum(total, threads_in_group=self.config.lanes)
        if thread % self.config.lanes == 0:
            if const_expr(one.adding == "row"):
                if self.wanted(one, target, row):
                    target[row.along(one.index, target)] = total.to(target.element_type)
            elif row.inside:
                if const_expr(self.config.packed):
                    target[row.s, row.h] = total
                else:
                    target[row.b, row.s, row.h] = total

    def wanted(self, one: Sum, target: cute.Tensor, row: Row) -> Boolean:
        """True if a row has a place in a gradient. That of a packed row of no sequence is nobody's."""
        result = row.inside
        if self.config.packed:
            result = result & row.valid
        return result & (row.q < target.shape[one.index.index("q")])


def _parted(x: Int32, by: Int32) -> tuple[Int32, Int32]:
    """x // by and x % by of numbers >= 0."""
    quotient = Int32(Uint32(x) // Uint32(by))
    return quotient, x - quotient * by


def _line(table: cute.Tensor, one: Piecewise, row: Row) -> cute.Tensor:
    return table[row.along(one.index, table)]


def values_of(pointwise: Pointwise, places: list[At]) -> list[Float32]:
    """Values of a hook at the elements of a piece, which have one row."""
    shared, results = terms_of(pointwise, "row", places[0]), []
    for place in places:
        faster = {name: terms_of(pointwise, name, place) for name in ("diagonal", "column")}
        place = place.but(row=shared, **faster)
        place = place.but(pair=terms_of(pointwise, "pair", place))
        results.append(Float32(pointwise.element(place)))
    return results


def load(row: cute.Tensor, piece: Int32) -> cute.Tensor:
    held = cute.make_rmem_tensor((TOGETHER,), row.element_type)
    cute.autovec_copy(cute.logical_divide(row, cute.make_layout(TOGETHER))[None, piece], held)
    return held


def store(held: cute.Tensor, row: cute.Tensor, piece: Int32) -> None:
    cute.autovec_copy(held, cute.logical_divide(row, cute.make_layout(TOGETHER))[None, piece])
