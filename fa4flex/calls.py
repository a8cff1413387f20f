"""One call of a variant, eager or in code that torch.compile traces. Every error is dressed here, once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fa4flex import quantized_calls, quantized_kernels
from fa4flex.codegen.build import Bound
from fa4flex.default_device import on_the_host
from fa4flex.errors import EarlierError, Fa4flexError
from fa4flex.jagged import Jagged, is_jagged
from fa4flex.primitives.kv_scales import KVScales
from fa4flex.primitives.normalizer import check_statistics
from fa4flex.primitives.paging import Paging
from fa4flex.primitives.varlen import Varlen
from fa4flex.quantization.choice import Choice
from fa4flex.quantization.quantized import Quantized
from fa4flex.runtime import autocast, launch
from fa4flex.runtime.call import Results, Statistics
from fa4flex.runtime.checks import check_descriptions
from fa4flex.runtime.marks import mark
from fa4flex.runtime.sources import source_of
from fa4flex.torch_internals import function_modes, is_tracing
from fa4flex.variant import Variant, changed, listed_now, query_heads, resolved


def run(
    variant: Variant,
    caller: launch.Caller | None,
    qkv: tuple[Tensor, Tensor, Tensor],
    varlen: Varlen | None,
    paging: Paging | None,
    statistics: Statistics,
    scales: KVScales | None = None,
) -> Results:
    """The results of `variant` for q, k, v. See fa4flex.api.Attention for shapes and errors."""
    if variant.blocks is not None:
        variant = listed_now(variant)
    if variant.dropout is not None and isinstance(qkv[0], Tensor):
        variant = variant.seeded(qkv[0].device)
    if type(qkv[0]) is not Tensor and is_jagged(qkv[0]):
        call = Jagged.of(qkv, variant.layout, {"varlen": varlen, "paging": paging, "kv_scales": scales})
        return call.nested(run(variant, caller, call.qkv, call.varlen, None, statistics), statistics)
    if variant.precision.coded:
        return _of_rounded(variant, caller, qkv, varlen, paging, statistics, scales)
    if variant.blocks is not None and (varlen is not None or paging is not None):
        variant = in_pairs(variant, qkv[0], varlen, paging)
    if variant.normalizer is not None:
        variant = _normalized(variant, qkv[0], statistics)
    if variant.output_mod is not None:
        return _with_output(variant, caller, qkv, varlen, paging, statistics, scales)
    if torch.compiler.is_dynamo_compiling():
        from fa4flex.runtime import graphs

        q, k, v = qkv
        check_descriptions(varlen, paging)
        return graphs.run(variant, q, source_of(k, v, paging, scales), varlen, statistics)
    eager = _beside_modes if function_modes() else _run
    return eager(variant, caller, qkv, varlen, paging, statistics, scales)


def run_codes(
    variant: Variant, caller: launch.Caller | None, codes: Quantized | Choice, statistics: Statistics
) -> Results:
    """The results of `variant` for what codes stand for."""
    variant = listed_now(variant)
    if variant.dropout is not None:
        variant = variant.seeded(codes.q.device)
    if codes.varlen is not None:
        variant = in_pairs(variant, codes.q, codes.varlen, None)
    try:
        quantized_calls.check_codes(variant, codes)
        results = None
        if isinstance(codes, Quantized):
            results = quantized_kernels.attend(variant, codes, statistics)
        if results is not None:
            return results
        now = quantized_calls.decoded(variant, codes, statistics)
    except Fa4flexError as error:
        launch.dress(error, variant, None)
        raise
    kept = caller is not None and not torch.compiler.is_dynamo_compiling()
    inner = caller.of_codes() if kept else None  # type: ignore[union-attr]
    with autocast.off(codes.q):
        out, *more = run(now.variant, inner, now.qkv, codes.varlen, None, statistics)
    return out.to(now.dtype), *more


def _of_rounded(
    variant: Variant,
    caller: launch.Caller | None,
    qkv: tuple[Tensor, Tensor, Tensor],
    varlen: Varlen | None,
    paging: Paging | None,
    statistics: Statistics,
    scales: KVScales | None,
) -> Results:
    """The results for q, k and v rounded as the variant's precision says."""
    codes: Quantized | Choice
    try:
        if variant.precision.tolerance and paging is None and scales is None:
            codes = quantized_calls.choice_of(variant, qkv, varlen)
        else:
            codes = quantized_calls.coded(variant, qkv, varlen, paging, scales)
    except Fa4flexError as error:
        if not torch.compiler.is_dynamo_compiling():  # which knows no repr of a variant
            launch.dress(error, variant, None)
        raise
    return run_codes(variant, caller, codes, statistics)


def in_pairs(variant: Variant, q: Tensor, varlen: Varlen | None, paging: Paging | None) -> Variant:
    """The variant of a call whose sequences have lengths of their own and are packed or paged: its map is a
    mask over their indices. Others keep their map."""
    variant = listed_now(variant)
    packed = isinstance(varlen, Varlen) and varlen.packed
    if variant.blocks is None or not (packed or isinstance(paging, Paging)) or not isinstance(q, Tensor):
        return variant
    from fa4flex.primitives.ragged_maps import ragged

    try:
        q_len = 0 if packed or q.ndim != 4 else q.shape[2 if variant.layout == "bhsd" else 1]
        sizes = query_heads(variant, q), q_len
        mask = ragged(variant.blocks, variant.mask, (varlen, paging), sizes)
        return changed(variant, mask=mask, blocks=None)
    except Fa4flexError as error:
        launch.dress(error, variant, None)
        raise


def _normalized(variant: Variant, q: Tensor, statistics: Statistics) -> Variant:
    """The variant as what computes it knows it. Raises UnsupportedError for statistics that it has not."""
    try:
        check_statistics(variant, statistics)
        return resolved(variant, query_heads(variant, q), q) if isinstance(q, Tensor) else variant
    except Fa4flexError as error:
        launch.dress(error, variant, None)
        raise


def _run(
    variant: Variant,
    caller: launch.Caller | None,
    qkv: tuple[Tensor, Tensor, Tensor],
    varlen: Varlen | None,
    paging: Paging | None,
    statistics: Statistics,
    scales: KVScales | None,
) -> Results:
    now: launch.Calling | None = None
    try:
        recent = None if caller is None else caller.recent
        if recent is not None and not is_tracing():
            served = recent.serve(variant, qkv, varlen, paging, scales, statistics)
            if served is not None:
                return served
        q, k, v = qkv
        now = launch.calling(variant, caller)
        if varlen is not None or paging is not None:
            check_descriptions(varlen, paging)
        return launch.run(now, q, source_of(k, v, paging, scales), varlen, statistics)
    except EarlierError:  # it is none of this variant's
        raise
    except Fa4flexError as error:
        launch.dress(error, variant, now)
        raise


_beside_modes = on_the_host(_run)


# --- output functions ---------------------------------------------------------------------------------------


def _with_output(
    variant: Variant, caller: launch.Caller | None, qkv: tuple[Tensor, Tensor, Tensor], *rest: Any
) -> Results:
    """The results of a variant with an output function. rest: other arguments of `run`."""
    varlen = rest[0]
    if torch.compiler.is_dynamo_compiling():
        from fa4flex.runtime import graphs

        out, *statistics = run(variant.core, caller, qkv, *rest)
        return graphs.output(variant, out, varlen), *statistics
    bound = launch.bound_for(variant, caller)
    results = _fused(variant, caller, bound, qkv, *rest)
    if results is None:
        out, *statistics = run(variant.core, caller, qkv, *rest)
        results = _output_of(variant, bound, out, varlen), *statistics
    if results[1] is not None:
        mark(results[1], variant.output_mod)
    return results


@on_the_host
def _fused(
    variant: Variant,
    caller: launch.Caller | None,
    bound: Bound,
    qkv: tuple[Tensor, Tensor, Tensor],
    varlen: Varlen | None,
    paging: Paging | None,
    statistics: Statistics,
    scales: KVScales | None = None,
) -> Results | None:
    """The results by a kernel that applies the output function itself, if there is one for the call."""
    q, k, v = qkv
    if not isinstance(q, Tensor) or not launch.by_kernels(variant, q):
        return None
    now = launch.with_output(variant, caller, bound)
    try:
        if varlen is not None or paging is not None:
            check_descriptions(varlen, paging)
        return launch.fused(now, q, source_of(k, v, paging, scales), varlen, statistics)
    except EarlierError:
        raise
    except Fa4flexError as error:
        launch.dress(error, variant, now)
        raise


def _output_of(variant: Variant, bound: Bound, out: Tensor, varlen: Varlen | None) -> Tensor:
    from fa4flex.runtime import output

    try:
        return output.applied(variant, bound, out, output.Rows.of(varlen))
    except Fa4flexError as error:
        launch.dress_of(error, bound.trace)
        error.add_note(f"in Attention({variant!r})")
        raise


def output_of(variant: Variant, out: Tensor, varlen: Varlen | None) -> Tensor:
    """The variant's output function of an output in its layout."""
    if torch.compiler.is_dynamo_compiling():
        from fa4flex.runtime import graphs

        return graphs.output(variant, out, varlen)
    return _output_of(variant, launch.bound_for(variant), out, varlen)
