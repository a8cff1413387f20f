"""From tensors to the operator: layouts, ragged and paged inputs, captured tensors, checks."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from fa4flex.codegen.build import Bound, Trace, bind
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
from fa4flex.runtime.programs import Published, publish
from fa4flex.variant import Variant

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
    """What calls of one trace share, whatever tensors and numbers they captured."""

    trace: Trace
    program: Published
    recent: Recent = field(default_factory=Recent)

    @property
    def engine(self) -> Engine:
        """What launches this program on NVIDIA GPUs."""
        return self.program.engine

    @cached_property
    def memory(self) -> Remembered:
        """Captured tensors of calls on GPUs."""
        return Remembered(self.engine.watched.slots)

    def tensors(self, bases: tuple[Tensor, ...], on_gpu: bool) -> tuple[Tensor, ...]:
        """The captured tensors by slot. A GPU's mask is proved anew for a tensor that is computed anew."""
        if not self.trace.derived:
            return bases
        return self.memory.tensors(self.trace, bases) if on_gpu else self.trace.tensors(bases)


class Caller:
    """What one Attention keeps between its calls. It is asked first and found stale by the trace's guards."""

    def __init__(self) -> None:
        self.prepared: Prepared | None = None


class Calling(NamedTuple):
    """One call: the variant, and its trace with the captured tensors and numbers as they are now."""

    variant: Variant
    prepared: Prepared
    bound: Bound

    def scale(self, q: Tensor) -> float:
        given = self.variant.scale
        return 1 / math.sqrt(q.shape[-1]) if given is None else given

    @property
    def sinks(self) -> Tensor | None:
        sinks = self.variant.sinks
        return None if sinks is None else sinks.now()


def calling(variant: Variant, caller: Caller | None) -> Calling:
    """Read what the variant captured, tracing its functions where no kept trace holds."""
    last = None if caller is None else caller.prepared
    bound = bind(variant, None if last is None else last.trace)
    if last is None or last.trace is not bound.trace:
        program = publish(bound.trace.facts, variant.schedule, variant.precision)
        last = Prepared(bound.trace, program)
        if caller is not None:
            caller.prepared = last
    return Calling(variant, last, bound)


class Result(NamedTuple):
    """out in q's layout; lse and max_scores [B, Hq, Sq], or [Hq, Tq] for packed queries.

    lse is None, and max_scores None or an empty tensor, where they are computed on request and were not
    asked for.
    """

    out: Tensor
    lse: Tensor | None
    max_scores: Tensor | None


def run(
    now: Calling,
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
    prepared = now.prepared
    again = None if torch.compiler.is_compiling() else prepared.recent.again
    if (
        again is not None
        and varlen is None
        and paging is None
        and again.statistics == statistics
        and again.serves(now.bound, now.sinks)
        and again.fits(q, k, v)
    ):
        return Result(*again(q, k, v))
    call = None if paging is not None else _direct_call(now, (q, k, v), varlen, statistics)
    if call is not None:
        ready = prepared.engine.find(call)
        if ready is not None:  # a call that looks like this one was checked before
            _remember(now, call, ready)
            return Result(*ready(call))
    check_tensors(q, k, v)
    check_descriptions(varlen, paging)
    if paging is not None:
        return _paged(now, (q, k, v), varlen, paging, statistics)
    swap = now.variant.layout == "bshd" and not (varlen is not None and varlen.packed)
    if swap:
        q, k, v = (x.transpose(1, 2) if x.ndim == 4 else x for x in (q, k, v))
    _check_call(now, (q, k, v), varlen)
    operands = _operands(now, q) if call is None else call.operands
    check_operand_devices(operands, tuple(o.name for o in prepared.trace.operands), q)
    check_transforms(q, k, v, *operands, now.sinks)
    if call is not None:
        return Result(*prepared.engine.run(call))
    given = ops.Tensors(q, k, v, now.sinks, _lengths(varlen), operands)
    numbers = prepared.program.numbers(now.bound.scalars, now.scale(q))
    seen = _observed() or not _plain(q, k, v, *operands, *(() if given.sinks is None else (given.sinks,)))
    result = Result(*ops.attend(prepared.program, given, numbers, "max_scores" in statistics, seen)[:3])
    return Result(result.out.transpose(1, 2), result.lse, result.max_scores) if swap else result


def _operands(now: Calling, q: Tensor) -> tuple[Tensor, ...]:
    return now.prepared.tensors(now.bound.bases, (q.is_cuda or simulating()) and not _observed())


def _lengths(varlen: Varlen | None) -> Lengths:
    if varlen is None:
        return NO_LENGTHS
    return varlen.cu_seqlens_q, varlen.cu_k, varlen.seqused_q, varlen.seqused_k


def _check_call(now: Calling, qkv: tuple[Tensor, Tensor, Tensor], varlen: Varlen | None) -> None:
    """q, k, v in bhsd, or packed."""
    q, variant = qkv[0], now.variant
    if varlen is not None and varlen.packed:
        check_variant(check_packed(*qkv, varlen), q, variant)
    else:
        sizes = check_dense(*qkv, variant.layout)
        check_variant(sizes, q, variant)
        if varlen is not None and not torch.compiler.is_compiling():
            varlen.check_padded(sizes.batch, sizes.q_len, sizes.kv_len)


# --- on a GPU without gradients: past the operator --------------------------------------------------------


_OWN_TYPES = (Tensor, Parameter)


def _plain(*tensors: Tensor) -> bool:
    return all(type(x) in _OWN_TYPES for x in tensors)


def _remember(now: Calling, call: Call, ready: Ready) -> None:
    """For the next call. Two calls in a row must have looked alike: what is made here costs some time."""
    recent = now.prepared.recent
    if simulating():
        return
    if recent.ready is not ready:
        recent.ready, recent.again, recent.tries = ready, None, 0
    elif recent.tries < MOST_TRIES and not now.prepared.trace.derived:
        # Derived operands are computed from others, perhaps anew at each call.
        recent.tries += 1
        watched = tuple(call.operands[slot] for slot in sorted(now.prepared.engine.watched.slots))
        recent.again = Again.of(call, ready, watched)


def _direct_call(
    now: Calling, qkv: tuple[Tensor, Tensor, Tensor], varlen: Varlen | None, statistics: Statistics
) -> Call | None:
    """The call, if it needs nothing that the registered operator is for: gradients, tracing, modes."""
    q, k, v = qkv
    if not _plain(q, k, v) or _observed() or not (q.is_cuda or simulating()):
        return None
    sinks = now.sinks
    operands = now.prepared.tensors(now.bound.bases, True)
    if torch.is_grad_enabled() and _wants_gradient(q, k, v, *operands, sinks):
        return None
    lengths = _lengths(varlen) if isinstance(varlen, Varlen) else NO_LENGTHS
    heads_first = now.variant.layout == "bhsd"
    return Call(q, k, v, operands, sinks, lengths, now.bound.scalars, now.scale(q), heads_first, statistics)


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


def _paged(
    now: Calling,
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
        return run(now, q, k, v, ragged, statistics=statistics)
    swapped = now.variant.layout == "bshd"
    rows = q if swapped else q.transpose(1, 2)  # [B, Sq, Hq, D]
    batch, q_len = rows.shape[:2]
    cu_q = torch.arange(0, (batch + 1) * q_len, q_len, dtype=torch.int32, device=q.device)
    result = run(now, rows.flatten(0, 1), k, v, Varlen(cu_q, cu_k), statistics=statistics)
    out = result.out.unflatten(0, (batch, q_len))
    lse, largest = (
        x.unflatten(1, (batch, q_len)).transpose(0, 1) if x is not None and x.numel() else x
        for x in (result.lse, result.max_scores)
    )
    return Result(out if swapped else out.transpose(1, 2), lse, largest)
