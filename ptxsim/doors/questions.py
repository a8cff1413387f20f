"""Questions that host code asks about the device, answered for a simulated GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

from ptxsim.doors.launch import MOST_SHARED_BYTES
from ptxsim.doors.shim import Device
from ptxsim.errors import UnsupportedError

SHARED_BYTES = 228 << 10
"""Shared memory of a multiprocessor, on sm_90 and on sm_100."""
L2_BYTES = 50 << 20
REGISTERS = 1 << 16

Replacement = tuple[Any, str, Any]
"""Whose attribute, its name, its value."""


def questions(device: Device) -> Iterator[Replacement]:
    """Functions of CuTe DSL and of torch that would ask a driver, and what answers instead."""
    from cutlass.base_dsl.runtime import cuda
    from cutlass.utils import HardwareInfo

    yield cuda, "get_device_attribute", lambda attribute, device_id=0: _attribute(device, attribute)
    yield HardwareInfo, "__init__", _ignore
    yield HardwareInfo, "get_max_active_clusters", lambda _, cluster_size, *rest: device.sms // cluster_size
    yield HardwareInfo, "get_device_multiprocessor_count", _always(device.sms)
    yield HardwareInfo, "get_l2_cache_size_in_bytes", _always(L2_BYTES)
    stream = SimpleNamespace(cuda_stream=0, synchronize=_ignore)
    major, minor = device.capability
    properties = SimpleNamespace(
        name=device.name,
        major=major,
        minor=minor,
        multi_processor_count=device.sms,
        shared_memory_per_block_optin=MOST_SHARED_BYTES,
        warp_size=32,
    )
    yield torch.cuda, "get_device_capability", _always(device.capability)
    yield torch.cuda, "get_device_name", _always(device.name)
    yield torch.cuda, "get_device_properties", _always(properties)
    yield torch.cuda, "current_device", _always(0)
    yield torch.cuda, "current_stream", _always(stream)
    yield torch.cuda, "default_stream", _always(stream)
    yield torch.cuda, "synchronize", _ignore
    yield from _ranges()


def _ignore(*args: Any, **kwargs: Any) -> None:
    pass


def _always(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


def _attribute(device: Device, attribute: Any) -> int:
    """Answer to cuDeviceGetAttribute."""
    major, minor = device.capability
    answers = {
        "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR": SHARED_BYTES,
        "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": MOST_SHARED_BYTES,
        "MAX_REGISTERS_PER_MULTIPROCESSOR": REGISTERS,
        "MULTIPROCESSOR_COUNT": device.sms,
        "COMPUTE_CAPABILITY_MAJOR": major,
        "COMPUTE_CAPABILITY_MINOR": minor,
        "L2_CACHE_SIZE": L2_BYTES,
        "WARP_SIZE": 32,
    }
    name = attribute.name.removeprefix("CU_DEVICE_ATTRIBUTE_")
    if name not in answers:
        known = ", ".join(sorted(answers))
        raise UnsupportedError(
            f"device attribute {name}", known, "add its value to ptxsim/doors/questions.py"
        )
    return answers[name]


def _ranges() -> Iterator[Replacement]:
    """torch.cuda.nvtx: names of parts of a program, for a profiler that does not look on."""
    open: list[Any] = []

    def push(message: str) -> int:
        open.append(message)
        return len(open) - 1

    def pop() -> int:
        if open:
            open.pop()
        return len(open)

    yield torch.cuda.nvtx, "range_push", push
    yield torch.cuda.nvtx, "range_pop", pop
    yield torch.cuda.nvtx, "range_start", _always(0)
    yield torch.cuda.nvtx, "range_end", _ignore
    yield torch.cuda.nvtx, "mark", _ignore
