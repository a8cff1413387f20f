"""Kernels that are compiled once for calls that look alike, where no engine plans them."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from torch import Tensor

from fa4flex.compiler.compile import Kernel
from fa4flex.contents import capturing
from fa4flex.runtime.cuda.device.device import require_not_capturing, target_of
from ptxsim.active import target


class KeptKernels:
    """Kernels by all that they are compiled from, and by the GPU. No contents and no extents decide."""

    def __init__(self) -> None:
        self._known: dict[tuple[Hashable, int, str], Kernel] = {}

    def of(self, look: Hashable, x: Tensor, compiled: Callable[[str], Kernel]) -> Kernel:
        """The kernel for such a look on the GPU of x, which `compiled` makes for an architecture. Raises
        UnsupportedError where it would have to while a CUDA graph is captured."""
        key = _key(look, x)
        result = self._known.get(key)
        if result is None:
            require_not_capturing()
            result = self._known[key] = compiled(target_of(x.device).name)
        return result

    def must_wait(self, look: Hashable, x: Tensor) -> bool:
        """True while a CUDA graph is captured, before the kernel was compiled."""
        return _key(look, x) not in self._known and capturing()


def _key(look: Hashable, x: Tensor) -> tuple[Hashable, int, str]:
    return look, x.get_device(), target()
