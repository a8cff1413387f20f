"""Random models of one attention whose mods are made anew at each call, for tests of torch.compile.

A program is drawn as a list of terms. Each term captures one value in one of the ways that users have: a
closure over a tensor, a float or an int, an attribute or a parameter of the module, a global, an argument
bound by functools.partial. Values are drawn anew for every call.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import fa4flex

HEADS, LENGTH, WIDTH = 2, 16, 8

TABLE: Any = None
SLOPE: Any = 0.0
REACH: Any = 1


@dataclass
class Values:
    """Values that one call captures."""

    per_head: Tensor
    per_key: Tensor
    ids: Tensor
    number: float
    count: int

    @staticmethod
    def draw() -> Values:
        ids = torch.randint(0, 3, (LENGTH,)).sort().values
        return Values(
            torch.randn(HEADS), torch.randn(LENGTH), ids, random.uniform(0.1, 2.0), random.randint(3, LENGTH)
        )


def plus(s: Any, b: Any, h: Any, q: Any, k: Any, table: Any, slope: Any) -> Any:
    return s + table[h] * slope


SCORES: dict[str, Callable[[Any, Values], Callable[..., Any]]] = {
    "closure over a tensor": lambda m, x: lambda s, b, h, q, k: s + x.per_head[h] * (q - k) * 0.1,
    "closure over a float": lambda m, x: lambda s, b, h, q, k: s * x.number,
    "closure over an int": lambda m, x: lambda s, b, h, q, k: torch.where(q - k < x.count, s, s - 1.0),
    "parameter": lambda m, x: lambda s, b, h, q, k: s + m.bias[h],
    "attribute": lambda m, x: lambda s, b, h, q, k: s - m.slope * (q - k).abs(),
    "bound method": lambda m, x: m.capped,
    "global float": lambda m, x: lambda s, b, h, q, k: s + SLOPE * (k % 2),
    "global tensor": lambda m, x: lambda s, b, h, q, k: s + TABLE[k],
    "partial": lambda m, x: functools.partial(plus, table=x.per_head, slope=x.number),
    "derived": lambda m, x: lambda s, b, h, q, k: s + (x.per_key * 2).tanh()[k],
    "both": lambda m, x: lambda s, b, h, q, k: s + x.per_key[q] * x.number + x.per_head[h],
}

MASKS: dict[str, Callable[[Any, Values], Callable[..., Any]]] = {
    "causal": lambda m, x: lambda b, h, q, k: q >= k,
    "window": lambda m, x: lambda b, h, q, k: (q - k).abs() <= x.count,
    "documents": lambda m, x: lambda b, h, q, k: x.ids[q] == x.ids[k],
    "attribute": lambda m, x: lambda b, h, q, k: q - k < m.reach,
    "global int": lambda m, x: lambda b, h, q, k: (k < REACH) | (q >= k),
    "threshold": lambda m, x: lambda b, h, q, k: x.per_key[k] > -x.number,
    "family": lambda m, x: fa4flex.variants.causal & fa4flex.variants.sliding_window(x.count),
}


class Model(nn.Module):
    """One attention layer; `forward` makes its mods from the terms."""

    def __init__(self, scores: tuple[str, ...], masks: tuple[str, ...], twice: bool) -> None:
        super().__init__()
        self.scores, self.masks, self.twice = scores, masks, twice
        self.bias = nn.Parameter(torch.randn(HEADS))
        self.slope, self.reach = 0.5, 4

    def capped(self, s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return torch.tanh(s / (1 + self.slope)) + self.bias[h] * 0.5

    def forward(self, q: Tensor, k: Tensor, v: Tensor, x: Values) -> Tensor:
        out: Tensor = self.attend(q, k, v, x)
        return self.attend(out, k, v, x) if self.twice else out

    def attend(self, q: Tensor, k: Tensor, v: Tensor, x: Values) -> Tensor:
        score, mask = None, None
        for name in self.scores:
            made = fa4flex.as_score(SCORES[name](self, x))
            score = made if score is None else score >> made
        for name in self.masks:
            allowed = fa4flex.as_mask(MASKS[name](self, x))
            mask = allowed if mask is None else mask & allowed
        out: Tensor = fa4flex.attention(q, k, v, score_mod=score, mask=mask)
        return out


def draw() -> Model:
    """A random program, from Python's global generator."""
    scores = tuple(random.sample(sorted(SCORES), random.randint(0, 3)))
    masks = tuple(random.sample(sorted(MASKS), random.randint(0 if scores else 1, 2)))
    return Model(scores, masks, random.random() < 0.4)


def change(model: Model) -> Values:
    """New values for everything that the program may capture."""
    global TABLE, SLOPE, REACH
    TABLE, SLOPE, REACH = torch.randn(LENGTH), random.uniform(-1, 1), random.randint(1, 6)
    model.slope, model.reach = random.uniform(0.1, 1.0), random.randint(2, LENGTH)
    with torch.no_grad():
        model.bias.normal_()
    return Values.draw()
