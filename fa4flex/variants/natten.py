"""Neighbourhood attention in 1, 2 or 3 dimensions: a window that is shifted, not cut, at the border.

Per axis of size L, with i the query's and j the key's coordinate:
    allowed = start <= j < start + kernel,   start = clamp(i - kernel // 2, 0, L - kernel)
    causal axis:   i - kernel < j <= i
    dilation d:    the same among the coordinates congruent to i modulo d

Source: Hassani et al., Neighborhood Attention Transformer, arXiv:2204.07143, section 3.1; dilation:
arXiv:2209.15001, section 3; causal axes: NATTEN's documentation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import torch

from fa4flex.errors import InputError
from fa4flex.primitives.mask import MaskMod, mask_family
from fa4flex.variants._cases import Case, Drawn, Picture, Sizes, member, show
from fa4flex.variants._common import coordinate, strides, whole

Shape = tuple[int, ...]
Ints = int | Shape


@mask_family
def natten(
    canvas: Ints, kernel: Ints, dilation: Ints = 1, causal: bool | tuple[bool, ...] = False
) -> MaskMod:
    """Self-attention over prod(canvas) tokens in row-major order (last axis fastest); indices are absolute.

    canvas, kernel, dilation and causal are tuples of 1 to 3 entries; a single value counts for all axes of
    `canvas`. kernel odd except on causal axes, kernel * dilation <= canvas. Raises InputError.
    """
    sizes = _per_axis("canvas", canvas, len(canvas) if isinstance(canvas, tuple) else 1)
    kernels = _per_axis("kernel", kernel, len(sizes))
    dilations = _per_axis("dilation", dilation, len(sizes))
    causals = causal if isinstance(causal, tuple) else (causal,) * len(sizes)
    if len(causals) != len(sizes) or not all(isinstance(c, bool) for c in causals):
        raise InputError(
            f"natten(causal={causal!r})", f"a bool, or {len(sizes)} of them", "one per axis of canvas"
        )
    axes = []
    for i, (size, stride) in enumerate(zip(sizes, strides(sizes), strict=True)):
        _check_axis(size, kernels[i], dilations[i], causals[i])
        axes.append(
            (coordinate(stride, size, i == 0), _neighbours(size, kernels[i], dilations[i], causals[i]))
        )

    def mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        place, near = axes[0]
        allowed = near(place(q_idx), place(kv_idx))
        for place, near in axes[1:]:
            allowed = allowed & near(place(q_idx), place(kv_idx))
        return allowed

    return mod


def _per_axis(name: str, value: Ints, axes: int) -> tuple[int, ...]:
    argument = value if isinstance(value, tuple) else (value,) * axes
    if len(argument) != axes or axes not in (1, 2, 3):
        raise InputError(
            f"natten({name}={value!r})", "1 to 3 entries, as many as canvas has", "one entry per axis"
        )
    return tuple(whole("natten", name, entry) for entry in argument)


def _check_axis(size: int, kernel: int, dilation: int, causal: bool) -> None:
    if kernel % 2 == 0 and not causal:
        raise InputError(f"natten(kernel={kernel})", "an odd kernel", f"use {kernel + 1}, or a causal axis")
    if kernel * dilation > size:
        raise InputError(
            f"natten: kernel {kernel} * dilation {dilation} on an axis of {size}",
            f"kernel * dilation <= {size}",
            "shrink the kernel or the dilation to fit the canvas",
        )


def _neighbours(size: int, kernel: int, dilation: int, causal: bool) -> Callable[[Any, Any], Any]:
    """(query coordinate, key coordinate) -> whether the key is a neighbour."""
    half, last_start, reach = kernel // 2, size - kernel, kernel * dilation

    def plain(i: Any, j: Any) -> Any:
        start = torch.clamp(i - half, 0, last_start)
        return (j >= start) & (j < start + kernel)

    def dilated(i: Any, j: Any) -> Any:
        group = i % dilation
        members = (size - group + dilation - 1) // dilation
        start = torch.minimum(torch.clamp(i // dilation - half, min=0), members - kernel)
        step = j // dilation
        return (j % dilation == group) & (step >= start) & (step < start + kernel)

    def causal_plain(i: Any, j: Any) -> Any:
        return (j <= i) & (j > i - reach)

    def causal_dilated(i: Any, j: Any) -> Any:
        return (j <= i) & (j > i - reach) & (j % dilation == i % dilation)

    if causal:
        return causal_plain if dilation == 1 else causal_dilated
    return plain if dilation == 1 else dilated


def definition(i: int, j: int, size: int, kernel: int, dilation: int, causal: bool) -> bool:
    """One axis, literally: the `kernel` members of i's group nearest to i, those behind it if causal."""
    group = [c for c in range(size) if c % dilation == i % dilation]
    if causal:
        return j in [c for c in group if c <= i][-kernel:]
    windows = [group[s : s + kernel] for s in range(len(group) - kernel + 1)]
    return j in min(windows, key=lambda window: abs(window[kernel // 2] - i))


def _all_axes(q: int, kv: int, canvas: Shape, *each: Sequence[Any]) -> bool:
    tokens = list(product(*map(range, canvas)))
    return all(definition(*axis) for axis in zip(tokens[q], tokens[kv], canvas, *each, strict=True))


def _of(s: Sizes, canvas: Shape, *each: Any) -> Drawn:
    return member(s.square(math.prod(canvas)), natten, _all_axes, canvas, *each)


def _square(s: Sizes) -> Drawn:
    side = math.isqrt(s.of(576))
    kernels = tuple(min(kernel, side - 1 + side % 2) for kernel in (5, 7))
    return _of(s, (side, side), kernels, (1, 1), (False, False))


def _causal_row(s: Sizes) -> Drawn:
    length = s.of(600)
    return _of(s, (length,), (min(s.of(65), length),), (1,), (True,))


def _up_to_three_axes(s: Sizes) -> Drawn:
    if s.rng is None:
        return _of(s, (2, 3, 4), (1, 3, 1), (1, 1, 2), (False, False, False))
    rng, axes = s.rng, s.rng.randint(1, 3)
    causals = tuple(rng.random() < 0.4 for _ in range(axes))
    dilations = tuple(rng.randint(1, 2) for _ in range(axes))
    kernels = tuple(rng.choice([2, 3]) if causal else rng.choice([1, 3]) for causal in causals)
    canvas = tuple(kernel * d + rng.randint(0, 2) for kernel, d in zip(kernels, dilations, strict=True))
    return _of(s, canvas, kernels, dilations, causals)


CASES = (Case(_square), Case(_causal_row), Case(_up_to_three_axes, compiled=False))
PICTURE = Picture("natten((12, 12), (5, 5))", 144, 144)

if __name__ == "__main__":
    show(CASES)
