"""Tensors on which low precision is judged: each has one thing of trained models that randn has not."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fa4flex.errors import InputError

QKV = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Drawn:
    """Sizes and seed of drawn tensors: q [1, H, rows, D], k and v [1, H, keys, D], bfloat16."""

    rows: int
    keys: int
    heads: int
    width: int
    seed: int

    def normal(self, source: torch.Generator) -> list[Tensor]:
        lengths = self.rows, self.keys, self.keys
        return [torch.randn(1, self.heads, n, self.width, generator=source) for n in lengths]


def normal(size: Drawn, source: torch.Generator) -> list[Tensor]:
    """Independent normal numbers."""
    return size.normal(source)


def outlier(size: Drawn, source: torch.Generator) -> list[Tensor]:
    """One number of a thousand from a distribution ten times as wide (FlashAttention-3, section 4.3)."""
    tensors = size.normal(source)
    for x in tensors:
        far = torch.randn(x.shape, generator=source) * 10
        x += far * (torch.rand(x.shape, generator=source) < 0.001)
    return tensors


def one_sign(size: Drawn, source: torch.Generator) -> list[Tensor]:
    """Values that are all positive: sums grow, and short sums lose their low digits."""
    q, k, v = size.normal(source)
    return [q, k, v.abs()]


def drift(size: Drawn, source: torch.Generator) -> list[Tensor]:
    """Values whose sign changes slowly along the sequence, four times in all: centring does not help."""
    q, k, v = size.normal(source)
    along = torch.linspace(0, 4 * math.pi, size.keys).sin().sign()
    return [q, k, v.abs() * along[:, None]]


def sink(size: Drawn, source: torch.Generator) -> list[Tensor]:
    """Most of the mass on key 0, whose value is small."""
    q, k, v = size.normal(source)
    direction = torch.nn.functional.normalize(torch.randn(size.width, generator=source), dim=0)
    q += 4 * direction
    k[:, :, 0] = direction * (math.log(size.keys) + 2) * math.sqrt(size.width) / 4
    v[:, :, 0] *= 0.05
    return [q, k, v]


def needle(size: Drawn, source: torch.Generator) -> list[Tensor]:
    """One key of its own for each query."""
    q, k, v = size.normal(source)
    places = torch.randint(0, size.keys, (size.rows,), generator=source)
    k[:, :, places] = q * (math.log(size.keys) + 4) / math.sqrt(size.width)
    return [q, k, v]


def offset_channels(size: Drawn, source: torch.Generator) -> list[Tensor]:
    """Some channels of keys and of queries far from zero for all tokens, as in trained models."""
    q, k, v = size.normal(source)
    few = max(1, size.width // 21)
    k[..., torch.randperm(size.width, generator=source)[:few]] += 12
    q[..., torch.randperm(size.width, generator=source)[:few]] += 4
    return [q, k, v]


DISTRIBUTIONS: dict[str, Callable[[Drawn, torch.Generator], list[Tensor]]] = {
    "normal": normal, "outlier": outlier, "one sign": one_sign, "drift": drift, "sink": sink,
    "needle": needle, "offset channels": offset_channels,
}  # fmt: skip


def drawn(name: str, size: Drawn) -> QKV:
    """Tensors of a distribution, by its seed alone."""
    source = torch.Generator().manual_seed(size.seed)
    q, k, v = (x.bfloat16() for x in DISTRIBUTIONS[name](size, source))
    return q, k, v


def loaded(path: Path, rows: int) -> QKV:
    """q, k and v [B, H, S, D] of a file that torch.save wrote, {"q": ..., "k": ..., "v": ...}; of the first
    sequence, keys for each head, and the last `rows` queries. Raises InputError for other contents."""
    tensors = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(tensors, dict) or not all(isinstance(tensors.get(name), Tensor) for name in "qkv"):
        raise InputError(
            f"contents of {path.name}", "a dict of tensors q, k and v", 'torch.save({"q": q, ...})'
        )
    q, k, v = (tensors[name] for name in "qkv")
    fits = all(x.ndim == 4 for x in (q, k, v)) and k.shape[:3] == v.shape[:3] and q.shape[3] == k.shape[3]
    if not fits or k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        shapes = ", ".join(f"{name} {list(x.shape)}" for name, x in zip("qkv", (q, k, v)))
        raise InputError(shapes, "q [B, Hq, Sq, D], k and v [B, Hkv, Skv, D]", "permute them before saving")
    group = q.shape[1] // k.shape[1]
    k, v = (x[:1].repeat_interleave(group, 1).bfloat16() for x in (k, v))
    return q[:1, :, -rows:].bfloat16(), k, v
