"""The entry point that is compiled: its arguments, without any tensor, and how they reach the kernel.

Extents are 32-bit, strides 64-bit, so that offsets into large tensors do not wrap. Extents that must agree
are one symbol: the compiled function checks them, along with ranks, dtypes, devices and alignment.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from fa4flex.kernels.common.arguments import Arguments, Tables

if TYPE_CHECKING:
    from fa4flex.codegen.plan.problem import Problem
    from fa4flex.compiler.signature import Signature

ENTRY_ARGUMENTS = Arguments._fields

WIDE_COPY = 16
"""Bytes that base addresses and strides of q, k, v and out are multiples of, as TMA demands."""

DTYPES = {
    "bfloat16": cutlass.BFloat16,
    "float16": cutlass.Float16,
    "float32": cutlass.Float32,
    "float64": cutlass.Float64,
    "int8": cutlass.Int8,
    "int16": cutlass.Int16,
    "int32": cutlass.Int32,
    "int64": cutlass.Int64,
    "uint8": cutlass.Uint8,
    "uint16": cutlass.Uint16,
    "uint32": cutlass.Uint32,
    "uint64": cutlass.Uint64,
    "bool": cutlass.Uint8,  # torch stores a bool in a byte; kernels see the byte
}


def entry_point(kernel: Any, problem: Problem, signature: Signature) -> Any:
    """The host function around a kernel object: flat arguments in, `Arguments` in logical order out."""
    swap = signature.heads_first and problem.lengths != "packed"

    def logical(x: cute.Tensor) -> cute.Tensor:
        return cute.make_tensor(x.iterator, cute.select(x.layout, mode=[0, 2, 1, 3])) if swap else x

    @cute.jit
    def attention(
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        out: cute.Tensor,
        lse: Any,
        max_scores: Any,
        cu_seqlens_q: Any,
        cu_seqlens_k: Any,
        seqused_q: Any,
        seqused_k: Any,
        tables: Any,
        sinks: Any,
        operands: Any,
        scalars: Any,
        scale: Float32,
        max_q_len: Int32,
        counter: Any,
        order: Any,
        stream: Any,
    ) -> None:
        q, k, v, out = logical(q), logical(k), logical(v), logical(out)
        lengths = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
        rest = (tables, sinks, tuple_of(operands), tuple_of(scalars), scale, max_q_len, counter, order)
        kernel(Arguments(q, k, v, out, lse, max_scores, *lengths, *rest), stream)

    return attention


def tuple_of(given: tuple[Any, ...] | None) -> tuple[Any, ...]:
    """An empty tuple cannot be an argument: it travels as None."""
    return () if given is None else given


def fake_arguments(problem: Problem, signature: Signature, config: Any) -> list[Any]:
    """Stand-ins for the arguments of the entry point, its stream included, for a kernel of this Config."""
    batch, q_len, kv_len, q_heads, kv_heads = (cute.sym_int32() for _ in range(5))
    packed = problem.lengths == "packed"

    def rows(length: Any, heads: Any, width: int, dtype: str) -> Any:
        if packed:
            return fake_wide((length, heads, width), dtype)
        order = (heads, length) if signature.heads_first else (length, heads)
        return fake_wide((batch, *order, width), dtype)

    shape = (q_heads, q_len) if packed else (batch, q_heads, q_len)
    sequences = cute.sym_int32() if packed else batch
    given = {
        "q": rows(q_len, q_heads, problem.head_dim, problem.dtype),
        "k": rows(kv_len, kv_heads, problem.head_dim, problem.dtype),
        "v": rows(kv_len, kv_heads, problem.head_dim_v, problem.dtype),
        "out": rows(q_len, q_heads, problem.head_dim_v, problem.out_dtype),
        "lse": fake_plain(Float32, shape) if "lse" in problem.statistics else None,
        "max_scores": fake_plain(Float32, shape) if "max_scores" in problem.statistics else None,
        **fake_all_lengths(problem, signature, sequences),
        "tables": fake_tables() if problem.mask_form == "tables" else None,
        "sinks": fake_plain(Float32, (q_heads,)) if problem.sinks else None,
        "operands": fake_operands(problem, signature) or None,
        "scalars": fake_numbers(problem, signature) or None,
        "scale": Float32(1.0),
        "max_q_len": Int32(1),
        "counter": fake_plain(Int32, (2,)) if config.dynamic else None,
        "order": fake_plain(Int32, (cute.sym_int32(), 2)) if signature.ordered else None,
    }
    return [*(given[name] for name in ENTRY_ARGUMENTS), make_fake_stream(use_tvm_ffi_env_stream=True)]


def fake_wide(shape: tuple[Any, ...], dtype: str) -> Any:
    element = DTYPES[dtype]
    strides = [cute.sym_int64(divisibility=WIDE_COPY * 8 // element.width) for _ in shape[:-1]]
    return make_fake_tensor(element, shape, (*strides, 1), assumed_align=WIDE_COPY)


def fake_plain(element: Any, shape: tuple[Any, ...], unit: bool = True, together: int = 1) -> Any:
    """Any strides, the last of which is 1 if `unit`; aligned to `together` of its elements, as all its rows
    then are."""
    strides = [cute.sym_int64(divisibility=together) for _ in shape]
    if unit:
        strides[-1] = 1
    align = element.width // 8 * together
    return make_fake_tensor(element, shape, tuple(strides), assumed_align=align)


def fake_all_lengths(problem: Problem, signature: Signature, sequences: Any) -> dict[str, Any]:
    packed = problem.lengths == "packed"
    entries = cute.sym_int32()  # one more than there are sequences, which no symbol can say
    given = {
        "cu_seqlens_q": (packed, entries),
        "cu_seqlens_k": (packed, entries),
        "seqused_q": (signature.used_q, sequences),
        "seqused_k": (signature.used_k, sequences),
    }
    return {name: fake_lengths(extent) if there else None for name, (there, extent) in given.items()}


def fake_lengths(extent: Any) -> Any:
    return fake_plain(Int32, (extent,))


def fake_tables() -> Tables:
    maps = tuple(cute.sym_int32() for _ in range(3))
    pointers = [fake_plain(Int32, maps) for _ in range(2)]
    tiles = [fake_plain(Int32, (cute.sym_int32(),)) for _ in range(2)]
    return Tables(pointers[0], tiles[0], pointers[1], tiles[1])


def fake_operands(problem: Problem, signature: Signature) -> tuple[Any, ...]:
    nothing = (False,) * len(problem.operands)
    units, even = signature.unit_strides or nothing, signature.even_rows or nothing
    return tuple(
        fake_plain(DTYPES[dtype], tuple(cute.sym_int32() for _ in range(max(rank, 1))), unit, 1 + rows)
        for (dtype, rank), unit, rows in zip(problem.operands, units, even, strict=True)
    )


def fake_numbers(problem: Problem, signature: Signature) -> tuple[Any, ...]:
    return tuple(_number(kind, problem.wide_index) for kind in signature.scalars)


def _number(kind: str, wide: bool) -> Any:
    if kind == "float":
        return Float32(1.0)
    return Int64(1) if wide else Int32(1)
