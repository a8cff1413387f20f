"""QKNorm: root mean square normalisation of heads before their rotation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fa4flex.errors import InputError
from fa4flex.primitives.base import kind_of, show


@dataclass(frozen=True, eq=False, repr=False)
class QKNorm:
    """`q` and `k` [D], floats: weights of each head's elements, None where heads stay as they are.

    A head x [D] becomes x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich 2019, RMSNorm), or times
    1 + weight with unit_offset=True (Gemma in transformers). torch.ones(D) are no weights at all. Raises
    InputError.
    """

    q: Tensor | None = None
    k: Tensor | None = None
    eps: float = 1e-6
    unit_offset: bool = False

    def __post_init__(self) -> None:
        for name, weight in (("q", self.q), ("k", self.k)):
            if weight is None:
                continue
            if not isinstance(weight, Tensor) or not weight.dtype.is_floating_point or weight.ndim != 1:
                value = (
                    kind_of(weight)
                    if not isinstance(weight, Tensor)
                    else f"{weight.dtype} {list(weight.shape)}"
                )
                raise InputError(
                    f"{name} weights of {value}",
                    "a tensor of floats [D], the same for all heads",
                    "norms over all heads together are no QKNorm: apply them before the heads are split",
                )
        pair = [x for x in (self.q, self.k) if x is not None]
        if not pair:
            raise InputError("QKNorm of neither q nor k", "weights of one of them", "leave the norm out")
        if len({(x.dtype, x.device, x.shape) for x in pair}) > 1:
            raise InputError(
                ", ".join(f"{x.dtype} {list(x.shape)} on {x.device}" for x in pair),
                "weights of q and k of one shape, dtype and device",
                "cast or move one of them",
            )

    def normalised(self, x: Tensor, weight: Tensor | None) -> Tensor:
        """x [..., D] in float32, or float64 for such x; as it is without weights."""
        wide = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
        if weight is None:
            return wide
        factor = weight.to(wide.dtype) + 1 if self.unit_offset else weight.to(wide.dtype)
        return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * factor

    def __repr__(self) -> str:
        parts = [f"{name}={show(x)}" for name, x in (("q", self.q), ("k", self.k)) if x is not None]
        if self.eps != 1e-6:
            parts.append(f"eps={self.eps!r}")
        if self.unit_offset:
            parts.append("unit_offset=True")
        return f"QKNorm({', '.join(parts)})"
