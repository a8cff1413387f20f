"""Lengths of ragged batches are looked at once per tensor and version: a kernel trusts them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fa4flex.contents import Guards, guards_of, hold
from fa4flex.primitives.varlen import Varlen

if TYPE_CHECKING:
    from fa4flex.runtime.cuda.call import Call

MOST_KNOWN = 1024
_fitting: dict[int, tuple[Guards, tuple[int, ...]]] = {}
"""Tensors whose values were found to fit, by id, and the extents they fit. Inference tensors as well, though
torch does not count their changes: to look at them at each call would be to wait for the device."""


def check_lengths(call: Call) -> None:
    """Raise InputError unless cu_seqlens and seqused stay within q and k.

    A tensor not seen before is copied to the host, except while a CUDA graph is captured.
    """
    shape = call.extents()
    extents = shape.batch, shape.q_len, shape.kv_len
    unknown = [x for x in call.lengths if x is not None and not _known(x, extents)]
    if not unknown or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        return
    varlen = Varlen(*call.lengths)
    if call.packed:
        varlen.check(shape.q_len, shape.kv_len)
    else:
        varlen.check_padded(*extents)
    if len(_fitting) > MOST_KNOWN:
        _fitting.clear()
    for x in unknown:
        _fitting[id(x)] = guards_of([x]), extents


def _known(x: Tensor, extents: tuple[int, ...]) -> bool:
    known = _fitting.get(id(x))
    return known is not None and known[1] == extents and hold(known[0], [x])
