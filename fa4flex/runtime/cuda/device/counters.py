"""Counters of launches, int32 [COUNTERS], zero before and after each: blocks take tiles by the first.

Launches on one stream follow each other and share theirs; those on other streams may run at the same time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fa4flex.kernels.plan.arguments import COUNTERS
from fa4flex.torch_internals import current_stream, on_stream_of_graph_trees
from ptxsim.active import simulating

_counters: dict[tuple[int, int], Tensor] = {}
"""Counters by device index and stream handle. A new stream with the handle of a destroyed one finds zeros as
well."""


def counters(device: int) -> Tensor:
    """The counters of a launch on the current stream of CUDA device number `device`."""
    if simulating():
        return torch.zeros(COUNTERS, dtype=torch.int32)
    stream = current_stream(device)
    # The default stream, 0, cannot be captured. A captured launch has counters of its own, filled by the
    # graph and in the graph's memory: replays may run beside launches on the stream that was captured.
    if stream and (_capturing(device) or on_stream_of_graph_trees(device, stream)):
        return _zeros(device)
    result = _counters.get((device, stream))
    if result is None:
        result = _counters[device, stream] = _zeros(device)
    return result


def capture_of(q: Tensor) -> tuple[int, int] | None:
    """The current stream of q's device, and the number of the capture that it is in, 0 for none: what is
    computed on one stream, or becomes part of one graph, may not be there on another. None where nothing may
    be kept: the number is not told, or memory is that of torch.compile's graphs."""
    if simulating() or not q.is_cuda:
        return 0, 0
    device = q.get_device()
    stream = current_stream(device)
    if stream and on_stream_of_graph_trees(device, stream):
        return None
    if not stream or not _capturing(device):
        return stream, 0
    try:
        from cuda.bindings import driver

        _, _, number, *_ = driver.cuStreamGetCaptureInfo(driver.CUstream(stream))
        return stream, int(number)
    except (ImportError, AttributeError, TypeError, ValueError):
        return None


def _zeros(device: int) -> Tensor:
    return torch.zeros(COUNTERS, dtype=torch.int32, device=torch.device("cuda", device))


def _capturing(device: int) -> bool:
    if torch.cuda.current_device() == device:  # in a tenth of the time that the other way takes
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()
