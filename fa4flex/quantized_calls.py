"""Calls of quantised queries, keys and values.

Where no kernel multiplies codes (quantized_kernels.py), what they stand for is computed: on a CPU in float32,
on a GPU by the kernels of 16 bits, whose rounding is finer than that of any code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from fa4flex import calls, quantized_kernels
from fa4flex.errors import InputError, UnsupportedError
from fa4flex.primitives.score import as_score
from fa4flex.quantization.quantized import Quantized
from fa4flex.runtime.call import Results, Statistics
from fa4flex.runtime.compute import on_gpu
from fa4flex.variant import Variant, changed, default_scale


def run(variant: Variant, codes: Quantized, statistics: Statistics) -> Results:
    """The results of `variant` for what the codes stand for. Raises InputError for another layout."""
    if variant.layout != codes.layout and not (codes.varlen is not None and codes.varlen.packed):
        raise InputError(
            f"codes of layout {codes.layout!r} in an attention of layout {variant.layout!r}",
            "one layout",
            f"fa4flex.quantize(..., layout={variant.layout!r})",
        )
    results = quantized_kernels.attend(variant, codes, statistics)
    if results is not None:
        return results
    exact, q = codes.dequantize(), codes.q
    kind = codes.dtype if on_gpu(q) else exact.q.dtype
    scale = default_scale(exact.q.shape[-1]) if variant.scale is None else variant.scale
    settings: dict[str, Any] = {"scale": scale}
    if exact.bias is not None:
        shift = as_score(_shift(exact.bias * scale, codes))
        settings["score_mod"] = shift if variant.score_mod is None else shift >> variant.score_mod
    same = tuple(x.to(kind) for x in exact[:3])
    out, *statistics_made = calls.run(
        changed(variant, **settings), None, (same[0], same[1], same[2]), codes.varlen, None, statistics
    )
    return out.to(variant.precision.output_dtype(codes.dtype)), *statistics_made


def _shift(bias: Tensor, codes: Quantized) -> Callable[..., Any]:
    """The score mod that adds a number of each query."""
    if codes.varlen is None or codes.varlen.cu_seqlens_q is None:

        def shift(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return score + bias[b, h, q_idx]

        return shift
    starts = codes.varlen.cu_seqlens_q

    def shift_packed(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + bias[h, starts[b] + q_idx]

    return shift_packed


def alone(codes: Quantized, **others: Any) -> None:
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
