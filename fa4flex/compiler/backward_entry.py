"""The entry point of a backward pass: one host function that launches its three kernels one after another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cutlass import Float32, Int32, cute
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from fa4flex.codegen.plan.lengths import row_block
from fa4flex.compiler.forward_entry import (
    DTYPES,
    fake_all_lengths,
    fake_numbers,
    fake_operands,
    fake_plain,
    fake_tables,
    fake_wide,
    tuple_of,
)
from fa4flex.kernels.around.postprocess import Postprocess, PostprocessArguments
from fa4flex.kernels.around.preprocess import Preprocess, PreprocessArguments
from fa4flex.kernels.common.backward import BackwardArguments, Turns
from fa4flex.kernels.common.softmax import LOG2_E

if TYPE_CHECKING:
    from fa4flex.codegen.plan.problem import Problem
    from fa4flex.compiler.signature import Signature

ENTRY_ARGUMENTS = (
    "q", "k", "v", "out", "dout", "lse", "dlse", "lse2", "delta", "dq_sum", "dq", "dk", "dv",
    "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "tables", "turns",
    "operands", "scalars", "scale", "gradients", "counter",
)  # fmt: skip


def entry_point(kernel: Any, problem: Problem, signature: Signature) -> Any:
    """Takes tensors [B, H, S, D], [B, S, H, D] or packed [T, H, D], in the order of ENTRY_ARGUMENTS, and a
    stream."""
    swap = signature.heads_first and problem.lengths != "packed"
    statistics, convert = Preprocess(problem.head_dim_v, kernel.config.head_dim), Postprocess(kernel.config)

    def logical(x: cute.Tensor) -> cute.Tensor:
        return cute.make_tensor(x.iterator, cute.select(x.layout, mode=[0, 2, 1, 3])) if swap else x

    @cute.jit
    def attention_backward(
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        out: cute.Tensor,
        dout: cute.Tensor,
        lse: cute.Tensor,
        dlse: Any,
        lse2: cute.Tensor,
        delta: cute.Tensor,
        dq_sum: cute.Tensor,
        dq: cute.Tensor,
        dk: cute.Tensor,
        dv: cute.Tensor,
        cu_seqlens_q: Any,
        cu_seqlens_k: Any,
        seqused_q: Any,
        seqused_k: Any,
        tables: Any,
        turns: Any,
        operands: Any,
        scalars: Any,
        scale: Float32,
        gradients: Any,
        counter: Any,
        stream: Any,
    ) -> None:
        q, k, v, out, dout = logical(q), logical(k), logical(v), logical(out), logical(dout)
        dq, dk, dv = logical(dq), logical(dk), logical(dv)
        rows = lse2, delta, dq_sum
        statistics(PreprocessArguments(out, dout, lse, dlse, *rows, cu_seqlens_q, seqused_q), stream)
        lengths = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
        rest = (*lengths, tables, turns, tuple_of(operands), tuple_of(scalars), scale, scale * LOG2_E)
        results = (dq_sum, dk, dv, *rest, tuple_of(gradients), counter)
        kernel(BackwardArguments(q, k, v, dout, lse2, delta, *results), stream)
        convert(PostprocessArguments(dq_sum, dq, cu_seqlens_q, scale), stream)

    return attention_backward


def fake_arguments(problem: Problem, signature: Signature, config: Any) -> list[Any]:
    """Stand-ins for the arguments of the entry point, its stream included, for a kernel of this Config."""
    batch, q_len, kv_len, q_heads, kv_heads, rows, sums = (cute.sym_int32() for _ in range(7))

    packed, masked = problem.lengths == "packed", problem.mask_form in ("spans", "tables")
    of_heads = (q_heads,) if packed else (batch, q_heads)

    def like(length: Any, heads: Any, width: int, dtype: str) -> Any:
        if packed:
            return fake_wide((length, heads, width), dtype)
        order = (heads, length) if signature.heads_first else (length, heads)
        return fake_wide((batch, *order, width), dtype)

    def padded(extent: Any) -> Any:
        steps = [cute.sym_int64(divisibility=row_block(config.tile_m)) for _ in of_heads]
        return make_fake_tensor(Float32, (*of_heads, extent), (*steps, 1), assumed_align=16)

    q, k = (q_len, q_heads, problem.head_dim), (kv_len, kv_heads, problem.head_dim)
    v, out = (kv_len, kv_heads, problem.head_dim_v), (q_len, q_heads, problem.head_dim_v)
    given = {
        "q": like(*q, problem.dtype),
        "k": like(*k, problem.dtype),
        "v": like(*v, problem.dtype),
        "out": like(*out, problem.out_dtype),
        "dout": like(*out, problem.dtype),
        "lse": fake_plain(Float32, (*of_heads, q_len)),
        "dlse": fake_plain(Float32, (*of_heads, q_len), False) if signature.dlse else None,
        "lse2": padded(rows),
        "delta": padded(rows),
        "dq_sum": padded(sums),
        "dq": like(*q, problem.dtype),
        "dk": like(*k, problem.dtype),
        "dv": like(*v, problem.dtype),
        **fake_all_lengths(problem, signature, cute.sym_int32() if packed else batch),
        "tables": fake_tables() if masked and not problem.deterministic else None,
        "turns": _fake_turns(of_heads, masked) if problem.deterministic else None,
        "operands": fake_operands(problem, signature) or None,
        "scalars": fake_numbers(problem, signature) or None,
        "scale": Float32(1.0),
        "gradients": fake_gradients(problem) or None,
        "counter": fake_plain(Int32, (2,)) if config.persistent else None,
    }
    return [*(given[name] for name in ENTRY_ARGUMENTS), make_fake_stream(use_tvm_ffi_env_stream=True)]


def fake_gradients(problem: Problem) -> tuple[Any, ...]:
    """[copies, shape...]; rows of 16-bit ones may be written by the copy engine."""
    found = []
    for slot, adding in problem.gradients:
        dtype, rank = problem.operands[slot]
        pairs = adding == "once in pairs"
        shape = tuple(cute.sym_int32() for _ in range(1 + max(rank, 1)))
        found.append(fake_plain(DTYPES[dtype] if pairs else Float32, shape, together=8 if pairs else 1))
    return tuple(found)


def _fake_turns(of_heads: tuple[Any, ...], masked: bool) -> Turns:
    done = fake_plain(Int32, (*of_heads, cute.sym_int32()))
    if not masked:
        return Turns(done, None, None, None)
    pointers = fake_plain(Int32, tuple(cute.sym_int32() for _ in range(3)))
    entries = cute.sym_int32()
    return Turns(done, pointers, *(fake_plain(Int32, (entries,)) for _ in range(2)))
