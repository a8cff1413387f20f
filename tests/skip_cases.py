"""Random scores of which tiles of keys may be left out, what is exact of them, and what may be off by how
much: without the code that leaves them out."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

import fa4flex
from fa4flex import reference

Biases = Callable[[random.Random, int, int], Tensor]


def _local(draw: random.Random, rows: int, keys: int) -> Tensor:
    distance = torch.arange(rows)[:, None] + keys - rows - torch.arange(keys)
    return -draw.choice((0.05, 0.3, 1.0, 4.0)) * distance.abs() + torch.randn(rows, keys)


def _sinks(draw: random.Random, rows: int, keys: int) -> Tensor:
    scores = torch.randn(rows, keys)
    scores[:, : draw.randint(1, 3)] += draw.choice((3.0, 10.0, 30.0))
    return scores


def _huge(draw: random.Random, rows: int, keys: int) -> Tensor:
    scores = torch.randn(rows, keys)
    scores[:, draw.randrange(keys)] += draw.choice((8.0, 20.0, 1e4))
    return scores


def _steps(draw: random.Random, rows: int, keys: int) -> Tensor:
    """One key far above all others, which are nearly alike."""
    scores = torch.zeros(rows, keys)
    scores[:, : keys - 1] = -torch.tensor(draw.choice((2.0, 5.0, 9.0))) - 1e-3 * torch.rand(rows, keys - 1)
    return scores


KINDS: dict[str, Biases] = {
    "normal": lambda draw, rows, keys: torch.randn(rows, keys) * draw.choice((1.0, 4.0, 12.0)),
    "outliers": lambda draw, rows, keys: torch.randn(rows, keys) * torch.where(torch.rand(keys) < 0.1, 20, 1),
    "local": _local,
    "sinks": _sinks,
    "huge": _huge,
    "steps": _steps,
    "constant": lambda draw, rows, keys: torch.full((rows, keys), draw.choice((0.0, -50.0, 700.0))),
}


class Case(NamedTuple):
    """q.k is small beside `bias` [B, H, Sq, Skv], which a score mod adds; `allowed` is a mask's table of the
    same shape; sinks [H] or None."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor
    allowed: Tensor
    sinks: Tensor | None
    skip: float
    tile: tuple[int, int]

    @property
    def heads(self) -> int:
        """Rows of the batch times heads: each has scores of a kind of its own."""
        return self.q.shape[0] * self.q.shape[1]

    def variant(self, skip: float | None = None, compute: str = "float64") -> fa4flex.Attention:
        bias, allowed, alike = self.bias, self.allowed, self.allowed.stride(1) == 0

        def score(score, b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
            return score + bias[b, h, q_idx, kv_idx]

        def mask(b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
            return allowed[b, h, q_idx, kv_idx]

        table = allowed[:, 0]

        def alike_mask(b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
            return table[b, q_idx, kv_idx]

        precision = fa4flex.Precision(compute=compute, skip=self.skip if skip is None else skip)
        schedule = fa4flex.Schedule(tile=self.tile)
        return fa4flex.compile(
            score, alike_mask if alike else mask, sinks=self.sinks, precision=precision, schedule=schedule
        )

    @property
    def scores(self) -> Tensor:
        """Scores in float64, -inf where they are masked."""
        k = self.k.double().repeat_interleave(self.q.shape[1] // self.k.shape[1], 1)
        scores = self.q.double() @ k.mT / self.q.shape[-1] ** 0.5 + self.bias.double()
        return scores.masked_fill(~self.allowed, -torch.inf)

    def exact(self) -> tuple[Tensor, Tensor]:
        """(out, lse) in float64."""
        scores = self.scores
        if self.sinks is not None:
            more = self.sinks.double().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, more], -1)
        lse = scores.logsumexp(-1)
        p = (scores - lse.masked_fill(lse == -torch.inf, 0).unsqueeze(-1)).exp()[..., : self.k.shape[2]]
        v = self.v.double().repeat_interleave(self.q.shape[1] // self.v.shape[1], 1)
        return p @ v, lse

    def bound(self) -> Tensor:
        return reference.skip_bound(self.skip, self.v, self.allowed, self.sinks is not None)


def drawn(draw: random.Random, kind: str | None = None) -> Case:
    """A small case in float64, or float32 one time in five, of at most 48 tiles per head."""
    batch, kv_heads, group = draw.randint(1, 3), draw.choice((1, 2, 3)), draw.choice((1, 2, 4, 7))
    heads, rows, keys = kv_heads * group, draw.choice((1, 2, 7, 16, 33)), draw.choice((2, 5, 16, 40, 65))
    width = draw.choice((4, 8))
    sizes = (heads, rows), (kv_heads, keys), (kv_heads, keys)
    q, k, v = (torch.randn(batch, h, n, width) for h, n in sizes)
    v = v + draw.choice((0.0, 5.0)) if draw.random() < 0.5 else v.sign() * 3
    names = [kind or draw.choice(list(KINDS)) for _ in range(batch * heads)]
    bias = torch.stack([KINDS[name](draw, rows, keys) for name in names]).view(batch, heads, rows, keys)
    tile = draw.choice((1, 4, 16, 33)), draw.choice((1, 2, 4, 8, 16))
    if -(-rows // tile[0]) * -(-keys // tile[1]) > 48:
        tile = 16, 8
    dtype = torch.float32 if draw.random() < 0.2 else torch.float64
    return Case(
        *((x * y).to(dtype) for x, y in ((q, 0.2), (k, 1.0), (v, 1.0))),
        bias.to(dtype),
        _allowed(draw, (batch, heads, rows, keys)),
        torch.randn(heads, dtype=dtype) * 3 if draw.random() < 0.3 else None,
        draw.choice((1e-6, 1e-3, 1e-2, 0.1, 0.5, 0.9)),
        tile,
    )


def _allowed(draw: random.Random, shape: tuple[int, int, int, int]) -> Tensor:
    rows, keys = shape[2:]
    kind = draw.choice(("all", "causal", "random", "blocks", "of heads"))
    place = torch.arange(rows)[:, None] + keys - rows - torch.arange(keys)
    if kind == "of heads":
        return torch.rand(shape) < 0.6
    if kind == "random":
        return (torch.rand(shape[0], 1, rows, keys) < 0.6).expand(shape)
    if kind == "causal":
        return (place >= 0).expand(shape)
    if kind == "blocks":
        blocks = torch.rand(shape[0], 1, -(-rows // 4), -(-keys // 4)) < 0.5
        whole = blocks.repeat_interleave(4, 2).repeat_interleave(4, 3)
        return whole[:, :, :rows, :keys].expand(shape)
    return torch.ones(1, 1, rows, keys, dtype=torch.bool).expand(shape)
