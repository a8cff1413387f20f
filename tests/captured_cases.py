"""Score mods with learnable tensors, one for each way in which kernels add up gradients; and the same maths
in plain PyTorch at any dtype, by which errors are judged."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from helpers import worst
from torch import Tensor

from fa4flex import reference
from fa4flex.primitives.base import call_mod, settle
from fa4flex.variants import alibi, causal, learned_bias, softcap, t5_bias


class Grid(NamedTuple):
    batch: int
    heads: int
    q_len: int
    kv_len: int


Leaves = list[Tensor]
Make = Callable[[Grid], tuple[dict[str, Any], Leaves]]


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=dtype).requires_grad_()


def scored(mod: Callable[..., Any], *leaves: Tensor, mask: Any = causal) -> tuple[dict[str, Any], Leaves]:
    """Composition of a score mod that takes the leaves after the indices, and the leaves."""

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return mod(score, b, h, q_idx, kv_idx, *leaves)

    return {"score_mod": score_mod, **({} if mask is None else {"mask": mask})}, list(leaves)


def slopes(g: Grid) -> tuple[dict[str, Any], Leaves]:
    given = (torch.rand(g.heads) * 0.2).requires_grad_()
    return {"score_mod": alibi(given), "mask": causal}, [given]


def capped_slopes(g: Grid) -> tuple[dict[str, Any], Leaves]:
    given = (torch.rand(g.batch, g.heads) * 0.1).requires_grad_()
    return {"score_mod": alibi(given) >> softcap(20.0), "mask": causal}, [given]


def clipped(g: Grid) -> tuple[dict[str, Any], Leaves]:
    given = leaf(g.heads, 33)
    return {"score_mod": learned_bias(given), "mask": causal}, [given]


def buckets(g: Grid) -> tuple[dict[str, Any], Leaves]:
    given = leaf(32, g.heads, dtype=torch.bfloat16)
    return {"score_mod": t5_bias(given), "mask": causal}, [given]


def gathered(g: Grid) -> tuple[dict[str, Any], Leaves]:
    ids = torch.randint(0, 9, (g.q_len, g.kv_len))
    return scored(lambda s, b, h, q, k, t: s + t[h, ids[q, k]], leaf(g.heads, 9))


def gathered_rows(g: Grid) -> tuple[dict[str, Any], Leaves]:
    ids = torch.randint(0, 9, (g.q_len, g.kv_len))
    return scored(lambda s, b, h, q, k, t: s + t[h, ids[q, k]].sum(-1), leaf(g.heads, 9, 5))


def strided(g: Grid) -> tuple[dict[str, Any], Leaves]:
    whole = leaf(g.q_len, 2 * g.heads)
    table = whole.mT[::2]
    return scored(lambda s, b, h, q, k: torch.tanh(s) * table[h, q])[0], [whole]


def dense(g: Grid) -> tuple[dict[str, Any], Leaves]:
    table = leaf(g.batch, g.heads, g.q_len, g.kv_len, dtype=torch.bfloat16)
    return scored(lambda s, b, h, q, k, t: s + t[b, h, q, k], table, mask=None)


def along_paths(g: Grid, mask: Any = causal) -> tuple[dict[str, Any], Leaves]:
    """Mean of what up to four edges of a pair add (Graphormer): nine reads for each score."""
    lengths = torch.randint(0, 5, (g.q_len, g.kv_len))
    edges = torch.randint(0, 6, (g.q_len, g.kv_len, 4))

    def mod(s: Any, b: Any, h: Any, q: Any, k: Any, t: Tensor) -> Any:
        length = lengths[q, k]
        steps = [torch.where(length > n, t[h, n, edges[q, k, n]], 0.0) for n in range(4)]
        return s + sum(steps) / torch.clamp(length, min=1)

    return scored(mod, leaf(g.heads, 4, 6), mask=mask)


CASES: dict[str, Make] = {
    "slopes": slopes,
    "slopes under a cap": capped_slopes,
    "temperature": lambda g: scored(lambda s, b, h, q, k, t: s * t, torch.tensor(1.3).requires_grad_()),
    "per key": lambda g: scored(lambda s, b, h, q, k, t: s + t[b, k], leaf(g.batch, g.kv_len), mask=None),
    "per query": lambda g: scored(
        lambda s, b, h, q, k, t: s * torch.sigmoid(t[h, q]), leaf(g.heads, g.q_len)
    ),
    "by distance": lambda g: scored(
        lambda s, b, h, q, k, t: s + t[h, q - k + g.kv_len], leaf(g.heads, g.q_len + g.kv_len), mask=None
    ),
    "by distance, from the end": lambda g: scored(
        lambda s, b, h, q, k, t: s + t[h, q - k], leaf(g.heads, g.q_len + g.kv_len)
    ),
    "clipped distance": clipped,
    "buckets": buckets,
    "dense": dense,
    "dense, masked": lambda g: scored(
        lambda s, b, h, q, k, t: s + 2.0 * t[b, h, q, k], leaf(g.batch, g.heads, g.q_len, g.kv_len)
    ),
    "dense, 16 bits, masked": lambda g: scored(
        lambda s, b, h, q, k, t: s + t[h, b, q, k],
        leaf(g.heads, g.batch, g.q_len, g.kv_len, dtype=torch.bfloat16),
    ),
    "dense, hidden tiles": lambda g: scored(
        lambda s, b, h, q, k, t: s + t[b, h, q, k],
        leaf(g.batch, g.heads, g.q_len, g.kv_len, dtype=torch.bfloat16),
        mask=lambda b, h, q, k: (k >= 128) & (((q // 64 + k // 128) % 2 != 0) | (h == 1)),
    ),
    "dense of all heads": lambda g: scored(
        lambda s, b, h, q, k, t: s + t[b, q, k], leaf(g.batch, g.q_len, g.kv_len, dtype=torch.bfloat16)
    ),
    "gathered": gathered,
    "gathered along paths": lambda g: along_paths(g, mask=None),
    "gathered along paths, masked": along_paths,
    "numbers of the batch and the head": lambda g: scored(
        lambda s, b, h, q, k, t: s + (t[q] + b * 0.25 + h / 4) * ((q * k) % 7 < 3), leaf(g.q_len), mask=None
    ),
    "function of a sum": lambda g: scored(
        lambda s, b, h, q, k, t: s + torch.tanh(s + t[h].sum(-1)), leaf(g.heads, 5)
    ),
    "dot of tables": lambda g: scored(
        lambda s, b, h, q, k, t, u: s + (t[q] * u[k]).sum(-1), leaf(g.q_len, 5), leaf(g.kv_len, 5)
    ),
    "long dot of tables": lambda g: scored(
        lambda s, b, h, q, k, t, u: s + (t[h, q] * u[b, k]).sum(-1),
        leaf(g.heads, g.q_len, 40),
        leaf(g.batch, g.kv_len, 40),
    ),
    "long dot under a cap": lambda g: scored(
        lambda s, b, h, q, k, t, u: s + 3 * torch.tanh((t[q] * u).sum(-1) * (k % 7) / 9),
        leaf(g.q_len, 33),
        leaf(33),
        mask=None,
    ),
    "long rows, gathered": gathered_rows,
    "read twice": lambda g: scored(
        lambda s, b, h, q, k, t: s + t[q] * t[k], leaf(max(g.q_len, g.kv_len)), mask=None
    ),
    "strided": strided,
}


def gradients(
    forward: Callable[..., Any], qkv: Sequence[Tensor], leaves: Leaves, upstream: tuple[Tensor, Tensor]
) -> list[Tensor]:
    """Gradients of q, k, v and leaves, through the output and the log-sum-exp of rows that see something."""
    inputs = [x.detach().requires_grad_() for x in qkv]
    out, lse = forward(*inputs)
    dout, dlse = upstream
    seen = torch.where(lse == -math.inf, 0.0, lse)
    total = (out * dout.to(out.dtype)).sum() + (seen * dlse.to(lse.dtype)).sum()
    # Under a mask that hides every pair, gradients are zeros, not an error.
    return list(torch.autograd.grad(total, [*inputs, *leaves], materialize_grads=True))


def plain(composition: dict[str, Any], q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """out and lse, every operation but the mod's own in the dtype of q."""
    batch, heads, q_len, kv_len = *q.shape[:3], k.shape[2]
    k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    places = [
        torch.arange(n, device=q.device).view([-1 if i == axis else 1 for i in range(4)])
        for axis, n in enumerate((batch, heads, q_len, kv_len))
    ]
    context = {"q_len": q_len, "kv_len": kv_len, "num_heads": heads}
    scores = (q @ k.mT) * (1 / math.sqrt(q.shape[-1]))
    if "score_mod" in composition:
        scores = call_mod(settle(composition["score_mod"]), (scores, *places), context).to(q.dtype)
    if "mask" in composition:
        allowed = call_mod(settle(composition["mask"]), tuple(places), context)
        scores = scores.masked_fill(~allowed, -math.inf)
    if "sinks" in composition:
        column = composition["sinks"].logits.to(q.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], -1)
    return scores.softmax(-1).nan_to_num(0)[..., :kv_len] @ v, scores.logsumexp(-1)


DRAWS, MORE = 3, 6
"""Numbers of draws over which plain PyTorch's worst error is taken. A single draw compares luck: whether the
largest element happens to be near a number of 16 bits."""
FEW = 64
"""Most elements for which MORE draws are taken: in one draw, errors of so few sums over pairs may cancel."""


def over_draws(
    once: Callable[..., tuple[list[Tensor], list[Tensor]]],
    given: Sequence[Tensor],
    sizes: Sequence[int] | None = None,
    more: int = MORE,
) -> tuple[list[Tensor], list[float]]:
    """once(*given) -> the oracle's gradients and plain PyTorch's. The former, and the latter's worst error of
    an element, over several draws of `given`. sizes: of what these are errors, if not of gradients."""

    def errors(exact: list[Tensor], same: list[Tensor]) -> list[float]:
        return [worst(a, b)[0] for a, b in zip(same, exact, strict=True)]

    exact, same = once(*given)
    sizes = sizes or [x.numel() for x in exact]
    count = more if min(sizes) <= FEW else DRAWS
    draws = [errors(exact, same)]
    draws += [errors(*once(*map(torch.randn_like, given))) for _ in range(count - 1)]
    by_gradient = zip(sizes, zip(*draws, strict=True), strict=True)
    return exact, [max(found if size <= FEW else found[:DRAWS]) for size, found in by_gradient]


def measured(
    composition: dict[str, Any],
    qkv: Sequence[Tensor],
    leaves: Leaves,
    upstream: tuple[Tensor, Tensor],
    by: Callable[..., tuple[Tensor, Tensor]] = plain,
) -> tuple[list[Tensor], list[float]]:
    """The oracle's gradients, and the worst error of an element of each in plain PyTorch, which `by` is."""

    def once(*given: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        *qkv, dout, dlse = given
        wide = [x.double() for x in qkv]
        exact = gradients(lambda *x: reference.attention(*x, **composition), wide, leaves, (dout, dlse))
        return exact, gradients(lambda *x: by(composition, *x), qkv, leaves, (dout, dlse))

    return over_draws(once, (*qkv, *upstream))


def judge(where: str, got: Sequence[Tensor], exact: Sequence[Tensor], budgets: Sequence[float]) -> None:
    """At most twice plain PyTorch's error, in the worst element; where that happens to be exact, a rounding
    of the largest."""
    for i, (x, y, budget) in enumerate(zip(got, exact, budgets, strict=True)):
        assert x.shape == y.shape and not x.isnan().any(), f"{where}: gradient {i}"
        error = worst(x, y)[0]
        limit = max(2 * budget, 2**-8 * y.double().abs().max().item())
        assert error <= limit, f"{where}: gradient {i} is off by {error:.3e}, limit {limit:.3e}"
