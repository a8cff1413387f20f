"""Variants written twice, as expressions for the executor and as torch functions for the oracle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fa4flex.codegen.analyze.facts import SCORE, Facts
from fa4flex.codegen.expr import TRUE, Expr, apply, const, load, reduce, sym, to_float

B_, H_, Q_, KV_ = sym("b"), sym("h"), sym("q"), sym("kv")
Mod = Callable[..., Any]


@dataclass(frozen=True)
class Sizes:
    """q [batch, heads, q_len, dim], k [batch, kv_heads, kv_len, dim], v [batch, kv_heads, kv_len, dim_v]."""

    batch: int = 2
    heads: int = 4
    kv_heads: int = 2
    q_len: int = 150
    kv_len: int = 260
    dim: int = 16
    dim_v: int = 16

    def qkv(self, dtype: torch.dtype) -> list[Tensor]:
        shapes = (
            (self.heads, self.q_len, self.dim),
            (self.kv_heads, self.kv_len, self.dim),
            (self.kv_heads, self.kv_len, self.dim_v),
        )
        return [torch.randn(self.batch, *shape, dtype=torch.float64).to(dtype) for shape in shapes]


@dataclass(frozen=True)
class Case:
    """`tables(sizes)` draws the captured tensors; score_mod and mask_mod take them first."""

    score: Expr = SCORE
    mask: Expr = TRUE
    score_mod: Mod | None = None
    mask_mod: Mod | None = None
    tables: Callable[[Sizes], list[Tensor]] = lambda sizes: []

    @property
    def facts(self) -> Facts:
        return Facts(self.score, self.mask)

    def mods(self, tables: list[Tensor]) -> tuple[Mod | None, Mod | None]:
        """The torch functions with their captured tensors bound."""
        return _bind(self.score_mod, tables), _bind(self.mask_mod, tables)


def _bind(mod: Mod | None, tables: list[Tensor]) -> Mod | None:
    if mod is None:
        return None

    def bound(*point: Tensor, **context: int) -> Any:
        return mod(tables, *point, **context)

    names = mod.__code__.co_varnames[: mod.__code__.co_argcount]
    bound.context = tuple(n for n in ("q_len", "kv_len", "num_heads") if n in names)  # type: ignore[attr-defined]
    return bound


def add(*terms: Expr) -> Expr:
    total = terms[0]
    for term in terms[1:]:
        total = apply("add", total, term)
    return total


def mul(a: Expr, b: Expr) -> Expr:
    return apply("mul", a, b)


def table(slot: int, *index: Expr) -> Expr:
    return load(slot, index, "float")


def uniform(*shape: int) -> Tensor:
    return torch.rand(*shape, dtype=torch.float64) * 2 - 1


GAP = apply("sub", Q_, KV_)
CAUSAL = apply("le", KV_, Q_)
WINDOW = apply("and_", CAUSAL, apply("lt", GAP, const(40)))
BOTTOM_RIGHT = apply("le", KV_, add(Q_, apply("sub", sym("kv_len"), sym("q_len"))))
BUCKET = add(apply("minimum", apply("maximum", GAP, const(-8)), const(8)), const(8))
SAME_DOCUMENT = apply("eq", load(0, (Q_,), "int"), load(0, (KV_,), "int"))
I_ = sym("i")


def documents(s: Sizes) -> list[Tensor]:
    return [torch.randint(0, 5, (max(s.q_len, s.kv_len),)).sort().values]


def causal(t: list[Tensor], b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return k <= q


def window(t: list[Tensor], b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (k <= q) & (q - k < 40)


def bottom_right(
    t: list[Tensor], b: Tensor, h: Tensor, q: Tensor, k: Tensor, q_len: int, kv_len: int
) -> Tensor:
    return k <= q + kv_len - q_len


PLAIN = {
    "dense": Case(),
    "causal": Case(mask=CAUSAL, mask_mod=causal),
    "window": Case(mask=WINDOW, mask_mod=window),
    "bottom-right": Case(mask=BOTTOM_RIGHT, mask_mod=bottom_right),
    "document": Case(
        mask=apply("and_", SAME_DOCUMENT, CAUSAL),
        mask_mod=lambda t, b, h, q, k: (t[0][q] == t[0][k]) & (k <= q),
        tables=documents,
    ),
    "window per head": Case(
        mask=apply("and_", CAUSAL, apply("lt", GAP, add(mul(H_, const(50)), const(3)))),
        mask_mod=lambda t, b, h, q, k: (k <= q) & (q - k < h * 50 + 3),
    ),
    "prefix per batch": Case(
        mask=apply("or_", CAUSAL, apply("lt", KV_, load(0, (B_,), "int"))),
        mask_mod=lambda t, b, h, q, k: (k <= q) | (k < t[0][b]),
        tables=lambda s: [torch.randint(0, s.kv_len + 1, (s.batch,))],
    ),
    "rows that see nothing": Case(
        mask=apply(
            "and_", apply("lt", add(Q_, const(3)), KV_), apply("ne", apply("mod", Q_, const(7)), const(2))
        ),
        mask_mod=lambda t, b, h, q, k: (q + 3 < k) & (q % 7 != 2),
    ),
    "nothing at all": Case(
        mask=apply("lt", KV_, const(-1)),
        mask_mod=lambda t, b, h, q, k: k < -1,
    ),
}

MODIFIED = {
    "soft cap": Case(
        mul(apply("tanh", mul(SCORE, const(0.5))), const(2.0)),
        CAUSAL,
        lambda t, s, b, h, q, k: torch.tanh(s * 0.5) * 2.0,
        causal,
    ),
    "alibi": Case(
        add(SCORE, mul(table(0, H_), to_float(GAP))),
        CAUSAL,
        lambda t, s, b, h, q, k: s + t[0][h] * (q - k),
        causal,
        lambda s: [uniform(s.heads) * 0.05],
    ),
    "bias by query": Case(
        add(mul(SCORE, table(1, B_)), table(0, B_, H_, Q_)),
        CAUSAL,
        lambda t, s, b, h, q, k: s * t[1][b] + t[0][b, h, q],
        causal,
        lambda s: [uniform(s.batch, s.heads, s.q_len), uniform(s.batch)],
    ),
    "bias by key": Case(
        add(SCORE, apply("sin", mul(table(0, KV_), SCORE))),
        WINDOW,
        lambda t, s, b, h, q, k: s + torch.sin(t[0][k] * s),
        window,
        lambda s: [uniform(s.kv_len)],
    ),
    "bias by distance": Case(
        add(SCORE, mul(table(0, H_, add(GAP, const(400))), table(0, H_, add(GAP, const(400))))),
        BOTTOM_RIGHT,
        lambda t, s, b, h, q, k: s + t[0][h, q - k + 400] ** 2,
        bottom_right,
        lambda s: [uniform(s.heads, 1000)],
    ),
    "buckets": Case(
        add(SCORE, table(0, BUCKET)),
        TRUE,
        lambda t, s, b, h, q, k: s + t[0][(q - k).clamp(-8, 8) + 8],
        None,
        lambda s: [uniform(17)],
    ),
    "bias by pair": Case(
        add(SCORE, table(0, Q_, KV_)),
        WINDOW,
        lambda t, s, b, h, q, k: s + t[0][q, k],
        window,
        lambda s: [uniform(s.q_len, s.kv_len)],
    ),
    "one table twice": Case(
        add(SCORE, mul(table(0, Q_), table(0, apply("neg", add(KV_, const(1)))))),
        WINDOW,
        lambda t, s, b, h, q, k: s + t[0][q] * t[0][-(k + 1)],
        window,
        lambda s: [uniform(max(s.q_len, s.kv_len))],
    ),
    "dot of tables": Case(
        add(SCORE, reduce("sum", "i", 3, mul(table(0, H_, Q_, I_), table(1, KV_, I_)))),
        CAUSAL,
        lambda t, s, b, h, q, k: s + sum(t[0][h, q, q * 0 + i] * t[1][k, k * 0 + i] for i in range(3)),
        causal,
        lambda s: [uniform(s.heads, s.q_len, 3), uniform(s.kv_len, 3)],
    ),
    "product of tables": Case(
        mul(SCORE, reduce("prod", "i", 2, mul(table(0, I_), table(1, KV_, I_)))),
        WINDOW,
        lambda t, s, b, h, q, k: s * t[0][0] * t[0][1] * t[1][k, k * 0] * t[1][k, k * 0 + 1],
        window,
        lambda s: [uniform(2) + 2, uniform(s.kv_len, 2)],
    ),
    "mask in the score": Case(
        apply("where", apply("le", KV_, apply("sub", Q_, const(5))), SCORE, const(float("-inf"))),
        TRUE,
        lambda t, s, b, h, q, k: torch.where(k <= q - 5, s, -float("inf")),
        None,
    ),
    "infinite where masked": Case(
        # At q == kv, which the mask hides, the score and its slopes are infinite or NaN.
        add(apply("div", SCORE, to_float(GAP)), mul(table(0, H_), apply("log", to_float(GAP)))),
        apply("lt", KV_, Q_),
        lambda t, s, b, h, q, k: s / (q - k) + t[0][h] * torch.log((q - k).double()),
        lambda t, b, h, q, k: k < q,
        lambda s: [uniform(s.heads)],
    ),
    "table as long as the window": Case(
        add(SCORE, table(0, H_, GAP)),
        WINDOW,
        lambda t, s, b, h, q, k: s + t[0][h, q - k],
        window,
        lambda s: [uniform(s.heads, 40)],
    ),
    "named heads": Case(
        mul(SCORE, apply("div", to_float(add(H_, const(1))), to_float(sym("num_heads")))),
        CAUSAL,
        lambda t, s, b, h, q, k, num_heads: s * ((h + 1) / num_heads),
        causal,
    ),
}
CASES = {**PLAIN, **MODIFIED}
