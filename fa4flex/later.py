"""Conditions on contents of tensors on a device, which the host learns of without waiting.

A condition is copied to pinned memory behind the work that makes it. A call looks at what has arrived by
then, and tells of a condition that did not hold: its message is that of an earlier call.

Compiled graphs have the operator `fa4flex::required` for it. A graph drops what nothing depends on, so it
returns the tensor that the condition is about, and what follows is computed from that.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from fa4flex.contents import capturing
from fa4flex.errors import EarlierError, InputError
from fa4flex.torch_internals import assert_async

MOST_AWAITED = 256
"""Conditions on their way at a time; beyond, the host waits for the oldest."""

UNKNOWN, HELD = 2, 1

_taking = threading.Lock()
awaited: deque[tuple[Tensor, str, Callable[[], None] | None]] = deque()
"""Conditions on their way, uint8; what is said, and what is called before, if one did not hold."""


def require(condition: Tensor, message: str, otherwise: Callable[[], None] | None = None) -> None:
    """Raise EarlierError with `message` at a later call if `condition`, a bool tensor, is not true
    everywhere; and call `otherwise` before, so that calls after that one are right."""
    arrives = torch.full((), UNKNOWN, dtype=torch.uint8, device="cpu", pin_memory=condition.is_cuda)
    arrives.copy_(condition.all(), non_blocking=True)
    awaited.append((arrives, message, otherwise))
    if len(awaited) > MOST_AWAITED:
        torch.cuda.synchronize(condition.device)
        check()


def require_at_each_replay(condition: Tensor, message: str) -> None:
    """Do as `require` does. While a CUDA graph is captured, torch asserts on the device instead, at each
    replay; after that this process cannot use the device. What a graph copies would be read here once."""
    if capturing():
        assert_async(condition.all(), message)
    else:
        require(condition, message)


def check() -> None:
    """Raise EarlierError for a condition that is known not to have held, and forget those that are known."""
    while awaited:
        with _taking:  # two threads may look at the same one
            if not awaited or int(awaited[0][0]) == UNKNOWN:
                return
            arrived, message, otherwise = awaited.popleft()
        if int(arrived) != HELD:
            if otherwise is not None:
                otherwise()
            raise EarlierError(
                f"{message}, in contents given before this call: results since then are not valid",
                "contents that fit, as the documentation of what they belong to says",
                "FA4FLEX_VALIDATE=1 looks at contents at once, and says where they do not fit",
            )


def required(x: Tensor, condition: Tensor, message: str) -> Tensor:
    """A copy of `x`. Raises InputError if `condition` is not true everywhere, on a GPU at a later call."""
    if not condition.is_cpu:
        require_at_each_replay(condition, message)
    elif not condition.all():
        raise InputError(
            f"{message}, in a compiled graph",
            "contents that fit, as the documentation of what they belong to says",
            "do the same without torch.compile, which says where they do not fit",
        )
    return x.clone()


def required_fake(x: Tensor, condition: Tensor, message: str) -> Tensor:
    return torch.empty_like(x)
