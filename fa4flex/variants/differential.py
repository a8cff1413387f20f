"""Differential attention: the difference of two maps over one head of values.

    out[b, h] = out'[b, 2h] - factor * out'[b, 2h + 1]

Heads 2h and 2h + 1 of the queries make the maps, by heads of keys of their own; out' is attention of all of
them, which share a head of values twice as wide: v has half as many heads as k.

Source: Ye et al., "Differential Transformer", arXiv:2410.05258, section 2.1 (equations 1 to 3), and its
published code for the order of heads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fa4flex.errors import InputError
from fa4flex.variants._cases import Case, Drawn, Sizes, show_table
from fa4flex.variants._common import whole
from fa4flex.variants.causal import causal


@dataclass(frozen=True)
class Differential:
    """Differential attention of one layer, the first of which is number 1.

    Compile attention as usual, and call it with q [B, 2n, S, d], k [B, 2m, S, d] and v [B, m, S, 2d], n a
    multiple of m; then `subtract`. The paper normalises heads (RMS norm) and multiplies by 1 - init after it.
    """

    layer: int = 1

    def __post_init__(self) -> None:
        whole("differential", "layer", self.layer)

    @property
    def init(self) -> float:
        """Initial value of the factor, 0.8 - 0.6 exp(-0.3 (layer - 1))."""
        return 0.8 - 0.6 * math.exp(-0.3 * (self.layer - 1))

    def factor(self, q1: Tensor, k1: Tensor, q2: Tensor, k2: Tensor) -> Tensor:
        """The factor, exp(q1 . k1) - exp(q2 . k2) + init, of learned vectors [d], or [n, d] for a factor [n]
        of each head; float32 at least."""
        first, second = ((q * k).sum(-1, dtype=_wide(q)).exp() for q, k in ((q1, k1), (q2, k2)))
        return first - second + self.init

    def subtract(self, out: Tensor, factor: Tensor | float, heads: int = 1) -> Tensor:
        """Output [B, n, S, 2d] of attention's [B, 2n, S, 2d]; factor: a number or a tensor [n].

        heads: the dimension of `out` that has them; 2 of layout "bshd", 1 of packed [T, 2n, 2d]. Computed in
        float32 at least, and rounded once. Differentiable. Raises InputError for an odd number of heads.
        """
        if out.ndim <= heads or out.shape[heads] % 2:
            raise InputError(
                f"out {list(out.shape)} with heads in dimension {heads}",
                "an even number of heads, each two of which are the maps of one",
                'pass heads=2 for layout "bshd"',
            )
        first, second = out.unflatten(heads, (-1, 2)).to(_wide(out)).unbind(heads + 1)
        if isinstance(factor, Tensor) and factor.ndim == 1:
            factor = factor.view(-1, *[1] * (first.ndim - heads - 1))
        return (first - factor * second).to(out.dtype)

    def check(self, q: Tensor, k: Tensor, v: Tensor, heads: int = 1) -> None:
        """Raise InputError unless these are the queries, keys and values of differential attention."""
        counts = [x.shape[heads] for x in (q, k, v)]
        of_q, of_k, of_v = counts
        if of_k != 2 * of_v or of_q % of_k or v.shape[-1] != 2 * k.shape[-1]:
            raise InputError(
                f"{of_q} query heads, {of_k} heads of keys of width {k.shape[-1]} and {of_v} heads of values "
                f"of width {v.shape[-1]}",
                "2n query heads, 2m heads of keys, and m heads of values twice as wide, m a divisor of n",
                "split the projections so: v.unflatten(-1, (m, 2 * d))",
            )


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def differential(layer: int = 1) -> Differential:
    """Differential attention of the layer of this number, the first being 1."""
    return Differential(layer)


def definition(maps: tuple[list[float], list[float]], values: list[float], factor: float) -> float:
    """One number of the output from the scores of both maps."""
    first, second = ([math.exp(x) / sum(map(math.exp, row)) for x in row] for row in maps)
    return sum((a - factor * b) * x for a, b, x in zip(first, second, values, strict=True))


def main() -> None:
    maps, values, factor = ([1.0, -0.5], [0.25, 2.0]), [3.0, -1.0], differential(2).init
    outs = [sum(p * x for p, x in zip(torch.tensor(row).softmax(0).tolist(), values)) for row in maps]
    found = differential().subtract(torch.tensor(outs, dtype=torch.float64).view(1, 2, 1, 1), factor).item()
    if not math.isclose(found, definition(maps, values, factor), rel_tol=1e-6):
        raise AssertionError(f"{found} from both outputs, {definition(maps, values, factor)} by definition")
    show_table([("layer", "init"), *((layer, differential(layer).init) for layer in (1, 2, 12))])


def _two_maps(s: Sizes) -> Drawn:
    composition: dict[str, Any] = {"mask": causal}
    return Drawn(lambda: composition, None, s.q_len, s.kv_len, dims=(8, 16))


CASES = (Case(_two_maps),)
PICTURE = None


if __name__ == "__main__":
    main()
