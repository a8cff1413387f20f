"""Every case of every variant, at small sizes and in float64, as compositions over learned tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from helpers import leaf
from torch import Tensor
from variant_files import cases_of

from fa4flex import variants
from fa4flex.variants import _cases

Composition = dict[str, Any]


@dataclass(frozen=True)
class Sizes(_cases.Sizes):
    """q [batch, heads, q_len, dim], k [batch, kv_heads, kv_len, dim], v [batch, kv_heads, kv_len, dim_v]."""

    batch: int = 3
    heads: int = 4
    kv_heads: int = 2
    q_len: int = 23
    kv_len: int = 37
    dim: int = 6
    dim_v: int = 5
    scale: float = field(default=0.04, kw_only=True)

    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        return (
            leaf(self.batch, self.heads, self.q_len, self.dim),
            leaf(self.batch, self.kv_heads, self.kv_len, self.dim),
            leaf(self.batch, self.kv_heads, self.kv_len, self.dim_v),
        )

    def learned(self, values: Tensor) -> Tensor:
        return values.double().requires_grad_()


@dataclass(frozen=True)
class Case:
    """`compose(*learned)` is what fa4flex.compile takes; gradients must reach all of `learned`."""

    sizes: Sizes
    compose: Callable[..., Composition]
    learned: tuple[Tensor, ...] = ()


Draw = Callable[[Sizes], Case]


def _drawn(case: _cases.Case, given: Sizes) -> Case:
    drawn = case.draw(given)
    dim, dim_v = drawn.dims or (given.dim, given.dim_v)
    sizes = replace(given, q_len=drawn.q_len, kv_len=drawn.kv_len, dim=dim, dim_v=dim_v)
    return Case(sizes, drawn.compose, drawn.learned)


TABLE: dict[str, tuple[Draw, ...]] = {
    name: tuple(partial(_drawn, case) for case in cases_of(name)) for name in variants.__all__
}
