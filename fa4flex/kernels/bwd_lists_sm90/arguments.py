"""Arguments of the kernels of a backward pass over listed keys."""

from __future__ import annotations

from typing import Any, ClassVar

from fa4flex.kernels.common.arguments import named
from fa4flex.kernels.plan.arguments import LISTED_BACKWARD

_Main: Any = named("ListsBackwardArguments", LISTED_BACKWARD.read_by("kernel"))
_After: Any = named("KeyGradientArguments", LISTED_BACKWARD.read_by("postprocess"))


class ListsBackwardArguments(_Main):
    """Fields of BackwardArguments, and lists as a forward kernel has them. dk_sum, dv_sum float32 [B, Hkv,
    R * width], zero at first: dK / scale and dV by rows of R >= S keys, each as wide as a tile and in the
    order of SumsConfig; packed [Hkv, R * width] by tokens."""

    loader: ClassVar[None] = None


class KeyGradientArguments(_After):
    """dk_sum, dv_sum likewise; dk, dv [B, S, Hkv, D], packed [T, Hkv, D]."""
