"""From tensors to the operator: layouts, ragged and paged inputs, captured tensors, checks."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

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
from fa4flex.runtime.cuda.again import Again
from fa4flex.runtime.cuda.call import NO_LENGTHS, Call, Lengths
from fa4flex.runtime.cuda.engine import Engine, Ready
from fa4flex.runtime.cuda.operands import Remembered
from fa4flex.runtime.cuda.simulated import simulating

Statistics = tuple[str, ...]
"""Which of "lse" and "max_scores", in this order."""


@dataclass(slots=True)
class Recent:
    """The last call on a GPU without gradients: what launched it, and what launches one just like it.

    `tries` counts how often the latter was made in vain: for tensors that torch does not compare at once, or
    for modes of torch that changed since.
    """

    ready: Ready | None = None
    again: Again | None = None
    tries: int = 0


MOST_TRIES = 4


@dataclass(frozen=True, eq=False, repr=False)
class Prepared:
    """A program that the operators know, with what every call of it passes."""

    program: Program
    key: str
    scalars: tuple[float, ...]
    names: tuple[str, ...]
    recent: Recent = field(default_factory=Recent)

    @cached_property
    def engine(self) -> Engine:
        """What launches this program on NVIDIA GPUs."""
        return ops.engine(self.key)

    @cached_property
    def memory(self) -> Remembered:
        """Captured tensors of calls on GPUs."""
        return Remembered(self.engine.watched.slots)

    def scale(self, q: Tensor) -> float:
        given = self.program.variant.scale
        return 1 / math.sqrt(q.shape[-1]) if given is None else given

    @property
    def sinks(self) -> Tensor | None:
        sinks = self.program.variant.sinks
        return None if sinks is None else sinks.logits


def prepare(program: Program) -> Prepared:
    """Publish a program to the operators, once, before its first call."""
    variant = program.variant
    key = ops.publish(program.facts, variant.schedule, variant.precision)
    return Prepared(program, key, tuple(map(float, program.scalars)), tuple(o.name for o in program.operands))


class Result(NamedTuple):
    """out in q's layout; lse and max_scores [B, Hq, Sq], or [Hq, Tq] for packed queries.

    lse is None, and max_scores None or an empty tensor, where they are computed on request and were not
    asked for.
    """

    out: Tensor
    lse: Tensor | None
    max_scores: Tensor | None


def run(
    prepared: Prepared,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    varlen: Varlen | None = None,
    paging: Paging | None = None,
    statistics: Statistics = ("lse",),
) -> Result:
    """One call of a program. See fa4flex.api.Attention for shapes and errors.

    Of lse and max_scores at least those in `statistics` are computed.
    """
    again = None if torch.compiler.is_compiling() else prepared.recent.again
    if (
        again is not None
        and varlen is None
        and paging is None
        and again.statistics == statistics
        and again.fits(q, k, v)
    ):
        return Result(*again(q, k, v))
    call = None if paging is not None else _direct_call(prepared, (q, k, v), varlen, statistics)
    if call is not None:
        ready = prepared.engine.find(call)
        if ready is not None:  # a call that looks like this one was checked before
            _remember(prepared, call, ready)
            return Result(*ready(call))
    check_tensors(q, k, v)
    check_descriptions(varlen, paging)
    if paging is not None:
        return _paged(prepared, (q, k, v), varlen, paging, statistics)
    swap = prepared.program.variant.layout == "bshd" and not (varlen is not None and varlen.packed)
    if swap:
        q, k, v = (x.transpose(1, 2) if x.ndim == 4 else x for x in (q, k, v))
    _check_call(prepared, (q, k, v), varlen)
    operands = _operands(prepared, q) if call is None else call.operands
    check_operand_devices(operands, prepared.names, q)
    check_transforms(q, k, v, *operands, prepared.sinks)
    if call is not None:
        return Result(*prepared.engine.run(call))
    result = _operator(prepared, (q, k, v), operands, _lengths(varlen), "max_scores" in statistics)
    return Result(result.out.transpose(1, 2), result.lse, result.max_scores) if swap else result


def _operands(prepared: Prepared, q: Tensor) -> tuple[Tensor, ...]:
    """On a GPU, a mask is proved anew for a tensor that is computed anew."""
    if (q.is_cuda or simulating()) and not _observed():
        return prepared.memory.tensors(prepared.program.operands)
    return prepared.program.tensors()


def _lengths(varlen: Varlen | None) -> Lengths:
    if varlen is None:
        return NO_LENGTHS
    return varlen.cu_seqlens_q, varlen.cu_k, varlen.seqused_q, varlen.seqused_k


def _check_call(prepared: Prepared, qkv: tuple[Tensor, Tensor, Tensor], varlen: Varlen | None) -> None:
    """q, k, v in bhsd, or packed."""
    q, variant = qkv[0], prepared.program.variant
    if varlen is not None and varlen.packed:
        check_variant(check_packed(*qkv, varlen), q, variant)
    else:
        sizes = check_dense(*qkv, variant)
        check_variant(sizes, q, variant)
        if varlen is not None and not torch.compiler.is_compiling():
            varlen.check_padded(sizes.batch, sizes.q_len, sizes.kv_len)


# --- on a GPU without gradients: past the operator --------------------------------------------------------


_OWN_TYPES = (Tensor, Parameter)


def _remember(prepared: Prepared, call: Call, ready: Ready) -> None:
    """For the next call. Two calls in a row must have looked alike: what is made here costs some time."""
    recent = prepared.recent
    if simulating():
        return
    if recent.ready is not ready:
        recent.ready, recent.again, recent.tries = ready, None, 0
    elif recent.tries < MOST_TRIES and all(x.base is not None for x in prepared.program.operands):
        # Operands without a base are computed from others, perhaps anew at each call.
        recent.tries += 1
        watched = tuple(call.operands[slot] for slot in sorted(prepared.engine.watched.slots))
        recent.again = Again.of(call, ready, watched)


def _direct_call(
    prepared: Prepared, qkv: tuple[Tensor, Tensor, Tensor], varlen: Varlen | None, statistics: Statistics
) -> Call | None:
    """The call, if it needs nothing that the registered operator is for: gradients, tracing, modes."""
    q, k, v = qkv
    own = type(q) in _OWN_TYPES and type(k) in _OWN_TYPES and type(v) in _OWN_TYPES
    if not own or _observed() or not (q.is_cuda or simulating()):
        return None
    program, sinks = prepared.program, prepared.sinks
    operands = prepared.memory.tensors(program.operands) if program.operands else ()
    if torch.is_grad_enabled() and _wants_gradient(q, k, v, *operands, sinks):
        return None
    lengths = _lengths(varlen) if isinstance(varlen, Varlen) else NO_LENGTHS
    heads_first = program.variant.layout == "bhsd"
    scalars, scale = prepared.scalars, prepared.scale(q)
    return Call(q, k, v, operands, sinks, lengths, scalars, scale, heads_first, statistics)


def _wants_gradient(*tensors: Tensor | None) -> bool:
    return any(x is not None and x.requires_grad for x in tensors)


def _observed() -> bool:
    """Whether something traces, transforms or intercepts operators."""
    return bool(
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.maybe_current_level() is not None
        or torch.autograd.forward_ad._current_level >= 0
    )


def _operator(
    prepared: Prepared,
    qkv: tuple[Tensor, Tensor, Tensor],
    operands: tuple[Tensor, ...],
    lengths: Lengths,
    max_scores: bool,
) -> Result:
    scale = prepared.scale(qkv[0])
    found = ops.attention(
        *qkv, operands, prepared.sinks, *lengths, prepared.key, prepared.scalars, scale, max_scores
    )
    return Result(*found[:3])


def _paged(
    prepared: Prepared,
    qkv: tuple[Tensor, Tensor, Tensor],
    varlen: Varlen | None,
    paging: Paging,
    statistics: Statistics,
) -> Result:
    """Keys and values are gathered page by page into packed sequences; the rest is a ragged call.

    q [B, Hq, Sq, D] (or "bshd"), or packed [Tq, Hq, D] with varlen's cu_seqlens_q. Gathering needs the
    number of keys on the host, so this waits for the device.
    """
    q, k_cache, v_cache = qkv
    check_paged(q, k_cache, v_cache, paging, varlen)
    k, cu_k = paging.gather(k_cache)
    v, _ = paging.gather(v_cache)
    if varlen is not None:
        ragged = Varlen(varlen.cu_seqlens_q, cu_k, varlen.seqused_q)
        return run(prepared, q, k, v, ragged, statistics=statistics)
    rows = q if prepared.program.variant.layout == "bshd" else q.transpose(1, 2)  # [B, Sq, Hq, D]
    batch, q_len = rows.shape[:2]
    cu_q = torch.arange(0, (batch + 1) * q_len, q_len, dtype=torch.int32, device=q.device)
    result = run(prepared, rows.flatten(0, 1), k, v, Varlen(cu_q, cu_k), statistics=statistics)
    out = result.out.unflatten(0, (batch, q_len))
    lse, largest = (
        x.unflatten(1, (batch, q_len)).transpose(0, 1) if x is not None and x.numel() else x
        for x in (result.lse, result.max_scores)
    )
    return Result(out if prepared.program.variant.layout == "bshd" else out.transpose(1, 2), lse, largest)
