"""After a backward pass that took groups of query heads in parts, or whose k and v differ in heads: dK and dV
of the parts, or of the KV heads that share a head, are added up."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
from cuda.bindings import driver as cuda
from cutlass import Float32, Int32, const_expr, cute

from fa4flex.kernels.common.arguments import named
from fa4flex.kernels.common.backward import token_of
from fa4flex.kernels.plan.arguments import BACKWARD
from fa4flex.primitives.heads import ALIKE, Shares

THREADS = 256
WIDE = 8
"""Elements of 16 bits that a thread reads at once."""

AT_ONCE = 4
"""Parts whose elements are on their way to a thread."""

_Arguments: Any = named("SumPartsArguments", BACKWARD.read_by("sum_parts"))


class SumPartsArguments(_Arguments):
    """dk, dv [B, S, H, D]; dk_parts, dv_parts [B, S, H * parts, D], those of a head one after another;
    packed: [T, H, D]. Where there is one part, these are dk and dv themselves. Where k and v differ in heads,
    dk and dv do, and so do their numbers of parts."""


class Place(NamedTuple):
    """A piece of WIDE elements of a token and head."""

    b: Int32
    token: Int32
    head: Int32
    piece: Int32


class SumParts:
    """Each thread has WIDE elements of dK or dV, and adds up parts in their order. Of k and v that differ in
    heads (`shares`), each has a launch of its own."""

    def __init__(self, shares: Shares = ALIKE) -> None:
        self.shares = shares

    @cute.jit
    def __call__(self, arguments: SumPartsArguments, stream: cuda.CUstream) -> None:
        if const_expr(self.shares != ALIKE):
            self.of_one(arguments.dk_parts, arguments.dk, stream)
            self.of_one(arguments.dv_parts, arguments.dv, stream)
        else:
            self.of_both(arguments, stream)

    @cute.jit
    def of_one(self, source: cute.Tensor, target: cute.Tensor, stream: cuda.CUstream) -> None:
        """dK or dV alone."""
        heads, width = target.shape[-2:]
        parts = Int32(source.shape[-2]) // Int32(heads)
        if parts > 1:
            packed = const_expr(cute.rank(target) == 3)
            tokens, batch = target.shape[0 if packed else 1], 1 if packed else target.shape[0]
            blocks = cute.ceil_div(tokens * (width // WIDE), THREADS)
            self.add_one(source, target, parts).launch(
                grid=[blocks, heads, batch], block=[THREADS, 1, 1], stream=stream, use_pdl=True
            )

    @cute.kernel
    def add_one(self, source: cute.Tensor, target: cute.Tensor, parts: Int32) -> None:
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        block, head, b = cute.arch.block_idx()
        number, pieces = block * THREADS + cute.arch.thread_idx()[0], target.shape[-1] // WIDE
        if number // pieces < target.shape[0 if cute.rank(target) == 3 else 1]:
            self.add(source, target, parts, Place(b, number // pieces, head, number % pieces))

    @cute.jit
    def of_both(self, arguments: SumPartsArguments, stream: cuda.CUstream) -> None:
        heads, width = arguments.dk.shape[-2:]
        parts = Int32(arguments.dk_parts.shape[-2]) // Int32(heads)
        if parts > 1:
            packed = const_expr(cute.rank(arguments.dk) == 3)
            tokens, batch = arguments.dk.shape[0 if packed else 1], 1 if packed else arguments.dk.shape[0]
            pieces = (width + arguments.dv.shape[-1]) // WIDE
            blocks = cute.ceil_div(tokens * pieces, THREADS)
            self.device(arguments, parts).launch(
                grid=[blocks, heads, batch], block=[THREADS, 1, 1], stream=stream, use_pdl=True
            )

    @cute.kernel
    def device(self, arguments: SumPartsArguments, parts: Int32) -> None:
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        block, head, b = cute.arch.block_idx()
        thread = cute.arch.thread_idx()[0]
        of_dk, of_dv = (x.shape[-1] // WIDE for x in (arguments.dk, arguments.dv))
        number = block * THREADS + thread
        token, piece = number // (of_dk + of_dv), number % (of_dk + of_dv)
        tokens = arguments.dk.shape[0 if cute.rank(arguments.dk) == 3 else 1]
        if token < tokens:
            if piece < of_dk:
                self.add(arguments.dk_parts, arguments.dk, parts, Place(b, token, head, piece))
            else:
                self.add(arguments.dv_parts, arguments.dv, parts, Place(b, token, head, piece - of_dk))

    @cute.jit
    def add(
        self,
        source: cute.Tensor,
        target: cute.Tensor,
        parts: Int32,
        place: Place,
    ) -> None:
        """A piece, in float32."""
        b, token, head, piece = place
        total = cute.make_rmem_tensor((WIDE,), Float32)
        total.fill(0.0)
        for part in cutlass.range(parts, unroll=AT_ONCE):
            taken = cute.make_rmem_tensor((WIDE,), source.element_type)
            row = token_of(source, b, Int32(0), token, head * parts + part)
            cute.autovec_copy(cute.logical_divide(row, cute.make_layout(WIDE))[None, piece], taken)
            for i in cutlass.range_constexpr(WIDE):
                total[i] = total[i] + taken[i].to(Float32)
        narrow = cute.make_rmem_tensor((WIDE,), target.element_type)
        narrow.store(total.load().to(target.element_type))
        row = token_of(target, b, Int32(0), token, head)
        cute.autovec_copy(narrow, cute.logical_divide(row, cute.make_layout(WIDE))[None, piece])
