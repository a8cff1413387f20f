"""Errors of a result against float64, on a random subset of query rows, beside plain PyTorch's errors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fa4flex import reference
from fa4flex.bench.peers import Problem, Run
from fa4flex.bench.suites import BLOCK
from fa4flex.primitives.base import call_mod

HEADS, QUERIES = 8, 32
"""Number of (batch, head) pairs looked at, and of query rows of each."""
WHOLE_HEADS = 2
"""Number of (batch, head) pairs whose gradients are looked at; all rows of a head add to them."""

MOST_ROWS = 8192
"""Query rows whose scores are held at once: more are done one part after another."""

Qkv = tuple[Tensor, Tensor, Tensor]
"""Tensors of a pick: q [R, head_dim], k [keys, head_dim] and v [keys, value_dim]."""


@dataclass(frozen=True)
class Pick:
    """Some query rows of one head: `rows` int64 [R]."""

    b: int
    h: int
    rows: Tensor


@dataclass(frozen=True)
class Accuracy:
    """Largest error of an element, and largest Euclidean error of a row; and those of plain PyTorch."""

    element: float
    row: float
    plain_element: float
    plain_row: float

    @property
    def ratio(self) -> float:
        """Error over plain PyTorch's, the worse of elements and rows; NaN where a result is not finite."""
        pairs = (self.element, self.plain_element), (self.row, self.plain_row)
        if any(math.isnan(error) for error, _ in pairs):
            return math.nan
        return max(error / plain if plain else math.inf if error else 1.0 for error, plain in pairs)


def picks(problem: Problem, seed: int) -> list[Pick]:
    """Random heads and rows, always with the first and last row and those at a tile's border; of a backward
    row, heads with all their rows."""
    row, device = problem.row, problem.q.device
    generator = torch.Generator().manual_seed(seed)
    heads = torch.randperm(row.batch * row.heads, generator=generator)[:HEADS].tolist()
    if row.backward:
        every = torch.arange(row.length, device=device)
        return [Pick(head // row.heads, head % row.heads, every) for head in heads[:WHOLE_HEADS]]
    borders = [i for i in (0, 1, BLOCK - 1, BLOCK, row.length - 1) if i < row.length]
    results = []
    for head in heads:
        drawn = torch.randperm(row.length, generator=generator)[: QUERIES - len(borders)].tolist()
        rows = torch.tensor(sorted({*borders, *drawn}), device=device)
        results.append(Pick(head // row.heads, head % row.heads, rows))
    return results


def exact_rows(problem: Problem, pick: Pick, qkv: Qkv) -> Tensor:
    """float64 [R, head_dim]: the oracle, asked about these rows only."""
    q, k, v = (x[None, None] for x in qkv)
    score_mod, mask_mod = problem.mods.score_mod, problem.mods.mask_mod
    with torch.device(q.device):
        out, _ = reference.attention(
            q,
            k,
            v,
            score_mod and _at(problem, pick, score_mod, leading=1),
            mask_mod and _at(problem, pick, mask_mod, leading=0),
        )
    return out[0, 0]


def plain_rows(problem: Problem, pick: Pick, qkv: Qkv) -> Tensor:
    """The same rows by PyTorch operations in the inputs' own dtype, with the whole score matrix."""
    q, k, v = qkv
    scores = (q @ k.mT) / math.sqrt(q.shape[-1])
    b, h = (torch.tensor(i, device=q.device) for i in (pick.b, pick.h))
    index = (b, h, pick.rows[:, None], torch.arange(k.shape[0], device=q.device)[None, :])
    context = _context(problem)
    if problem.mods.score_mod is not None:
        scores = call_mod(problem.mods.score_mod, (scores, *index), context).to(q.dtype)
    if problem.mods.mask_mod is not None:
        scores = scores.masked_fill(~call_mod(problem.mods.mask_mod, index, context), -math.inf)
    return scores.softmax(-1) @ v


def tensors(problem: Problem, pick: Pick) -> Qkv:
    b, row = pick.b, problem.row
    k, v = problem.k[b, pick.h // row.group], problem.v[b, pick.h // row.value_group]
    return problem.q[b, pick.h, pick.rows], k, v


Way = Callable[[Problem, Pick, Qkv], Tensor]


def computed(way: Way, problem: Problem, pick: Pick, dtype: torch.dtype | None = None) -> tuple[Tensor, ...]:
    """The pick's rows of the output; or of a backward row, the gradients of its q, k and v: to those of k and
    v, all heads add that share them."""
    if problem.dout is None:
        return (way(problem, pick, tensors(problem, pick)),)
    groups = problem.row.group, problem.row.value_group
    sharing = [range(pick.h // group * group, (pick.h // group + 1) * group) for group in groups]
    own, sums = None, list[Tensor | None]([None, None])
    for head in sorted(set().union(*sharing)):
        results = [
            _gradients(way, problem, Pick(pick.b, head, rows), dtype) for rows in pick.rows.split(MOST_ROWS)
        ]
        if head == pick.h:
            own = torch.cat([dq for dq, _, _ in results])
        for _, *added in results:
            for i, (x, heads) in enumerate(zip(added, sharing, strict=True)):
                if head in heads:
                    before = sums[i]
                    sums[i] = x if before is None else before + x
    assert own is not None
    return own, *(x.to(own.dtype) for x in sums if x is not None)


def _gradients(
    way: Way, problem: Problem, pick: Pick, dtype: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient of the pick's rows of q, and what these add to the gradients of k and v, float32 or wider."""
    assert problem.dout is not None
    q, k, v = (x.to(dtype, copy=True).requires_grad_() for x in tensors(problem, pick))
    with torch.enable_grad():
        out = way(problem, pick, (q, k, v))
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), problem.dout[pick.b, pick.h, pick.rows].to(out.dtype))
    wide = torch.promote_types(dk.dtype, torch.float32)
    return dq, dk.to(wide), dv.to(wide)


def _context(problem: Problem) -> dict[str, int]:
    row = problem.row
    return {"q_len": row.length, "kv_len": row.keys, "num_heads": row.heads}


def _at(problem: Problem, pick: Pick, mod: Callable[..., Any], leading: int) -> Callable[..., Any]:
    """`mod` where entry 0, head 0 and query i of a small problem are those of the pick."""
    context = _context(problem)

    def moved(*point: Any) -> Any:
        b, h, q_idx, kv_idx = point[leading:]
        return call_mod(mod, (*point[:leading], b + pick.b, h + pick.h, pick.rows[q_idx], kv_idx), context)

    moved.context = ()  # type: ignore[attr-defined]
    return moved


@dataclass(frozen=True)
class Truth:
    """Exact rows of a problem, and how far plain PyTorch is from them."""

    picks: tuple[Pick, ...]
    exact: tuple[tuple[Tensor, ...], ...]
    """Exact rows of every pick, for each result (the output; or three gradients)."""
    plain: tuple[tuple[float, float], ...]


def truth(problem: Problem, seed: int) -> Truth:
    chosen = tuple(picks(problem, seed))
    exact = tuple(zip(*(computed(exact_rows, problem, p, torch.float64) for p in chosen), strict=True))
    plain = zip(*(computed(plain_rows, problem, p) for p in chosen), strict=True)
    return Truth(chosen, exact, tuple(worst(*pair) for pair in zip(plain, exact, strict=True)))


def accuracy(problem: Problem, run: Run, known: Truth) -> Accuracy:
    """Errors of one call, whose output memory held NaN before; of the worst of its results."""
    poison(problem.q)
    with torch.no_grad():
        outcome = run()
    results = outcome if isinstance(outcome, tuple) else (outcome,)
    judged = []
    for i, (result, exact, plain) in enumerate(zip(results, known.exact, known.plain, strict=True)):
        group = (1, problem.row.group, problem.row.value_group)[i]
        rows = [result[p.b, p.h // group] if i else result[p.b, p.h, p.rows] for p in known.picks]
        judged.append(Accuracy(*worst(rows, exact), *plain))
    return max(judged, key=lambda one: math.inf if math.isnan(one.ratio) else one.ratio)


def poison(like: Tensor, copies: int = 4) -> None:
    """Leave NaN in freed memory of this size, which the caching allocator hands out next.

    An element that a kernel forgets to write is then NaN, not what an earlier call left there.
    """
    held = [torch.full_like(like, math.nan, memory_format=torch.contiguous_format) for _ in range(copies)]
    del held


def worst(results: Sequence[Tensor], exact: Sequence[Tensor]) -> tuple[float, float]:
    """Largest error of an element, and largest Euclidean error of a row."""
    error = torch.cat([f.double() - e for f, e in zip(results, exact, strict=True)])
    return error.abs().max().item(), error.norm(dim=-1).max().item()
