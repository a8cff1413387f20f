"""From tensors to the operator: layouts, ragged and paged inputs, captured tensors, checks."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fa4flex.codegen.build import Program
from fa4flex.primitives.paging import Paging
from fa4flex.primitives.varlen import Varlen
from fa4flex.runtime import ops
from fa4flex.runtime.checks import (
    check_dense,
    check_descriptions,
    check_operand_devices,
    check_packed,
    check_paged,
    check_tensors,
    check_transforms,
    check_variant,
)


@dataclass(frozen=True, eq=False, repr=False)
class Prepared:
    """A program that the operators know, with what every call of it passes."""

    program: Program
    key: str
    scalars: tuple[float, ...]
    names: tuple[str, ...]


def prepare(program: Program) -> Prepared:
    """Publish a program to the operators, once, before its first call."""
    variant = program.variant
    key = ops.publish(program.facts, variant.schedule, variant.precision)
    return Prepared(program, key, tuple(map(float, program.scalars)), tuple(o.name for o in program.operands))


@dataclass(frozen=True)
class Result:
    """out in q's layout; lse and max_scores [B, Hq, Sq], or [Hq, Tq] for packed queries."""

    out: Tensor
    lse: Tensor
    max_scores: Tensor


def run(
    prepared: Prepared,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    varlen: Varlen | None = None,
    paging: Paging | None = None,
) -> Result:
    """One call of a program. See fa4flex.api.Attention for shapes and errors."""
    check_tensors(q, k, v)
    check_descriptions(varlen, paging)
    if paging is not None:
        return _paged(prepared, q, (k, v), varlen, paging)
    if varlen is not None and varlen.packed:
        check_variant(check_packed(q, k, v, varlen), q, prepared.program.variant)
        return _operator(
            prepared, (q, k, v), (varlen.cu_seqlens_q, varlen.cu_k, varlen.seqused_q, varlen.seqused_k)
        )
    if prepared.program.variant.layout == "bshd":
        q, k, v = (x.transpose(1, 2) if x.ndim == 4 else x for x in (q, k, v))
    sizes = check_dense(q, k, v, prepared.program.variant)
    check_variant(sizes, q, prepared.program.variant)
    used: tuple[Tensor | None, Tensor | None] = (None, None)
    if varlen is not None:
        if not torch.compiler.is_compiling():
            varlen.check_padded(sizes.batch, sizes.q_len, sizes.kv_len)
        used = varlen.seqused_q, varlen.seqused_k
    result = _operator(prepared, (q, k, v), (None, None, *used))
    if prepared.program.variant.layout == "bshd":
        return Result(result.out.transpose(1, 2), result.lse, result.max_scores)
    return result


def _operator(
    prepared: Prepared, qkv: tuple[Tensor, Tensor, Tensor], lengths: tuple[Tensor | None, ...]
) -> Result:
    q, k, v = qkv
    program = prepared.program
    operands = program.tensors()
    check_operand_devices(operands, prepared.names, q)
    scale = 1 / math.sqrt(q.shape[-1]) if program.variant.scale is None else program.variant.scale
    sinks = None if program.variant.sinks is None else program.variant.sinks.logits
    check_transforms(q, k, v, *operands, sinks)
    found = ops.attention(q, k, v, operands, sinks, *lengths, prepared.key, prepared.scalars, scale)
    return Result(*found[:3])


def _paged(
    prepared: Prepared, q: Tensor, caches: tuple[Tensor, Tensor], varlen: Varlen | None, paging: Paging
) -> Result:
    """Keys and values are gathered page by page into packed sequences; the rest is a ragged call.

    q [B, Hq, Sq, D] (or "bshd"), or packed [Tq, Hq, D] with varlen's cu_seqlens_q.
    """
    check_paged(q, *caches, paging, varlen)
    k, cu_k = paging.gather(caches[0])
    v, _ = paging.gather(caches[1])
    if varlen is not None:
        ragged = Varlen(varlen.cu_seqlens_q, cu_k, varlen.seqused_q)
        return run(prepared, q, k, v, ragged)
    rows = q if prepared.program.variant.layout == "bshd" else q.transpose(1, 2)  # [B, Sq, Hq, D]
    batch, q_len = rows.shape[:2]
    cu_q = torch.arange(0, (batch + 1) * q_len, q_len, dtype=torch.int32, device=q.device)
    result = run(prepared, rows.flatten(0, 1), k, v, Varlen(cu_q, cu_k))
    out = result.out.unflatten(0, (batch, q_len))
    lse, largest = (x.unflatten(1, (batch, q_len)).transpose(0, 1) for x in (result.lse, result.max_scores))
    return Result(out if prepared.program.variant.layout == "bshd" else out.transpose(1, 2), lse, largest)
