"""Small tensors of indices that follow from numbers alone, kept between calls: no launch makes them again.

Nobody writes to them, and none is returned to a user. They are kept by device and stream, on which they are
made before they are read; not while a graph is captured or compiled, whose memory is the graph's, nor where
something intercepts operators.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from fa4flex.contents import capturing
from fa4flex.torch_internals import (
    current_stream,
    dispatch_modes,
    on_stream_of_graph_trees,
    transform_level,
)

MOST, MOST_BYTES = 64, 1 << 20
"""Tensors that are kept, and bytes of one: a larger one is made anew."""

_kept: OrderedDict[Hashable, Tensor] = OrderedDict()
_lock = threading.Lock()


def kept(key: Hashable, device: torch.device, make: Callable[[], Tensor]) -> Tensor:
    """The tensor that `make` makes on the device, which follows from the key; the oldest are forgotten."""
    place = None if observed() else _place(device)
    if place is None:
        return make()
    whole = key, device, place
    with _lock:
        found = _kept.get(whole)
        if found is not None:
            _kept.move_to_end(whole)
            return found
    with torch.inference_mode(False), torch.no_grad():
        found = make()
    if found.nbytes <= MOST_BYTES:
        with _lock:
            _kept[whole] = found
            while len(_kept) > MOST:
                _kept.popitem(last=False)
    return found


def observed() -> bool:
    """True where code is compiled, or something intercepts operators: what is kept means nothing there."""
    return torch.compiler.is_compiling() or dispatch_modes() > 0 or transform_level() is not None


def _place(device: torch.device) -> int | None:
    """The stream of a device; None where nothing may be kept."""
    if device.type in ("cpu", "meta"):
        return 0
    if device.type != "cuda" or capturing():
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    stream = current_stream(index)
    return None if stream and on_stream_of_graph_trees(index, stream) else stream


def steps(start: int, count: int, step: int, device: torch.device) -> Tensor:
    """int64 [count]: start, start + step, and so on."""
    return kept(
        ("steps", start, count, step),
        device,
        lambda: torch.arange(start, start + count * step, step, device=device),
    )


def where_seen(x: Tensor, seen: Tensor, fill: float = -math.inf) -> Tensor:
    """x where `seen`, -inf or 0 elsewhere, with the gradient of what is seen."""
    if observed():
        return x.masked_fill(~seen, fill)
    # masked_fill copies first. A number would become a tensor by a launch of its own, and a tensor on the
    # host by a copy that waits.
    kind, device = x.dtype, x.device
    other = kept(("fill", fill, kind), device, lambda: torch.full((), fill, dtype=kind, device=device))
    return torch.where(seen, x, other)
