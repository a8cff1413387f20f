"""Conditions on contents of tensors on a device, which the host learns of without waiting.

A condition is copied to pinned memory behind the work that makes it. A call looks at what has arrived by
then, and tells of a condition that did not hold: its message is that of an earlier call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from fa4flex.errors import EarlierError

MOST_AWAITED = 256
"""Conditions on their way at a time; beyond, the host waits for the oldest."""

UNKNOWN, HELD = 2, 1

_awaited: deque[tuple[Tensor, str, Callable[[], None] | None]] = deque()
"""Conditions on their way, uint8; what is said, and what is called before, if one did not hold."""


def require(condition: Tensor, message: str, otherwise: Callable[[], None] | None = None) -> None:
    """Raise EarlierError with `message` at a later call if `condition`, a bool tensor, is not true
    everywhere; and call `otherwise` before, so that calls after that one are right."""
    arrives = torch.full((), UNKNOWN, dtype=torch.uint8, device="cpu", pin_memory=condition.is_cuda)
    arrives.copy_(condition.all(), non_blocking=True)
    _awaited.append((arrives, message, otherwise))
    if len(_awaited) > MOST_AWAITED:
        torch.cuda.synchronize(condition.device)
        check()


def check() -> None:
    """Raise EarlierError for a condition that is known not to have held, and forget those that are known."""
    while _awaited and int(_awaited[0][0]) != UNKNOWN:
        arrived, message, otherwise = _awaited.popleft()
        if int(arrived) != HELD:
            if otherwise is not None:
                otherwise()
            raise EarlierError(
                f"{message}, in contents given before this call: results since then are not valid",
                "contents that fit, as the documentation of what they belong to says",
                "FA4FLEX_VALIDATE=1 looks at contents at once, and says where they do not fit",
            )
