"""From tensors to the operator: layouts, ragged and paged inputs, captured tensors, checks."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from fa4flex.codegen import blame
from fa4flex.codegen.build import Bound, Trace, bind
from fa4flex.contents import validating
from fa4flex.errors import EarlierError, Fa4flexError
from fa4flex.primitives.kv_scales import is_eight_bit
from fa4flex.primitives.paging import Paging
from fa4flex.primitives.varlen import Varlen
from fa4flex.runtime import autocast, direct, ops
from fa4flex.runtime.checks import (
    check_dense,
    check_descriptions,
    check_operand_devices,
    check_packed,
    check_paged,
    check_pages,
    check_tensors,
    check_transforms,
    check_variant,
    refuse_map,
)
from fa4flex.runtime.cuda import in_place
from fa4flex.runtime.cuda.backward import compile_ahead
from fa4flex.runtime.cuda.calls.call import (
    NO_LENGTHS,
    NO_SCALES,
    Call,
    Pages,
    Scales,
    SequenceLengths,
    Tensors,
)
from fa4flex.runtime.cuda.engine import Engine
from fa4flex.runtime.cuda.launches.ready import Results
from fa4flex.runtime.direct import Direct
from fa4flex.runtime.flex.choice import by_flex
from fa4flex.runtime.programs import Published, publish
from fa4flex.runtime.recent import Recent
from fa4flex.torch_internals import any_autocast, dispatch_modes, forward_ad, is_tracing, transform_level
from fa4flex.variant import Variant, default_scale, settings_of
from ptxsim.active import simulating

Statistics = tuple[str, ...]
"""Statistics wanted of "lse" and "max_scores", in this order."""


@dataclass(frozen=True, eq=False, repr=False)
class Prepared:
    """Program that calls of one trace share. It does not hold the trace."""

    program: Published

    @property
    def engine(self) -> Engine:
        """Engine that launches this program on NVIDIA GPUs."""
        return self.program.engine


class Caller:
    """State of one Attention between its calls. Threads call at the same time: what belongs together is one
    object, which is stored and read at once."""

    __slots__ = ("recent",)

    def __init__(self) -> None:
        self.recent: Recent[Prepared] | None = None


class Calling(NamedTuple):
    """One call: the variant, and its trace with the captured tensors and numbers as they are now."""

    variant: Variant
    prepared: Prepared
    bound: Bound
    recent: Recent[Prepared] | None = None

    def operands(self) -> tuple[Tensor, ...]:
        """The captured tensors by slot; those that the functions compute of others are computed now, at each
        call: there is no telling that they are as they were without reading all they are made of."""
        return self.bound.trace.tensors(self.bound.bases)

    def scale(self, q: Tensor) -> float:
        given = self.variant.scale
        return default_scale(q.shape[-1]) if given is None else given

    @property
    def sinks(self) -> Tensor | None:
        sinks = self.variant.sinks
        return None if sinks is None else sinks.now()


def calling(variant: Variant, caller: Caller | None) -> Calling:
    """Read what the variant captured, tracing its functions where no kept trace holds."""
    if caller is None:
        bound = bind(variant)
        return Calling(variant, _prepare(bound.trace, variant), bound)
    recent = caller.recent
    bound = bind(variant, None if recent is None else recent.trace)
    if recent is None or recent.trace is not bound.trace or recent.settings != settings_of(variant):
        prepared = _prepare(bound.trace, variant)
        caller.recent = recent = Recent(prepared, prepared.program, bound.trace, settings_of(variant))
    return Calling(variant, recent.prepared, bound, recent)


_prepared: weakref.WeakKeyDictionary[Trace, dict[Any, Prepared]] = weakref.WeakKeyDictionary()
"""Prepared programs of the traces that are kept, by settings."""


def _prepare(trace: Trace, variant: Variant) -> Prepared:
    known, settings = _prepared.setdefault(trace, {}), settings_of(variant)
    found = known.get(settings)
    if found is None:
        found = Prepared(publish(trace.facts, variant.schedule, variant.precision, variant.backend))
        found = known.setdefault(settings, found)  # another thread may have been faster
    return found


def attend(
    variant: Variant,
    qkv: tuple[Tensor, Tensor, Tensor],
    varlen: Varlen | None,
    paging: Paging | None,
    statistics: Statistics,
) -> Results:
    """One call of a variant from which nothing is kept."""
    now: Calling | None = None
    try:
        now = calling(variant, None)
        return run(now, *qkv, varlen, paging, statistics)
    except EarlierError:  # it is none of this variant's
        raise
    except Fa4flexError as error:
        dress(error, variant, now)
        raise


def dress(error: Fa4flexError, variant: Variant, now: Calling | None) -> None:
    """Tell an error of a call of the variant, as far as it came, in the user's words."""
    if now is not None:
        trace = now.bound.trace
        origins = [traced.origins for traced in (trace.score, trace.mask) if traced is not None]
        blame.dress(error, [operand.name for operand in trace.operands], trace.scalar_names, *origins)
    error.add_note(f"in Attention({variant!r})")


def run(
    now: Calling,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    varlen: Varlen | None = None,
    paging: Paging | None = None,
    statistics: Statistics = ("lse",),
) -> Results:
    """One call of a program. See fa4flex.api.Attention for shapes and errors.

    Of lse and max_scores at least those in `statistics` are computed.
    """
    if any_autocast() and autocast.active(q):
        q, k, v = autocast.cast(q, k, v)
        with autocast.off(q):
            return run(now, q, k, v, varlen, paging, statistics)
    prepared = now.prepared
    seen = observed(q, k, v)
    kernels = not seen and by_kernels(now.variant, q)
    if isinstance(paging, Paging) and kernels:
        found = in_pages(now, (q, k, v), varlen, paging, statistics)
        if found is not None:
            return found
    direct_path = paging is None and kernels
    call, trains = direct_call(now, (q, k, v), varlen, statistics) if direct_path else (None, False)
    if call is not None:
        found = _known_to_kernels(now, (q, k, v), call, trains, statistics)
        if found is not None:
            return found
    flex = not seen and not kernels and by_flex(now.variant.backend, q)
    if paging is None and not (seen or kernels):
        served = _known_to_flex if flex else _single_queries
        found = served(now, (q, k, v), varlen, statistics)
        if found is not None:
            return found
    check_tensors(q, k, v)
    check_descriptions(varlen, paging)
    if paging is not None:
        return _paged(now, (q, k, v), varlen, paging, statistics)
    swap = now.variant.layout == "bshd" and not (varlen is not None and varlen.packed)
    if swap:
        q, k, v = (x.transpose(1, 2) if x.ndim == 4 else x for x in (q, k, v))
    operands = call.operands if call is not None else now.operands()
    _check_call(now, (q, k, v), varlen, operands)
    if call is not None:
        if not trains:
            return prepared.engine.run(call)
        compile_ahead(prepared.engine, call, "lse" in statistics)
        return direct.attend(Direct.of(prepared.program, prepared.engine.run, call), call)
    given = Tensors(q, k, v, now.sinks, _lengths(varlen), operands)
    out, lse, largest = _without_launch(now, given, seen, flex, statistics)
    return out.transpose(1, 2) if swap else out, lse, largest


def _without_launch(now: Calling, given: Tensors, seen: bool, flex: bool, statistics: Statistics) -> Results:
    """The results of a checked call by flex_attention or an operator. For `seen`, see `observed`."""
    program, q = now.prepared.program, given.q
    numbers = program.numbers(now.bound.scalars, now.scale(q))
    seen = seen or not _own(given.sinks, *given.operands)
    if flex and not seen and not ops.empty(q, given.k):
        from fa4flex.runtime.flex.refusals import refuse_tensors  # calls of kernels do not wait for it

        refuse_tensors(given.operands, tuple(o.name for o in now.bound.trace.operands))
        return program.flex.attend(given, now.bound.scalars, numbers.scale, statistics)
    return ops.attend(program, given, numbers, "max_scores" in statistics, seen)[:3]


def _known_to_kernels(
    now: Calling, qkv: tuple[Tensor, Tensor, Tensor], call: Call, trains: bool, statistics: Statistics
) -> Results | None:
    """The results of a call of kernels that looks like an earlier one, which was checked; None for others."""
    ready = now.prepared.engine.find(call)
    if ready is None:
        return None
    if now.variant.blocks is not None:
        shape = call.extents()
        now.variant.blocks.fits(shape.q_len, shape.kv_len, shape.batch, shape.heads)
    again = Direct.of(now.prepared.program, ready, call) if trains else None
    if now.recent is not None:
        now.recent.remember(call, qkv, ready, again, statistics)
    return ready(call) if again is None else direct.attend(again, call)


def _known_to_flex(
    now: Calling, qkv: tuple[Tensor, Tensor, Tensor], varlen: Varlen | None, statistics: Statistics
) -> Results | None:
    """The results of a call through torch's flex_attention that looks like an earlier one, which was checked;
    None for others."""
    if varlen is not None and (not isinstance(varlen, Varlen) or varlen.checked):
        return None
    q, k, v = qkv
    swap = now.variant.layout == "bshd" and q.ndim == k.ndim == v.ndim == 4
    if swap:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    operands = now.operands()
    given = Tensors(q, k, v, now.sinks, _lengths(varlen), operands)
    if not _own(given.sinks, *operands):
        return None
    scalars, scale = now.bound.scalars, now.scale(q)
    ready = now.prepared.program.flex.find(given, scalars, scale, statistics)
    if ready is None:
        return None
    if now.variant.blocks is not None:
        now.variant.blocks.fits(q.shape[2], k.shape[2], q.shape[0], q.shape[1])
    repeats = None if now.recent is None or varlen is not None else now.recent.through_flex()
    if repeats is None:
        out, lse, largest = ready(given, scalars)
    else:
        out, lse, largest = repeats.attend(ready, qkv, given, scalars, scale, statistics)
    return out.transpose(1, 2) if swap else out, lse, largest


def _single_queries(
    now: Calling, qkv: tuple[Tensor, Tensor, Tensor], varlen: Varlen | None, statistics: Statistics
) -> Results | None:
    """The results of sequences' single queries on a CPU, if the tensors fit and no gradient is wanted; None
    for others. To check one by one what these conditions imply would take longer than a short product."""
    from fa4flex.runtime import blockwise  # calls of kernels do not wait for it

    variant, bound = now.variant, now.bound
    if varlen is not None or bound.trace.operands or variant.blocks is not None or variant.sinks is not None:
        return None
    if "max_scores" in statistics or any(x.is_nested or x.layout is not torch.strided for x in qkv):
        return None
    if variant.layout == "bshd":
        qkv = tuple([x.transpose(1, 2) if x.ndim == 4 else x for x in qkv])  # type: ignore[assignment]
    q, k, v = qkv
    if not blockwise.fit(q, k, v) or (torch.is_grad_enabled() and _wants_gradient(q, k, v)):
        return None
    program = now.prepared.program
    found = blockwise.single_queries(program, qkv, program.numbers(bound.scalars, now.scale(q)))
    if found is None:
        return None
    out, lse = found
    return out.transpose(1, 2) if variant.layout == "bshd" else out, lse, None


def _lengths(varlen: Varlen | None) -> SequenceLengths:
    if varlen is None:
        return NO_LENGTHS
    return SequenceLengths(varlen.cu_seqlens_q, varlen.cu_k, varlen.seqused_q, varlen.seqused_k)


def _check_call(
    now: Calling, qkv: tuple[Tensor, Tensor, Tensor], varlen: Varlen | None, operands: tuple[Tensor, ...]
) -> None:
    """Raise InputError or UnsupportedError unless tensors fit: q, k, v in bhsd, or packed."""
    q, variant = qkv[0], now.variant
    if varlen is not None and varlen.packed:
        check_variant(check_packed(*qkv, varlen), q, variant)
    else:
        sizes = check_dense(*qkv, variant.layout)
        check_variant(sizes, q, variant)
        if varlen is not None and not torch.compiler.is_compiling():
            varlen.check_padded(sizes.batch, sizes.q_len, sizes.kv_len)
    check_operand_devices(operands, tuple(o.name for o in now.bound.trace.operands), q)
    check_transforms(*qkv, *operands, now.sinks)


# --- on a GPU: past the operator --------------------------------------------------------------------------


_OWN_TYPES = (Tensor, Parameter)


def _plain(q: Tensor, k: Tensor, v: Tensor) -> bool:
    return type(q) in _OWN_TYPES and type(k) in _OWN_TYPES and type(v) in _OWN_TYPES


def _own(*tensors: Tensor | None) -> bool:
    """True if none is of a subclass, such as DTensor, that has its own idea of operators."""
    return not tensors or all(x is None or type(x) in _OWN_TYPES for x in tensors)


def on_gpu(q: Tensor) -> bool:
    """True if such queries are on a GPU, or a simulated one."""
    return q.is_cuda or simulating()


def by_kernels(variant: Variant, q: Tensor) -> bool:
    """True if kernels compute for such queries, or a simulated GPU does."""
    return on_gpu(q) and not by_flex(variant.backend, q)


def direct_call(
    now: Calling, qkv: tuple[Tensor, Tensor, Tensor], varlen: Varlen | None, statistics: Statistics
) -> tuple[Call | None, bool]:
    """The call on a GPU, and whether gradients of it are wanted, for which it has the log-sum-exp; None where
    there is nothing to launch, or a subclass of tensors has its own idea of operators."""
    q, k, v = qkv
    sinks, operands = now.sinks, now.operands()
    others = operands if sinks is None else (*operands, sinks)
    if ops.empty(q, k) or not _own(*others):
        return None, False
    trains = torch.is_grad_enabled() and _wants_gradient(q, k, v, *others)
    if trains and "lse" not in statistics:
        statistics = ("lse", *statistics)
    lengths = _lengths(varlen) if isinstance(varlen, Varlen) else NO_LENGTHS
    heads_first = now.variant.layout == "bhsd"
    rest = now.bound.scalars, now.scale(q), heads_first, statistics
    return Call(q, k, v, operands, sinks, lengths, *rest), trains


def _wants_gradient(*tensors: Tensor | None) -> bool:
    return any(x is not None and x.requires_grad for x in tensors)


def observed(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """True if something traces, transforms or intercepts operators."""
    return bool(
        not _plain(q, k, v)
        or torch.compiler.is_compiling()
        or dispatch_modes()
        or is_tracing()
        or transform_level() is not None
        or forward_ad._current_level >= 0
    )


def in_pages(
    now: Calling,
    qkv: tuple[Tensor, Tensor, Tensor],
    varlen: Varlen | None,
    paging: Paging,
    statistics: Statistics,
    scales: Scales = NO_SCALES,
) -> Results | None:
    """The results of a call with pages, read where they are; None where no kernel does that. The host reads
    no contents."""
    q, packed = qkv[0], isinstance(varlen, Varlen) and _of_queries(varlen)
    if now.variant.blocks is not None or not (packed or varlen is None):
        return None
    if [x.ndim for x in qkv] != [3 if packed else 4, 4, 4] or not all(x.numel() for x in qkv):
        return None
    if validating():
        check_paged(*qkv, paging, varlen)
        if varlen is not None:
            varlen.check_contents()
            varlen.check_tokens(q.shape[0], None)
    call, trains = direct_call(now, qkv, varlen, statistics)
    if call is None or trains:
        return None
    if packed:
        call = call._replace(lengths=call.lengths._replace(cu_seqlens_k=None), heads_first=False)
    elif call.heads_first:
        call = call._replace(k=call.k.transpose(1, 2), v=call.v.transpose(1, 2))
    call = call._replace(pages=Pages(paging.page_table, paging.seqused_k), scales=scales)
    return launched_in_place(now, call, qkv, lambda: _check_in_pages(now, call, qkv, varlen, paging))


def launched_in_place(
    now: Calling, call: Call, qkv: tuple[Tensor, Tensor, Tensor], check: Callable[[], None]
) -> Results | None:
    """The results of a call whose keys a kernel reads as they are; None where none does. For `check`, see
    in_place.ready_for."""
    ready = in_place.ready_for(now.prepared.engine, call, check)
    if ready is None:
        return None
    if now.recent is not None and call.scales is NO_SCALES:  # no way there compares scales
        now.recent.remember(call, qkv, ready, None, call.statistics)
    return ready(call)


def _of_queries(varlen: Varlen) -> bool:
    """True if these are lengths of packed queries, and of no keys."""
    return varlen.packed and varlen.cu_seqlens_k is None and varlen.seqused_k is None


def _check_in_pages(
    now: Calling,
    call: Call,
    qkv: tuple[Tensor, Tensor, Tensor],
    varlen: Varlen | None,
    paging: Paging,
) -> None:
    """Raise InputError or UnsupportedError unless the tensors fit, whatever their contents."""
    q, k_cache, v_cache = qkv
    check_pages(q, k_cache, v_cache, paging, varlen)
    # As if the keys of each sequence were all there, and of the dtype of q.
    like_q = is_eight_bit(k_cache, v_cache)
    one_key = [q.new_empty(1).expand(1, 1, *x.shape[2:]) if like_q else x[:1, :1] for x in (k_cache, v_cache)]
    if varlen is None:
        keys = paging.page_table.shape[1] * k_cache.shape[1]
        k, v = (x.expand(q.shape[0], keys, -1, -1).transpose(1, 2) for x in one_key)
        q = q if call.heads_first else q.transpose(1, 2)
    else:
        k, v = (x[0].expand(q.shape[0], -1, -1) for x in one_key)
    check_direct(now, call, (q, k, v), varlen)


def check_direct(now: Calling, call: Call, qkv: tuple[Tensor, Tensor, Tensor], varlen: Varlen | None) -> None:
    """Raise InputError or UnsupportedError unless a call may be launched: q, k, v in bhsd, or packed."""
    check_tensors(*qkv)
    _check_call(now, qkv, varlen, call.operands)


def _paged(
    now: Calling,
    qkv: tuple[Tensor, Tensor, Tensor],
    varlen: Varlen | None,
    paging: Paging,
    statistics: Statistics,
) -> Results:
    """Keys and values are gathered page by page into packed sequences; the rest is a ragged call.

    q [B, Hq, Sq, D] (or "bshd"), or packed [Tq, Hq, D] with varlen's cu_seqlens_q. Gathering needs the
    number of keys on the host, so this waits for the device.
    """
    q, k_cache, v_cache = qkv
    refuse_map(now.variant, "pages")
    check_paged(q, k_cache, v_cache, paging, varlen)
    k, cu_k = paging.gather(k_cache)
    v, _ = paging.gather(v_cache)
    if varlen is not None:
        ragged = Varlen(varlen.cu_seqlens_q, cu_k, varlen.seqused_q)
        return run(now, q, k, v, ragged, statistics=statistics)
    swapped = now.variant.layout == "bshd"
    rows = q if swapped else q.transpose(1, 2)  # [B, Sq, Hq, D]
    batch, q_len = rows.shape[:2]
    cu_q = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * q_len
    packed, *each = run(now, rows.flatten(0, 1), k, v, Varlen(cu_q, cu_k), statistics=statistics)
    out = packed.unflatten(0, (batch, q_len))
    lse, largest = (
        x.unflatten(1, (batch, q_len)).transpose(0, 1) if x is not None and x.ndim == 2 else x for x in each
    )
    return out if swapped else out.transpose(1, 2), lse, largest
