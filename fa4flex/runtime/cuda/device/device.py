"""The GPU of a call, and what cannot be done on it now."""

from __future__ import annotations

from dataclasses import replace

import torch

from fa4flex.contents import capturing
from fa4flex.errors import UnsupportedError
from fa4flex.kernels.plan.target import TARGETS, Target


def target_like(capability: tuple[int, int]) -> Target | None:
    """The chip of this compute capability; None where there is no kernel for it."""
    return next((target for target in TARGETS if target.capability == capability), None)


def target_of(device: torch.device) -> Target:
    """The chip that a GPU is, with the multiprocessors and the memory of this one; raises UnsupportedError
    where there is no kernel for it."""
    result = torch.cuda.get_device_capability(device)
    target = target_like(result)
    if target is None:
        known = ", ".join(f"{'.'.join(map(str, t.capability))} ({t.chip})" for t in TARGETS)
        raise UnsupportedError(
            f"{torch.cuda.get_device_name(device)} of compute capability {result[0]}.{result[1]}",
            f"one of the compute capabilities that kernels exist for: {known}",
            "run on such a GPU, or move the tensors with .cpu()",
        )
    found = torch.cuda.get_device_properties(device)
    return replace(target, multiprocessors=found.multi_processor_count).named(found.name)


def require_not_capturing() -> None:
    """UnsupportedError while a CUDA graph is captured: a first call compiles and copies to the host."""
    if capturing():
        raise UnsupportedError(
            "the first call of its kind while a CUDA graph is being captured",
            "a kernel that is compiled, and masks that are proved, before the capture begins",
            "call once with the same shapes and the same captured tensors before capturing",
        )
