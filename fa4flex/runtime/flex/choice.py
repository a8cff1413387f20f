"""Choice of the backend of a call, with its reason: our kernels, our CPU executor, or flex_attention."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fa4flex.errors import UnsupportedError
from fa4flex.kernels.plan.target import TARGETS
from fa4flex.torch_internals import constant_in_graphs
from fa4flex.variant import Backend
from ptxsim.active import simulating

Name = Literal["kernels", "cpu", "flex"]


class Choice(NamedTuple):
    """name: "kernels" (generated), "cpu" (PyTorch operations) or "flex" (torch's flex_attention)."""

    name: Name
    why: str


def by_flex(asked: Backend, q: Tensor) -> bool:
    """True if torch's flex_attention computes for such queries."""
    if asked == "flex":
        return True
    device = q.device
    return device.type != "cpu" and _without_kernels(device)


def by_kernels(x: Tensor) -> bool:
    """True if kernels compute with such tensors where nothing else is asked for: a GPU's, or a simulated
    one's."""
    return (x.is_cuda or simulating()) and not by_flex("auto", x)


@constant_in_graphs
def _without_kernels(device: torch.device) -> bool:
    result = _known.get(device)
    if result is None:
        result = device.type in FLEX_DEVICES and choose("auto", device).name == "flex"
        _known[device] = result
    return result


_known: dict[torch.device, bool] = {}
"""Devices, whose capabilities do not change, and whether flex_attention runs on them. Simulated GPUs have CPU
tensors, and stand in none of them."""

FLEX_DEVICES = "cuda", "xpu"
"""Accelerators that torch compiles flex_attention for, with gradients."""


def choose(asked: Backend, device: torch.device) -> Choice:
    """The backend of calls on a device. Raises UnsupportedError for devices that none is for."""
    if asked == "flex":
        return Choice("flex", 'backend="flex" asks for it')
    if simulating():
        return Choice("kernels", "a simulated GPU runs the generated kernels")
    if device.type == "cpu":
        return Choice("cpu", "exact, forward and backward, in all dtypes")
    if device.type == "cuda":
        return _cuda(device)
    if device.type in FLEX_DEVICES:
        return Choice("flex", f"{device.type}: the generated kernels are for NVIDIA GPUs")
    raise no_backend(device)


def no_backend(device: torch.device) -> UnsupportedError:
    """Error for a device that no backend is for."""
    return UnsupportedError(
        f"tensors on {device}",
        "CPU tensors, or tensors on a GPU of NVIDIA, AMD or Intel",
        "move q, k, v and captured tensors with .cpu() or .cuda()",
    )


def _cuda(device: torch.device) -> Choice:
    name = torch.cuda.get_device_name(device)
    if torch.version.hip is not None:
        return Choice("flex", f"{name}: the generated kernels are for NVIDIA GPUs")
    result = torch.cuda.get_device_capability(device)
    if any(target.capability == result for target in TARGETS):
        return Choice("kernels", f"{name}: generated kernels for compute capability {result[0]}.{result[1]}")
    known = ", ".join(f"{major}.{minor}" for major, minor in (target.capability for target in TARGETS))
    return Choice(
        "flex", f"{name} has compute capability {result[0]}.{result[1]}; generated kernels are for {known}"
    )
