"""Rows of queries as the kernel of masses multiplies them: scaled, rotated, in two codes for each channel,
with what these lack. A block has the rows of a head of keys; threads next to each other have a row."""

from __future__ import annotations

from typing import Any

import cutlass
from cuda.bindings import driver as cuda
from cutlass import Float32, Int32, cute

from fa4flex.kernels.common.arguments import named
from fa4flex.kernels.common.math import maximum, sqrt
from fa4flex.kernels.plan.arguments import CODED_QUERIES
from fa4flex.kernels.planes.config import GROUP, LARGEST, LOW, QueriesConfig
from fa4flex.kernels.quantize.config import LANE, lanes
from fa4flex.kernels.quantize.rows import (
    Row,
    factors_of,
    floats_of,
    greatest,
    greatest_of_lanes,
    numbers_of,
    rotated,
    word_of,
    words_of,
)

_Arguments: Any = named("CodedQueriesArguments", CODED_QUERIES.read_by("kernel"))

TINY = 2.0**-126


class CodedQueriesArguments(_Arguments):
    """q [B, Hq, Sq, D], signs float32 [D], offset float32 [B, Hkv, D], scale. queries int32 [B, Hkv,
    16 groups, D / 4] and numbers float32 [B, Hkv, rows, 4] are written: see masses.py."""


class Queries:
    direction = "coded_queries"
    """Schema of its arguments."""

    def __init__(self, config: QueriesConfig) -> None:
        self.config, self.lanes = config, lanes(config.width)

    @cute.jit
    def __call__(self, arguments: CodedQueriesArguments, stream: cuda.CUstream) -> None:
        batch, heads, _ = arguments.offset.shape
        self.device(arguments).launch(
            grid=[heads, batch, 1],
            block=[self.config.groups * GROUP * self.lanes, 1, 1],
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def device(self, arguments: CodedQueriesArguments) -> None:
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        a, thread = arguments, cute.arch.thread_idx()[0]
        h, b, _ = cute.arch.block_idx()
        row, lane = thread // self.lanes, thread % self.lanes
        q_len = Int32(a.q.shape[2])
        each = Int32(a.q.shape[1]) // Int32(a.offset.shape[1])
        exists = row < each * q_len
        # Rows that fill up the last group are the first one again, and see no keys.
        mine = Int32(0)
        if exists:
            mine = row
        q = a.q[b, h * each + mine // q_len, mine % q_len, None]
        self.write(a, (b, h, row, lane), q)

    @cute.jit
    def write(
        self, arguments: cutlass.Constexpr, at: tuple[Int32, Int32, Int32, Int32], q: cute.Tensor
    ) -> None:
        a, (b, h, row, lane), width = arguments, at, self.config.width
        x = [y * a.scale for y in numbers_of(words_of(q, lane, width), a.q.element_type)]
        factors = factors_of(floats_of(a.signs, lane, width), width)
        turned = rotated(x, factors, lane, width)
        unit = maximum(greatest_of_lanes(greatest(turned), self.lanes) / LARGEST, Float32(TINY))
        high = [rounded(y / unit) for y in turned]
        low = [rounded((y / unit - z) * LOW) for y, z in zip(turned, high, strict=True)]
        lost = [y - (z + u * (1 / LOW)) * unit for y, z, u in zip(turned, high, low, strict=True)]
        offset = floats_of(a.offset[b, h, None], lane, width)
        shift = self.sum(y * z for y, z in zip(turned, offset, strict=True))
        size, own = (sqrt(self.sum(y * y for y in z)) for z in (x, lost))
        place = 2 * GROUP * (row // GROUP) + row % GROUP
        if lane * LANE < width:
            store(a.queries[b, h, place, None], high, lane)
            store(a.queries[b, h, place + GROUP, None], low, lane)
        if lane == 0:
            for i, y in enumerate((unit, shift, size, own)):
                a.numbers[b, h, row, i] = y

    def sum(self, terms: Any) -> Float32:
        """Sum over all channels of a row. Threads past its end have zeros."""
        total = Float32(0.0)
        for x in terms:
            total = total + x
        return cute.arch.warp_reduction_sum(total, threads_in_group=self.lanes)


def rounded(x: Float32) -> Float32:
    """The whole number next to x."""
    found: Float32 = cute.arch.inline_ptx(
        "cvt.rni.f32.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x]
    )
    return found


def store(row: cute.Tensor, x: Row, lane: Int32) -> None:
    """A thread's codes in a row of words."""
    held = cute.make_rmem_tensor((LANE // 4,), Int32)
    for i in range(LANE // 4):
        held[i] = word_of(x[4 * i : 4 * i + 4], "int8")
    cute.autovec_copy(held, cute.logical_divide(row, cute.make_layout(LANE // 4))[None, lane])
