"""One call of a variant, eager or in code that torch.compile traces. Every error is dressed here, once."""

from __future__ import annotations

import torch
from torch import Tensor

from fa4flex.default_device import on_the_host
from fa4flex.errors import EarlierError, Fa4flexError
from fa4flex.primitives.kv_scales import KVScales
from fa4flex.primitives.paging import Paging
from fa4flex.primitives.varlen import Varlen
from fa4flex.runtime import eight_bit, launch
from fa4flex.torch_internals import is_tracing
from fa4flex.variant import Variant


@on_the_host
def run(
    variant: Variant,
    caller: launch.Caller | None,
    qkv: tuple[Tensor, Tensor, Tensor],
    varlen: Varlen | None,
    paging: Paging | None,
    statistics: launch.Statistics,
    scales: KVScales | None = None,
) -> launch.Results:
    """The results of `variant` for q, k, v. See fa4flex.api.Attention for shapes and errors."""
    if torch.compiler.is_dynamo_compiling():
        from fa4flex.runtime import graphs

        if not eight_bit.concerns(*qkv[1:], scales):
            return graphs.run(variant, qkv, varlen, paging, statistics)
        wide, dtype = eight_bit.read_as(variant, qkv, varlen, paging, scales)
        out, lse, largest = graphs.run(variant, wide, varlen, paging, statistics)
        return out.to(dtype), lse, largest
    now: launch.Calling | None = None
    try:
        recent = None if caller is None or scales is not None else caller.recent
        if recent is not None and not is_tracing():
            served = recent.serve(variant, qkv, varlen, paging, statistics)
            if served is not None:
                return served
        now = launch.calling(variant, caller)
        if eight_bit.concerns(*qkv[1:], scales):
            return eight_bit.attend(now, qkv, varlen, paging, scales, statistics)
        return launch.run(now, *qkv, varlen, paging, statistics)
    except EarlierError:  # it is none of this variant's
        raise
    except Fa4flexError as error:
        launch.dress(error, variant, now)
        raise
