"""Helpers of the tests of engines: sequences that grow step by step, and each step's result by definition."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

STUBS = Path(__file__).parent / "stubs"


def with_stubs(engine: str) -> Iterator[ModuleType]:
    """The adapter of an engine, over the engine where it is installed and over its stub elsewhere."""
    before = set(sys.modules)
    stubbed = importlib.util.find_spec(engine) is None
    if stubbed:
        sys.path.insert(0, str(STUBS))
    try:
        yield importlib.import_module(f"fa4flex.integrations.{engine}")
    finally:
        if stubbed:
            sys.path.remove(str(STUBS))
            for name in set(sys.modules) - before:
                if name.split(".")[0] == engine or name == f"fa4flex.integrations.{engine}":
                    del sys.modules[name]


@dataclass
class Definition:
    """A layer by definition; `bias(h, q, k)` is added last and `allows(q, k)` hides keys besides."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    slopes: list[float] | None = None
    sinks: Tensor | None = None
    bias: Callable[[Any, Any, Any], Any] | None = None
    allows: Callable[[Any, Any], Any] | None = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [n, Hq, D], the last of the tokens of k and v [T, Hkv, D] -> [n, Hq, Dv]."""
        heads, ratio = q.shape[1], q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(ratio, 1) for x in (k, v))
        h = torch.arange(heads).view(-1, 1, 1)
        i = torch.arange(len(k) - len(q), len(k)).view(-1, 1)
        j = torch.arange(len(k))
        s = torch.einsum("nhd,thd->hnt", q, k) * self.scale
        s = s if self.softcap is None else self.softcap * torch.tanh(s / self.softcap)
        s = s if self.slopes is None else s + torch.tensor(self.slopes).view(-1, 1, 1) * (j - i)
        s = s if self.bias is None else s + self.bias(h, i, j)
        allowed = (j <= i) if self.window is None else (j <= i) & (j > i - self.window)
        allowed = allowed if self.allows is None else allowed & self.allows(i, j)
        s = s.masked_fill(~allowed, -torch.inf)
        if self.sinks is not None:
            s = torch.cat([s, self.sinks.view(-1, 1, 1).expand(-1, len(q), 1)], -1)
        p = s.softmax(-1)[..., : len(k)].nan_to_num()
        return torch.einsum("hnt,thd->nhd", p, v)


@dataclass
class History:
    """Keys and values of each sequence so far, float64."""

    heads: int = 4
    kv_heads: int = 2
    width: int = 8
    k: dict[int, Tensor] = field(default_factory=dict)
    v: dict[int, Tensor] = field(default_factory=dict)

    def length(self, sequence: int) -> int:
        return len(self.k[sequence]) if sequence in self.k else 0

    def grow(self, counts: dict[int, int]) -> tuple[Tensor, Tensor, Tensor]:
        """New tokens of these sequences: packed queries, keys and values, which the history keeps."""
        total = sum(counts.values())
        q = torch.randn(total, self.heads, self.width, dtype=torch.float64)
        k, v = (torch.randn(total, self.kv_heads, self.width, dtype=torch.float64) for _ in range(2))
        for each, new in ((self.k, k), (self.v, v)):
            for sequence, part in zip(counts, new.split(list(counts.values())), strict=True):
                each[sequence] = torch.cat([each[sequence], part]) if sequence in each else part
        return q, k, v

    def expected(self, layer: Definition, q: Tensor, counts: dict[int, int]) -> Tensor:
        parts = zip(counts, q.split(list(counts.values())), strict=True)
        return torch.cat([layer(part, self.k[n], self.v[n]) for n, part in parts])
