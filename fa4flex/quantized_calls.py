"""Calls of quantised queries, keys and values, and calls that quantise them.

Where no kernel multiplies codes (quantized_kernels.py), what they stand for is computed: on a CPU in float32,
on a GPU by the kernels of 16 bits, whose rounding is finer than that of any code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fa4flex.codegen.analyze.lipschitz import lipschitz
from fa4flex.codegen.analyze.tables import Tables
from fa4flex.codegen.build import Program
from fa4flex.errors import InputError, UnsupportedError
from fa4flex.primitives.kv_scales import KVScales
from fa4flex.primitives.paging import Paging
from fa4flex.primitives.precision import Precision, of_numbers, rounding
from fa4flex.primitives.products import GIVEN
from fa4flex.primitives.score import as_score
from fa4flex.primitives.varlen import Varlen
from fa4flex.quantization.choice import Choice, Scores, chosen
from fa4flex.quantization.quantize import quantize
from fa4flex.quantization.quantized import Quantized
from fa4flex.runtime import autocast, compute, launch
from fa4flex.runtime.call import Statistics
from fa4flex.runtime.checks import check_descriptions, check_strided
from fa4flex.runtime.sharding import is_dtensor
from fa4flex.variant import Variant, changed, default_scale

QKV = tuple[Tensor, Tensor, Tensor]


class Decoded(NamedTuple):
    """A call of codes as one of the numbers that they stand for; `dtype` is that of its output."""

    variant: Variant
    qkv: QKV
    dtype: torch.dtype


def decoded(variant: Variant, codes: Quantized | Choice, statistics: Statistics) -> Decoded:
    """The call of what the codes stand for."""
    exact = codes.dequantize()
    scale = default_scale(exact.q.shape[-1]) if variant.scale is None else variant.scale
    settings: dict[str, Any] = {"scale": scale, "precision": of_numbers(variant.precision)}
    if exact.bias is not None and _sees_bias(variant, statistics):
        shift = as_score(_shift(exact.bias * scale, codes))
        settings["score_mod"] = shift if variant.score_mod is None else shift >> variant.score_mod
    kind = exact.q.dtype
    if compute.on_gpu(codes.q):
        kind = torch.bfloat16 if codes.dtype == torch.float32 else codes.dtype
    q, k, v = (x.to(kind) for x in exact[:3])
    return Decoded(changed(variant, **settings), (q, k, v), variant.precision.output_dtype(codes.dtype))


def _sees_bias(variant: Variant, statistics: Statistics) -> bool:
    """False where a number that is added to all scores of a query changes no result, and no gradient."""
    alone = variant.score_mod is None and variant.normalizer is None and not variant.has_sinks
    return bool(statistics) or not alone


def _shift(bias: Tensor, codes: Quantized | Choice) -> Callable[..., Any]:
    """The score mod that adds a number of each query."""
    if codes.varlen is None or codes.varlen.cu_seqlens_q is None:

        def shift(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return score + bias[b, h, q_idx]

        return shift
    starts = codes.varlen.cu_seqlens_q

    def shift_packed(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + bias[h, starts[b] + q_idx]

    return shift_packed


def coded(
    variant: Variant, qkv: QKV, varlen: Varlen | None, paging: Paging | None, scales: KVScales | None
) -> Quantized:
    """Codes of q, k and v as the variant's precision asks for. Raises UnsupportedError for caches."""
    precision, (q, k, v) = variant.precision, qkv
    check_descriptions(varlen, paging)
    check_strided(q, k, v)
    if any(map(is_dtensor, qkv)):
        raise UnsupportedError(
            f"{rounding(precision)} with DTensors, whose parts would have means of their own",
            "local tensors",
            "call with x.to_local() where batches or heads are spread, or leave qk out",
        )
    if paging is not None or scales is not None:
        raise UnsupportedError(
            f"{rounding(precision)} with {'paging' if paging is not None else 'kv_scales'}=",
            "contiguous, padded or packed q, k and v, which are rounded at each call",
            "a cache is rounded when it is written: keep it in float8_e4m3fn, with kv_scales= and without qk",
        )
    if any(x.dtype.itemsize == 1 for x in qkv):
        raise InputError(
            f"{rounding(precision)} with q {q.dtype}, k {k.dtype}, v {v.dtype}",
            "q, k and v of 16 or 32 bits, which are rounded at each call",
            "pass codes with their scales: attn(fa4flex.Descales(q=..., k=..., v=...).quantized(q, k, v))",
        )
    if q.dtype == torch.float64:
        raise UnsupportedError(
            f"{rounding(precision)} with float64 tensors",
            "q, k and v of bfloat16, float16 or float32",
            "cast them, or leave qk out: a variant computes float64 exactly",
        )
    formats: Any = {} if precision.qk == GIVEN else {"qk": precision.qk, "pv": precision.pv}
    return quantize(*autocast.cast(q, k, v), **formats, varlen=varlen, layout=variant.layout)


def choice_of(variant: Variant, qkv: QKV, varlen: Varlen | None, tolerance: float | None = None) -> Choice:
    """Formats of each head of q, k and v, within the tolerance of the variant's precision, or this one."""
    if tolerance is not None:
        variant = changed(variant, precision=Precision(tolerance=tolerance))
    codes = coded(variant, qkv, varlen, None, None)
    scores, reason = _scores(variant, qkv[0].shape[-1])
    return chosen(codes, autocast.cast(*qkv), variant.precision.tolerance, scores, reason)


def _scores(variant: Variant, width: int) -> tuple[Scores, str]:
    """Scores of the variant, and the reason that no head may be rounded; "" where one may."""
    scale = default_scale(width) if variant.scale is None else variant.scale
    slope, reason = _slope(variant)
    return Scores(scale, slope, variant.has_sinks), reason


def _slope(variant: Variant) -> tuple[float, str]:
    """Lipschitz constant of the score mod, and why no head may be rounded; "" where one may."""
    others = {
        "a normaliser": variant.normalizer, "dropout": variant.dropout,
        "an output function": variant.output_mod,
    }  # fmt: skip
    for name, one in others.items():
        if one is not None:
            return 0.0, f"no bound is known with {name}"
    if variant.score_mod is None:
        return 1.0, ""
    if torch.compiler.is_dynamo_compiling():
        raise UnsupportedError(
            f"Precision(tolerance={variant.precision.tolerance:g}) with a score mod, in a graph",
            "a variant without score mod, or a call that is not compiled, which finds how steep the mod is",
            "choose formats once, outside: choice = attn.choose(q, k, v); or set qk and pv",
        )
    plain = changed(variant, precision=of_numbers(variant.precision))
    program = Program(plain, launch.calling(plain, None).bound, None)
    slope = lipschitz(program.facts.score, Tables(program.captured()))
    return (0.0, "the score mod has jumps, or may be of any slope") if slope is None else (slope, "")


def alone(codes: Quantized | Choice, **others: Any) -> None:
    """Raise for arguments of a call that codes already say, or which are not supported beside them."""
    for name, value in others.items():
        if value is None:
            continue
        if name in ("k", "v", "varlen"):
            raise InputError(f"{name} beside {codes!r}", "the codes alone, which say it", f"leave {name} out")
        raise UnsupportedError(
            f"{name}= beside {codes!r}",
            "contiguous, padded or packed codes",
            "quantised caches are k and v of float8_e4m3fn, with kv_scales= and paging=",
        )


def check_codes(variant: Variant, codes: Quantized | Choice) -> None:
    """Raise InputError for codes of another layout, or of other formats than the variant's precision; for a
    choice whose bounds do not hold for the variant."""
    if variant.layout != codes.layout and not (codes.varlen is not None and codes.varlen.packed):
        raise InputError(
            f"codes of layout {codes.layout!r} in an attention of layout {variant.layout!r}",
            "one layout",
            f"fa4flex.quantize(..., layout={variant.layout!r})",
        )
    precision = variant.precision
    if isinstance(codes, Choice):
        if not torch.compiler.is_dynamo_compiling():
            _check_choice(variant, codes)
        return
    if precision.coded and (precision.qk, precision.pv) != (codes.qk, codes.pv):
        raise InputError(
            f"codes of qk={codes.qk!r}, pv={codes.pv!r} with {precision!r}",
            "codes in the formats of the precision, or a precision without formats",
            "leave qk and pv out of the precision: the codes say them",
        )


def _check_choice(variant: Variant, choice: Choice) -> None:
    """Raise InputError where errors may be larger than a choice says: its bounds are those of a variant."""
    precision, bounded = variant.precision, choice.scores
    if precision.coded and precision.tolerance != choice.tolerance:
        raise InputError(
            f"{choice!r} with {precision!r}",
            "a choice within the precision's tolerance, or a precision that rounds nothing",
            "leave qk, pv and tolerance out of the precision: the choice says them",
        )
    scores, reason = _scores(variant, choice.q.shape[-1])
    steepest = abs(bounded.scale) * bounded.lipschitz
    sinks = scores.sinks and not bounded.sinks
    if not choice.reason and (reason or sinks or abs(scores.scale) * scores.lipschitz > steepest):
        raise InputError(
            f"{choice!r}, whose bounds are those of scores of at most {steepest:g} times q.k"
            + f"{'' if bounded.sinks else ', without sinks'}",
            "the variant that made the choice, or one whose scores are no steeper",
            "choose again: attn.choose(q, k, v, tolerance=...)",
        )
