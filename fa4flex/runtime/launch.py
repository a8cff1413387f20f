"""One call: known, launched, through flex_attention, or by an operator, with keys as they are or copied."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from fa4flex.codegen import blame
from fa4flex.codegen.build import Bound, Trace, bind, bind_output, joined
from fa4flex.errors import EarlierError, Fa4flexError, UnsupportedError
from fa4flex.primitives.precision import refuse_codes
from fa4flex.primitives.varlen import Varlen
from fa4flex.runtime import autocast, compute, ops
from fa4flex.runtime.call import Call, Results, Statistics, lengths_of, results_of
from fa4flex.runtime.checks import (
    check_dense,
    check_operand_devices,
    check_packed,
    check_tensors,
    check_variant,
    in_transforms,
)
from fa4flex.runtime.cuda import in_place
from fa4flex.runtime.cuda.backward import compile_ahead
from fa4flex.runtime.cuda.calls.launch_cache import MISSING
from fa4flex.runtime.cuda.engine import Engine
from fa4flex.runtime.flex.choice import by_flex
from fa4flex.runtime.gradients import Attend, Outline
from fa4flex.runtime.key_sources import Contiguous, KeySource
from fa4flex.runtime.programs import Published, publish
from fa4flex.runtime.recent import Recent
from fa4flex.torch_internals import (
    any_autocast,
    dispatch_modes,
    forward_ad,
    is_tracing,
    transform_level,
)
from fa4flex.variant import Variant, default_scale, settings_of


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

    __slots__ = ("codes", "output", "recent")

    def __init__(self) -> None:
        self.recent: Recent[Prepared] | None = None
        self.output: Trace | None = None
        """Trace of the output function, which is asked first."""
        self.codes: Caller | None = None
        """State of its calls of codes, which have a score mod of their own."""

    def of_codes(self) -> Caller:
        if self.codes is None:
            self.codes = Caller()
        return self.codes


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
        value = self.variant.scale
        # Heads without channels are refused where all else is checked.
        return default_scale(max(q.shape[-1], 1)) if value is None else value

    @property
    def sinks(self) -> Tensor | None:
        return self.variant.logits()


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


def bound_for(variant: Variant, caller: Caller | None = None) -> Bound:
    """Trace of the variant's output function, with what it captured as it is now."""
    assert variant.output_mod is not None
    if caller is None:
        return bind_output(variant.output_mod)
    bound = bind_output(variant.output_mod, caller.output)
    caller.output = bound.trace
    return bound


def with_output(variant: Variant, caller: Caller | None, bound: Bound) -> Calling:
    """One call of the variant's core and its output function, as it was bound, by one kernel."""
    core = calling(variant.core, caller)
    known = _joined.setdefault(core.prepared, weakref.WeakKeyDictionary())
    made = known.get(bound.trace)
    if made is None:
        trace, program = joined(core.bound.trace, bound.trace), core.prepared.program
        shared = publish(trace.facts, program.schedule, program.precision, program.backend)
        made = known[bound.trace] = trace, Prepared(shared)
    trace, prepared = made
    return Calling(variant.core, prepared, core.bound.beside(bound, trace))


_joined: weakref.WeakKeyDictionary[Prepared, weakref.WeakKeyDictionary[Trace, tuple[Trace, Prepared]]] = (
    weakref.WeakKeyDictionary()
)
"""Traces and programs of attention with an output function, by those of both."""


def fused(
    now: Calling, q: Tensor, kv: KeySource, varlen: Varlen | None, statistics: Statistics
) -> Results | None:
    """The results of attention with an output function by one kernel; None where none is for it, where
    gradients are wanted, and where something traces or intercepts operators."""
    if not isinstance(q, Tensor) or any_autocast() or not by_kernels(now.variant, q):
        return None
    kv.check(q, varlen, now.variant)
    if observed(q, kv.k, kv.v):
        return None
    tensors = q, kv.k, kv.v, now.sinks, *now.operands()
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        return None
    return _by_kernels(now, q, kv, varlen, statistics)


_prepared: weakref.WeakKeyDictionary[Trace, dict[Any, Prepared]] = weakref.WeakKeyDictionary()
"""Prepared programs of the traces that are kept, by settings."""


def _prepare(trace: Trace, variant: Variant) -> Prepared:
    known, settings = _prepared.setdefault(trace, {}), settings_of(variant)
    result = known.get(settings)
    if result is None:
        result = Prepared(publish(trace.facts, variant.schedule, variant.precision, variant.backend))
        result = known.setdefault(settings, result)  # another thread may have been faster
    return result


def attend(
    variant: Variant, q: Tensor, kv: KeySource, varlen: Varlen | None, statistics: Statistics
) -> Results:
    """One call of a variant from which nothing is kept."""
    now: Calling | None = None
    try:
        now = calling(variant, None)
        return run(now, q, kv, varlen, statistics)
    except EarlierError:  # it is none of this variant's
        raise
    except Fa4flexError as error:
        dress(error, variant, now)
        raise


def dress(error: Fa4flexError, variant: Variant, now: Calling | None) -> None:
    """Tell an error of a call of the variant, as far as it came, in the user's words."""
    if now is not None:
        dress_of(error, now.bound.trace)
    error.add_note(f"in Attention({variant!r})")


def dress_of(error: Fa4flexError, trace: Trace) -> None:
    """Tell an error of a trace's functions in the user's words."""
    origins = [traced.origins for traced in trace.functions]
    blame.dress(error, [operand.name for operand in trace.operands], trace.scalar_names, *origins)


def run(
    now: Calling,
    q: Tensor,
    kv: KeySource,
    varlen: Varlen | None = None,
    statistics: Statistics = ("lse",),
) -> Results:
    """One call of a program. See fa4flex.api.Attention for shapes and errors.

    At least those in `statistics` are computed.
    """
    if any_autocast() and autocast.active(q) and (cast := kv.cast(q)) is not None:
        with autocast.off(q):
            return run(now, *cast, varlen, statistics)
    if now.variant.precision.coded:
        refuse_codes(now.variant.precision, *_BELOW)
    kv.check(q, varlen, now.variant)
    seen = observed(q, kv.k, kv.v)
    if not seen:
        result = _path(now.variant, q)(now, q, kv, varlen, statistics)
        if result is not None:
            return result
    kv.fits(q, varlen)
    copy = kv.copied(q, varlen, now.variant, kernels=by_kernels(now.variant, q), eager=True)
    if copy is not None:
        return copy.results(run(now, copy.q, copy.kv, copy.varlen, statistics))
    call = call_of(now, q, kv, varlen, statistics)
    check_call(now, q, kv, varlen, call.operands)
    return _by_operator(now, call, seen)


_BELOW = "in a call that does not round q and k", "round them: fa4flex.quantize(q, k, v), and attn(codes)"


def _path(variant: Variant, q: Tensor) -> Callable[..., Results | None]:
    """Function that knows calls that look like earlier ones, or takes such keys as they are."""
    if by_kernels(variant, q):
        return _by_kernels
    return _known_to_flex if by_flex(variant.backend, q) else _single_queries


def call_of(now: Calling, q: Tensor, kv: KeySource, varlen: Varlen | None, statistics: Statistics) -> Call:
    """The call, with the captured tensors and numbers as they are now."""
    heads_first = now.variant.layout == "bhsd" and q.dim() == 4
    lengths, scalars = lengths_of(varlen, kv), now.bound.scalars
    return Call(q, kv, now.operands(), now.sinks, lengths, scalars, now.scale(q), heads_first, statistics)


def _by_operator(now: Calling, call: Call, seen: bool) -> Results:
    """The results of a checked call by flex_attention or an operator. For `seen`, see `observed`."""
    program, turned = now.prepared.program, call.turned()
    if seen and transformed(turned):
        from fa4flex.runtime import derived  # calls of kernels do not wait for it

        out, lse, _ = derived.attend(program, turned)
        return call.turn(out), lse, None
    seen = seen or not _own(call.sinks, *call.operands)
    if by_flex(now.variant.backend, call.q) and not seen and not call.empty:
        from fa4flex.runtime.flex.refusals import refuse_tensors  # calls of kernels do not wait for it

        refuse_tensors(call.operands, tuple(o.name for o in now.bound.trace.operands))
        out, *statistics = program.flex.attend(turned)
    else:
        out, *statistics = results_of(ops.attend(program, turned, seen), call.statistics)
    return call.turn(out), *statistics


def _by_kernels(
    now: Calling, q: Tensor, kv: KeySource, varlen: Varlen | None, statistics: Statistics
) -> Results | None:
    """The results by a kernel that reads the keys as they are: by the launch of a call that looked like this
    one and was checked, or by one that is made now. None where no kernel does, where there is nothing to
    launch, and where a subclass of tensors has its own idea of operators."""
    in_order = kv.in_place(q, varlen, now.variant)
    if in_order is None:
        return None
    call, contiguous = call_of(now, q, in_order, varlen, statistics), type(kv) is Contiguous
    if call.empty or not _own(call.sinks, *call.operands):
        return None
    if contiguous and q.ndim == call.kv.k.ndim > 2 and call.latent:
        return None  # the operator finds that values lie in keys
    trains = torch.is_grad_enabled() and call.wants_gradients
    if trains:
        if not contiguous:
            return None
        if "lse" not in statistics:
            call = call._replace(statistics=("lse", *statistics))
    engine, blocks = now.prepared.engine, now.variant.blocks
    ready = engine.find(call)
    new = ready is MISSING
    if new:
        kv.fits(q, varlen)
        check_call(now, q, kv, varlen, call.operands)
        if trains:
            compile_ahead(engine, call, "lse" in statistics)
        try:
            ready = engine.made(call) if contiguous else in_place.made(engine, call)
        except UnsupportedError:
            if engine.requires(call):
                raise
            # Its function is applied after it; dropout, other weights, latent rows and wide heads are
            # computed blockwise.
            ready = None
            engine.keep(call, None)
    elif blocks is not None:
        shape = call.extents()
        blocks.fits(shape.q_len, shape.kv_len, shape.batch, shape.heads)
    if ready is None:
        return None
    outline = Outline.of(now.prepared.program, ready, call) if trains else None
    if now.recent is not None and not new:
        now.recent.remember(call, kv, ready, outline, statistics)
    result: Results = ready(call) if outline is None else Attend.of(outline, call)
    return result


def _known_to_flex(
    now: Calling, q: Tensor, kv: KeySource, varlen: Varlen | None, statistics: Statistics
) -> Results | None:
    """The results of a call through torch's flex_attention that looks like an earlier one, which was checked;
    None for others."""
    packed = varlen is not None and varlen.packed
    if type(kv) is not Contiguous or (varlen is not None and varlen.checked):
        return None
    if not q.ndim == kv.k.ndim == kv.v.ndim == (3 if packed else 4):
        return None
    call = call_of(now, q, kv, varlen, statistics)
    if not _own(call.sinks, *call.operands):
        return None
    turned = call.turned()
    ready = now.prepared.program.flex.find(turned)
    if ready is None:
        return None
    if now.variant.blocks is not None:
        shape = turned.extents()
        now.variant.blocks.fits(shape.q_len, shape.kv_len, shape.batch, shape.heads)
    if now.recent is not None and varlen is None:
        return now.recent.attend(ready, call)
    out, *of_rows = ready(turned)
    return call.turn(out), *of_rows


_LSE = frozenset(("lse",))


def _single_queries(
    now: Calling, q: Tensor, kv: KeySource, varlen: Varlen | None, statistics: Statistics
) -> Results | None:
    """The results of sequences' single queries on a CPU, if the tensors fit and no gradient is wanted; None
    for others. To check one by one what these conditions imply would take longer than a short product."""
    from fa4flex.runtime import blockwise  # calls of kernels do not wait for it

    variant, qkv = now.variant, (q, kv.k, kv.v)
    if type(kv) is not Contiguous or varlen is not None or not _LSE.issuperset(statistics):
        return None
    if now.bound.trace.operands or variant.blocks is not None or variant.sinks is not None:
        return None
    if any(x.is_nested or x.layout is not torch.strided or x.ndim != 4 for x in qkv):
        return None
    call = call_of(now, q, kv, None, statistics)
    turned = call.turned()
    if not blockwise.fit(turned.q, turned.kv.k, turned.kv.v):
        return None
    if torch.is_grad_enabled() and call.wants_gradients:
        return None
    result = blockwise.single_queries(now.prepared.program, turned)
    return None if result is None else (call.turn(result[0]), result[1], None)


def check_call(
    now: Calling, q: Tensor, kv: KeySource, varlen: Varlen | None, operands: tuple[Tensor, ...]
) -> None:
    """Raise InputError or UnsupportedError unless queries, keys and captured tensors fit."""
    variant = now.variant
    qkv = kv.stand_in(q, variant.layout == "bhsd")
    check_tensors(*qkv)
    like_q = qkv[0]
    if varlen is not None and varlen.packed:
        check_variant(check_packed(*qkv, varlen), like_q, variant)
    else:
        sizes = check_dense(*qkv, variant.layout)
        check_variant(sizes, like_q, variant)
        if varlen is not None and not torch.compiler.is_compiling():
            varlen.check_padded(sizes.batch, sizes.q_len, sizes.kv_len)
    check_operand_devices(operands, tuple(o.name for o in now.bound.trace.operands), q)


# --- which way a call goes --------------------------------------------------------------------------------


_OWN_TYPES = (Tensor, Parameter)


def _plain(tensors: tuple[Tensor, ...]) -> bool:
    return all(type(x) in _OWN_TYPES for x in tensors)


def _own(*tensors: Tensor | None) -> bool:
    """True if none is of a subclass, such as DTensor, that has its own idea of operators."""
    return not tensors or all(x is None or type(x) in _OWN_TYPES for x in tensors)


def by_kernels(variant: Variant, q: Tensor) -> bool:
    """True if kernels compute for such queries, or a simulated GPU does."""
    return compute.on_gpu(q) and not by_flex(variant.backend, q)


def transformed(call: Call) -> bool:
    """True if a tensor that a call of contiguous keys can be differentiated by has a tangent, or is one of a
    transform of torch.func."""
    if torch.compiler.is_compiling():
        return False
    return in_transforms(call.q, call.kv.k, call.kv.v, call.sinks, *call.operands, *call.lengths)


def observed(*tensors: Tensor) -> bool:
    """True if something traces, transforms or intercepts operators."""
    return bool(
        not _plain(tensors)
        or torch.compiler.is_compiling()
        or dispatch_modes()
        or is_tracing()
        or transform_level() is not None
        or forward_ad._current_level >= 0
    )
