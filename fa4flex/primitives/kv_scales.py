"""KVScales: scales of the keys and values of an 8-bit cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fa4flex.errors import InputError, UnsupportedError
from fa4flex.primitives.base import check_device, kind_of, show

E4M3 = torch.float8_e4m3fn
_OTHERS = (torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)

_ALL = frozenset((E4M3, *_OTHERS))

Per = Literal["", "head", "page", "token"]
"""Granularity of scales, besides heads; "": there are none."""

Arrangement = Literal["bhsd", "bshd", "packed", "paged"]
"""Dimensions of a cache: as a layout says, tokens of all sequences [T, H, D], or [pages, slots, H, D]."""

_SHAPES: dict[Arrangement, str] = {
    "bhsd": "[Hkv], [B, Hkv] or [B, Hkv, Skv]",
    "bshd": "[Hkv], [B, Hkv] or [B, Skv, Hkv]",
    "packed": "[Hkv], or [Tk, Hkv]",
    "paged": "[Hkv], [pages, Hkv] or [pages, page_size, Hkv]",
}


@dataclass(frozen=True, eq=False, repr=False)
class KVScales:
    """`k` and `v`, float32 or None for 1: keys are k8 * k_scale and values v8 * v_scale.

    A scale per head [Hkv]; per sequence and head [B, Hkv], of paged caches per page and head [pages, Hkv]; or
    per token and head, in the shape of the cache without its last dimension: [B, Hkv, Skv] (layout "bshd":
    [B, Skv, Hkv]), [Tk, Hkv] of packed caches, [pages, page_size, Hkv] of paged ones. Scales of k and of v
    may have different shapes. They belong to caches of torch.float8_e4m3fn; its NaN is NaN. Raises
    InputError.
    """

    k: Tensor | None = None
    v: Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("k", "v"):
            scale = getattr(self, name)
            if scale is None:
                continue
            if not isinstance(scale, Tensor):
                raise InputError(
                    f"{name} scales of {kind_of(scale)}",
                    "a float32 tensor, or None for 1",
                    "torch.full((kv_heads,), number, device=q.device) is one number for all",
                )
            if scale.dtype != torch.float32 or not 1 <= scale.ndim <= 3:
                raise InputError(
                    f"{name} scales {scale.dtype} {list(scale.shape)}",
                    "float32, of one to three dimensions",
                    f"e.g. {name}=scale.float(), of a number for each KV head",
                )

    def check(self, k: Tensor, v: Tensor, arrangement: Arrangement) -> None:
        """Raise InputError unless the scales fit caches of these shapes and this device."""
        for name, scale, cache in (("k", self.k, k), ("v", self.v, v)):
            if scale is None:
                continue
            check_device(f"{name} scales", scale, "the cache", cache.device, "move the scales to the cache")
            if tuple(scale.shape) not in _shapes(cache, arrangement):
                raise InputError(
                    f"{name} scales of shape {list(scale.shape)} for a cache of {list(cache.shape)}",
                    _SHAPES[arrangement],
                    "a scale of each head, of each sequence or page and head, or of each token and head",
                )

    def __repr__(self) -> str:
        each = (f"{name}={show(x)}" for name, x in (("k", self.k), ("v", self.v)) if x is not None)
        return f"KVScales({', '.join(each)})"


NO_SCALES = KVScales()


def is_eight_bit(k: object, v: object) -> bool:
    """True if keys or values have an 8-bit dtype."""
    return (isinstance(k, Tensor) and k.dtype in _ALL) or (isinstance(v, Tensor) and v.dtype in _ALL)


def check_kind(scales: object) -> KVScales | None:
    """The scales of a call. Raises InputError for others than KVScales and None."""
    if scales is None or isinstance(scales, KVScales):
        return scales
    raise InputError(
        f"kv_scales is a {kind_of(scales)}", "a fa4flex.KVScales", "pass fa4flex.KVScales(k=..., v=...)"
    )


def check_caches(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise InputError or UnsupportedError unless k and v are an e4m3 cache for queries like q."""
    value = f"k {k.dtype}, v {v.dtype}"
    for x in (k, v):
        if x.dtype in _OTHERS:
            raise UnsupportedError(
                value,
                "torch.float8_e4m3fn, the format of caches that have more digits than range",
                "quantise to e4m3 with a scale, or dequantise: k.to(torch.bfloat16)",
            )
    if k.dtype != E4M3 or v.dtype != E4M3:
        instead = "quantise both alike" if E4M3 in (k.dtype, v.dtype) else "leave kv_scales out"
        raise InputError(value, "keys and values that are both torch.float8_e4m3fn", instead)
    if q.dtype == E4M3 or q.dtype in _OTHERS:
        raise UnsupportedError(
            f"q {q.dtype}",
            "queries of bfloat16 or float16 beside an 8-bit cache",
            "keep the queries as they are computed: only what is cached takes memory",
        )
    if k.requires_grad or v.requires_grad:
        raise UnsupportedError(
            "gradients of an 8-bit cache, which would be rounded to 8 bits",
            "gradients of queries, scales, sinks and captured tensors",
            "dequantise, and take gradients of that: k.to(torch.bfloat16) * scale",
        )


def _shapes(cache: Tensor, arrangement: Arrangement) -> list[tuple[int, ...]]:
    """Shapes that scales of a cache may have."""
    *outer, _ = cache.shape
    heads = outer[1] if arrangement in ("bhsd", "packed") else outer[2]
    each = [] if arrangement == "packed" else [(outer[0], heads)]
    return [(heads,), *each, tuple(outer)]


def per(scale: Tensor | None, arrangement: Arrangement) -> Per:
    """Granularity of a scale."""
    if scale is None:
        return ""
    if scale.ndim == 1:
        return "head"
    if arrangement == "packed" or scale.ndim == 3:
        return "token"
    return "page" if arrangement == "paged" else "head"


def dequantised(cache: Tensor, scale: Tensor | None, arrangement: Arrangement, dtype: torch.dtype) -> Tensor:
    """The keys or values that a cache stands for. Differentiable by the scales; products are made in float32
    at least, and rounded to `dtype` once."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    if scale is None:
        return cache.to(dtype)
    factor = scale.to(wide)
    heads_first = arrangement == "bhsd"
    if factor.ndim == 1:
        factor = factor[:, None, None] if heads_first else factor[:, None]
    elif per(scale, arrangement) == "token":
        factor = factor[..., None]
    else:
        factor = factor[:, :, None, None] if heads_first else factor[:, None, :, None]
    return (cache.to(wide) * factor).to(dtype)
