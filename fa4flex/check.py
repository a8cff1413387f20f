"""A compiled attention against the dense float64 formula, forward and backward, on random inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fa4flex import reference
from fa4flex.primitives.dropout import Dropout
from fa4flex.primitives.precision import refuse_codes
from fa4flex.primitives.weights import SOFTMAX
from fa4flex.view.sizes import implied, setting

if TYPE_CHECKING:
    from fa4flex.api import Attention

HEAD_DIM = 32
ROUNDINGS = 256
"""Tolerance in units of float32's epsilon: sums over some hundred keys, then over heads and queries."""


@dataclass(frozen=True)
class Comparison:
    """One result: its largest error, and the largest error allowed."""

    name: str
    error: float
    tolerance: float

    @property
    def passed(self) -> bool:
        return self.error <= self.tolerance  # False for NaN

    def __str__(self) -> str:
        verdict = "ok" if self.passed else "FAILED"
        return f"{self.name:<10} error {self.error:.2e}   tolerance {self.tolerance:.2e}   {verdict}"


@dataclass(frozen=True)
class Report:
    """All comparisons of one check."""

    title: str
    comparisons: tuple[Comparison, ...]

    @property
    def passed(self) -> bool:
        return all(c.passed for c in self.comparisons)

    def __str__(self) -> str:
        return "\n".join([self.title, *map(str, self.comparisons)])


def check(attn: Attention, q_len: int = 200, kv_len: int | None = None, seed: int = 0) -> Report:
    """`attn` in float32 against fa4flex.reference in float64, at these lengths.

    Compares out, lse where the normaliser has one, and the gradients of q, k, v and every captured tensor
    that requires one. Raises UnsupportedError for a precision that rounds q and k.
    """
    refuse_codes(
        attn.variant.precision,
        "in a check against the exact formula",
        "run python -m fa4flex accuracy",
    )
    program = attn.program
    chosen = setting(program, q_len, q_len if kv_len is None else kv_len)
    shape, variant = chosen.shape, attn.variant
    generator = torch.Generator().manual_seed(seed)
    of_v = implied(program).get("d", HEAD_DIM)
    extents = (shape.q_len, HEAD_DIM), (shape.kv_len, HEAD_DIM), (shape.kv_len, of_v), (shape.q_len, of_v)
    q, k, v, d_out = (
        torch.randn(shape.batch, shape.heads, *extent, generator=generator) for extent in extents
    )
    function = program.of_output
    captured = (*program.operands, *(() if function is None else function.operands))
    bases = {o.name: o.base for o in captured}
    sinks = None if variant.sinks is None else variant.sinks.now()
    has_lse = variant.weights == SOFTMAX
    arguments = {**bases, "sinks": sinks}
    learned = {name: x for name, x in arguments.items() if isinstance(x, Tensor) and x.requires_grad}

    dropout = variant.dropout
    if dropout is not None and dropout.seed is None:
        dropout = Dropout(dropout.p, seed)

    def ours(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if variant.layout == "bshd":
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if has_lse:
            out, lse = attn(q, k, v, return_lse=True, dropout=dropout)
        else:
            out, lse = attn(q, k, v, dropout=dropout), q.new_zeros(())
        return (out.transpose(1, 2) if variant.layout == "bshd" else out), lse

    def exact(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        mods = variant.score_mod, variant.allowed
        rest: dict[str, Any] = {
            "scale": variant.scale,
            "sinks": sinks,
            "output_mod": variant.output_mod,
            "dropout": dropout,
            "normalizer": variant.normalizer,
        }
        out, lse = reference.attention(q, k, v, *mods, **rest)
        return out, lse if has_lse else q.new_zeros(())

    result = _results(ours, (q, k, v), d_out, learned)
    wanted = _results(exact, tuple(x.double() for x in (q, k, v)), d_out.double(), learned)
    title = (
        f"{attn!r}\nbatch {shape.batch}, heads {shape.heads}, q_len {shape.q_len}, kv_len {shape.kv_len}, "
        f"head_dim {HEAD_DIM}, float32 against the dense formula in float64"
    )
    return Report(
        "\n".join([title, *chosen.notes]),
        tuple(_compare(name, result[name].detach(), wanted[name].detach()) for name in wanted),
    )


def _results(
    attention: Callable[..., tuple[Tensor, Tensor]],
    qkv: tuple[Tensor, ...],
    d_out: Tensor,
    learned: dict[str, Tensor],
) -> dict[str, Tensor]:
    """out, lse and all gradients. The loss depends on the finite part of the LSE too."""
    leaves = [x.detach().clone().requires_grad_() for x in qkv]
    out, lse = attention(*leaves)
    loss = (out * d_out).sum() + lse[torch.isfinite(lse)].sum()
    names = ["dq", "dk", "dv", *(f"d{name}" for name in learned)]
    wanted = [*leaves, *learned.values()]
    gradients = torch.autograd.grad(loss, wanted, allow_unused=True)
    zeros = (torch.zeros_like(x) if g is None else g for g, x in zip(gradients, wanted))
    return {"out": out, "lse": lse, **dict(zip(names, zeros))}


def _compare(name: str, result: Tensor, wanted: Tensor) -> Comparison:
    result, wanted = result.double(), wanted.double()
    same = result == wanted  # -inf of a row without keys equals -inf
    error = torch.where(same, 0.0, (result - wanted).abs())
    scale = wanted[torch.isfinite(wanted)].abs().max().item() if torch.isfinite(wanted).any() else 1.0
    tolerance = ROUNDINGS * torch.finfo(torch.float32).eps * max(scale, 1.0)
    return Comparison(name, float(error.max()), tolerance)
