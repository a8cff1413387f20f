"""Scores of queries and keys, or of pooled ones, by a function that is traced as a score mod is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fa4flex.codegen.analyze.domain import Shape
from fa4flex.codegen.analyze.facts import SCORE
from fa4flex.codegen.analyze.overflow import fitted
from fa4flex.codegen.build import Bound, bind
from fa4flex.codegen.evaluate import Captured, evaluate
from fa4flex.codegen.expr import Expr
from fa4flex.contents import checked_here
from fa4flex.default_device import on_the_host
from fa4flex.errors import InputError
from fa4flex.kernels.scores.config import WIDEST
from fa4flex.primitives.kept import steps
from fa4flex.primitives.pooled import products, wide
from fa4flex.primitives.score import as_score
from fa4flex.select.launched import ProductsByLaunch, by_launch
from fa4flex.select.pooling import Pooled, check_tokens
from fa4flex.select.scores import Reduction, Scores, checked_reduction, checked_weights
from fa4flex.variant import Variant, default_scale

MOST_AT_ONCE = 1 << 25
"""Scores that are held before they are reduced; rows of queries are taken in parts where there are more, and
something is made of them."""


@on_the_host
def score(
    q: Tensor | Pooled,
    k: Tensor | Pooled,
    fn: Callable[..., Any] | None = None,
    *,
    over_heads: str | Reduction | Tensor | None = None,
    over_queries: Reduction | None = None,
    over_keys: Reduction | None = None,
    scale: float | None = None,
) -> Scores:
    """Scores of blocks of keys for rows of queries: fn(scale * q.k, b, h, q_idx, kv_idx), reduced.

    q, k          [B, Hq, Sq, D] and [B, Hk, Skv, D], Hq a multiple of Hk, or what `pool` makes of them
    fn            as a score mod of FlexAttention: any tensor it captures, q_len, kv_len, num_heads; of pooled
                  tensors, q_idx and kv_idx are the first tokens of their blocks. None: the scaled product
    over_keys     ("sum", "mean", "max" or "logsumexp", n): over n neighbouring keys, or pooled keys
    over_queries  the same of queries, after that over keys
    over_heads    after both: the name alone over all heads, ("max", n) over groups of neighbours of which n
                  are left, as heads of keys are, or weights [Hq] or [B, Hq, rows] for a weighted sum. None:
                  each query head has scores of its own
    scale         multiplies q.k; default 1 / sqrt(D)

    Returns Scores in float32, float64 for float64. Differentiable in q, k, weights, and what fn captured. For
    another order of reductions, reduce twice: `score(..., over_heads=w).reduced(over_keys=("max", 64))`. For
    functions and reductions, rows of queries are taken in parts of at most 2**25 scores. Raises InputError,
    and TraceError for functions that cannot be traced.
    """
    rows, columns = _pooled(q, "q"), _pooled(k, "k")
    _check(rows.values, columns.values)
    step = 1 if over_queries is None else checked_reduction("over_queries", over_queries)
    factor = default_scale(rows.values.shape[-1]) if scale is None else scale
    if not isinstance(factor, (int, float)) or isinstance(factor, bool) or factor - factor != 0:
        raise InputError(f"scale={scale!r}", "a finite number", "leave scale out for 1 / sqrt(D)")
    function = _Function.of(fn, rows, columns)
    batch, heads, count, _ = rows.values.shape
    part = count
    if any(x is not None for x in (fn, over_heads, over_queries, over_keys)):
        most = max(MOST_AT_ONCE // max(batch * heads * columns.values.shape[2], 1), 1)
        part = max(most // step, 1) * step
    weights = over_heads if isinstance(over_heads, Tensor) and over_heads.ndim == 3 else None
    if weights is not None:  # parts of it fit parts of the rows, whatever there is behind them
        checked_weights(weights, (batch, heads, -(-count // step)))
        weights = over_heads = weights.to(wide(rows.values, columns.values))
    results = []
    for first in range(0, count, part):
        last = min(first + part, count)
        q_len = min(last * rows.block, rows.length) - first * rows.block
        values = function(products_of(rows.values[:, :, first:last], columns.values, factor), first)
        made = Scores(values, rows.block, columns.block, q_len, columns.length)
        how = over_heads
        if weights is not None and weights.shape[2] != 1:
            how = weights[:, :, first // step : -(-last // step)]
        results.append(made.reduced(how, over_queries, over_keys))
    values = torch.cat([x.values for x in results], 2) if len(results) > 1 else results[0].values
    return Scores(values, results[0].queries, results[0].keys, rows.length, columns.length)


def _pooled(x: Tensor | Pooled, name: str) -> Pooled:
    """Single tokens are blocks of one."""
    if isinstance(x, Pooled):
        return x
    check_tokens(name, x)
    return Pooled(x, 1, x.shape[2])


def _check(q: Tensor, k: Tensor) -> None:
    fits = q.shape[0] == k.shape[0] and q.shape[3] == k.shape[3] and q.shape[1] % k.shape[1] == 0
    if not fits or q.device != k.device:
        raise InputError(
            f"q {list(q.shape)} on {q.device}, k {list(k.shape)} on {k.device}",
            "one batch, one width, query heads a multiple of the heads of k, one device",
            "pool both alike",
        )


def products_of(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """scale * q.k as float32 or float64 [B, Hq, R, C]."""
    if q.shape[3] <= WIDEST and by_launch(q, k):
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad):
            return ProductsByLaunch.apply(q, k, scale)
        return torch.ops.fa4flex.scores(q, k, scale)
    return products(q, k, scale)


class _Function(NamedTuple):
    """A function of scores, traced."""

    root: Expr
    bound: Bound | None
    rows: Pooled
    columns: Pooled

    @staticmethod
    def of(fn: Callable[..., Any] | None, rows: Pooled, columns: Pooled) -> _Function:
        if fn is None:
            return _Function(SCORE, None, rows, columns)
        bound = bind(Variant(score_mod=as_score(fn)))
        return _Function(bound.trace.facts.score, bound, rows, columns)

    def __call__(self, products: Tensor, first: int) -> Tensor:
        """Values at scores of the rows from number `first`."""
        if self.bound is None:
            return products
        (batch, heads, rows, columns), device = products.shape, products.device
        last = -(-self.rows.length // self.rows.block)
        q = steps(0, last, self.rows.block, device)[first : first + rows]
        shape = Shape(batch, heads, self.rows.length, self.columns.length)
        symbols: dict[str, Any] = {
            "score": products,
            "b": steps(0, batch, 1, device).view(-1, 1, 1, 1),
            "h": steps(0, heads, 1, device).view(-1, 1, 1),
            "q": q.view(-1, 1),
            "kv": steps(0, columns, self.columns.block, device),
            "q_len": shape.q_len, "kv_len": shape.kv_len, "num_heads": heads,
        }  # fmt: skip
        captured = Captured(self.bound.trace.tensors(self.bound.bases), self.bound.scalars)
        _check_devices(captured, products)
        host = checked_here(products)
        captured = captured.signed() if host else captured.clamped_reads()
        roots = fitted([self.root], shape, captured if host else captured.unread())
        (value,) = evaluate(roots, symbols, captured, products.dtype)
        return torch.as_tensor(value, dtype=products.dtype, device=device).expand(products.shape)


def _check_devices(captured: Captured, products: Tensor) -> None:
    for tensor in captured.operands:
        if tensor.device != products.device:
            raise InputError(
                f"a captured tensor on {tensor.device}, q on {products.device}",
                "captured tensors on the device of q and k",
                f"move it with .to({str(products.device)!r}) before it is captured",
            )
