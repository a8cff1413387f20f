"""Tables made on the host, copied to a device: all of a launch at once, without waiting for the device."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

TOGETHER = 32
"""Tables begin at multiples of as many elements, aligned as tensors of their own are."""


def upload(parts: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """int32 tensors of the host on `device`, which any stream may read from now on.

    On a GPU they are one copy, on a stream of its own: waiting for that is not waiting for what else the GPU
    has to do.
    """
    if device.type != "cuda":
        return [x.contiguous() for x in parts]
    sizes = [-(-x.numel() // TOGETHER) * TOGETHER for x in parts]
    staged = torch.empty(sum(sizes), dtype=torch.int32, device="cpu", pin_memory=True)
    for room, x in zip(staged.split(sizes), parts, strict=True):
        room[: x.numel()].view(x.shape).copy_(x)
    stream = _stream(device)
    with torch.cuda.stream(stream):
        there = staged.to(device, non_blocking=True)
        stream.record_event().synchronize()
    # The memory is the copying stream's: it is not given to the next copy while launches may read it.
    there.record_stream(torch.cuda.current_stream(device))
    return [room[: x.numel()].view(x.shape) for room, x in zip(there.split(sizes), parts, strict=True)]


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
