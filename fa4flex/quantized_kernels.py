"""Calls of quantised queries, keys and values by kernels that multiply codes."""

from __future__ import annotations

from dataclasses import replace

import torch

from fa4flex.errors import EarlierError, Fa4flexError, UnsupportedError
from fa4flex.primitives.precision import of_numbers
from fa4flex.quantization.arrangement import Arrangement
from fa4flex.quantization.quantized import Quantized
from fa4flex.runtime import launch
from fa4flex.runtime.call import Call, Results, Statistics
from fa4flex.runtime.code_source import Coded
from fa4flex.runtime.cuda.calls.launch_cache import MISSING
from fa4flex.torch_internals import any_autocast
from fa4flex.variant import Variant, changed


def attend(variant: Variant, codes: Quantized, statistics: Statistics) -> Results | None:
    """The results of `variant` by a kernel that multiplies the codes; None where none does."""
    if not _may(variant, codes):
        return None
    kv = source_of(codes, variant.precision.promote)
    heads = 2 if codes.layout == "bshd" and codes.k.ndim == 4 else 1
    if kv.k.shape[heads] != kv.v.shape[heads]:
        return None
    if any_autocast() or launch.observed(codes.q, kv.k, kv.v):
        return None
    precision = of_numbers(variant.precision)
    precision = replace(precision, output=precision.output_dtype(codes.dtype))
    variant = changed(variant, precision=precision)
    now: launch.Calling | None = None
    try:
        now = launch.calling(variant, None)
        return _launched(now, launch.call_of(now, codes.q, kv, codes.varlen, statistics), codes)
    except EarlierError:  # it is none of this variant's
        raise
    except Fa4flexError as error:
        launch.dress(error, variant, now)
        raise


def _may(variant: Variant, codes: Quantized) -> bool:
    """True if kernels might compute the variant over such codes."""
    others = variant.normalizer, variant.dropout, variant.output_mod
    if torch.compiler.is_dynamo_compiling() or any(x is not None for x in others):
        return False
    if torch.is_grad_enabled() and codes.given is not None:
        return False
    by_tiles = codes.k_scales == "tile" and codes.v_scales == "channel" and codes.whole is None
    return by_tiles and launch.by_kernels(variant, codes.q)


def _launched(now: launch.Calling, call: Call, codes: Quantized) -> Results | None:
    """The results of a call; None where no kernel is for it, and where gradients are wanted."""
    if call.empty or (torch.is_grad_enabled() and call.wants_gradients):
        return None
    engine, blocks = now.prepared.engine, now.variant.blocks
    ready = engine.find(call)
    if ready is MISSING:
        launch.check_call(now, call.q, call.kv, codes.varlen, call.operands)
        try:
            ready = engine.made(call)
        except UnsupportedError:
            ready = None
            engine.keep(call, None)
    elif blocks is not None:
        shape = call.extents()
        blocks.fits(shape.q_len, shape.kv_len, shape.batch, shape.heads)
    if ready is None:
        return None
    results: Results = ready(call)
    return results


def source_of(codes: Quantized, promote: bool = True) -> Coded:
    """Keys and values of codes that have scales by token and by tile. float32 values become bfloat16, which
    products take, as they do where what codes stand for is computed."""
    place, columns, v = Arrangement(codes.layout, codes.varlen), None, codes.v
    if v.dtype == torch.float32:
        v = v.to(torch.bfloat16)
    first = place.of_keys(codes.k).first_tile.to(torch.int32) if place.packed else None
    if codes.v_scale is not None:
        columns = codes.v
        v = columns[..., : codes.k.shape[0 if place.packed else 2 if codes.layout == "bhsd" else 1]]
        if place.packed:
            v = v.permute(2, 0, 1)
        else:
            v = v.transpose(2, 3) if codes.layout == "bhsd" else v.permute(0, 3, 1, 2)
    scales = codes.q_scale, codes.k_scale, codes.v_scale
    return Coded(codes.k, v, columns, *scales, codes.q_bias, codes.v_offset, first, promote)
