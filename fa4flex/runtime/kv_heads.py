"""Keys and values that differ in heads, for who computes with as many heads of both: heads are repeated, and
gradients of those that share a head are added up. Kernels do neither: see kernels/plan/problem.py, `shares`.
"""

from __future__ import annotations

from torch import Tensor

from fa4flex.primitives.heads import ALIKE, Shares


def repeated(x: Tensor, share: int, axis: int = 1) -> Tensor:
    """Every head `share` times, one after another. Differentiable; one head is not copied."""
    if share == 1:
        return x
    return (
        x.unsqueeze(axis + 1)
        .expand(*x.shape[: axis + 1], share, *x.shape[axis + 1 :])
        .flatten(axis, axis + 1)
    )


def of_kv_heads(k: Tensor, v: Tensor, axis: int = 1) -> tuple[Tensor, Tensor]:
    """k and v [.., heads, ..] with as many heads, each as often as KV heads share it; as they are where these
    are as many already."""
    shares = Shares.of(k.shape[axis], v.shape[axis])
    return (k, v) if shares == ALIKE else (repeated(k, shares.k, axis), repeated(v, shares.v, axis))


def summed(gradient: Tensor, share: int, axis: int = 1) -> Tensor:
    """Gradient of a tensor of which `repeated` was made, of that of the repeated one."""
    return gradient if share == 1 else gradient.unflatten(axis, (-1, share)).sum(axis + 1)
