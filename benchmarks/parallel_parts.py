"""Errors of a row of benchmarks/parallel.py, and times of an exchange and of its kernels apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fa4flex.parallel import Placement
from fa4flex.parallel.links import Links

SAMPLES, AT_ONCE = 16, 8192
"""Queries and keys of each rank whose errors are looked at; queries whose scores are made at once."""

NAMES = "out", "dq", "dk", "dv"


class Errors:
    """Largest errors of some rows, beside one GPU's. row: has heads, kv_heads and logits(q, kv)."""

    def __init__(self, row: Any, whole: Sequence[Tensor], attn: Any) -> None:
        self.row = row
        self.q, self.k, self.v, self.dout = whole
        self.group = row.heads // row.kv_heads
        self.scale = self.q.shape[-1] ** -0.5
        leaves = [x.detach().clone().requires_grad_() for x in whole[:3]]
        out, lse = attn(*leaves, return_lse=True)
        self.lse = lse.detach()
        self.one = [out.detach(), *torch.autograd.grad(out, leaves, self.dout)]

    def shares(self, results: Sequence[Tensor], placement: Placement, rank: int) -> dict[str, float]:
        """Largest error of each result, on any rank, in what is allowed: twice one GPU's."""
        positions = placement.positions(rank).to(self.q.device)
        local = torch.linspace(0, len(positions) - 1, SAMPLES, device=self.q.device).long().unique()
        places = positions[local]
        exact = [*self._of_queries(places), *self._of_keys(places)]
        worst = torch.tensor(
            [
                [_largest(mine[:, :, local], x), _largest(one[:, :, places], x)]
                for mine, one, x in zip(results, self.one, exact, strict=True)
            ],
            device=self.q.device,
        )
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        return {name: mine / (2 * one) for name, (mine, one) in zip(NAMES, worst.tolist(), strict=True)}

    def _scores(self, q: Tensor, k: Tensor, at: Tensor, keys: Tensor) -> Tensor:
        """float64 [KV heads, group, queries, keys]."""
        products = torch.einsum("kgqd,ksd->kgqs", self._grouped(q), k[0].double()) * self.scale
        logits: Tensor = self.row.logits(at, keys)
        return products + (logits if len(logits) == 1 else logits.unflatten(0, (-1, self.group)))

    def _grouped(self, x: Tensor) -> Tensor:
        return x[0].double().unflatten(0, (-1, self.group))

    def _of_queries(self, places: Tensor) -> list[Tensor]:
        """out and dq of these queries."""
        keys = torch.arange(self.k.shape[2], device=self.k.device)
        p = self._scores(self.q[:, :, places], self.k, places, keys).softmax(-1)
        out = torch.einsum("kgqs,ksd->kgqd", p, self.v[0].double())
        dp = torch.einsum("kgqd,ksd->kgqs", self._grouped(self.dout[:, :, places]), self.v[0].double())
        ds = p * (dp - (p * dp).sum(-1, keepdim=True))
        dq = torch.einsum("kgqs,ksd->kgqd", ds, self.k[0].double()) * self.scale
        return [out.flatten(0, 1)[None], dq.flatten(0, 1)[None]]

    def _of_keys(self, places: Tensor) -> list[Tensor]:
        """dk and dv of these keys, from the log-sum-exps and outputs of one GPU, as its kernels have them."""
        k, v = self.k[:, :, places], self.v[0, :, places].double()
        found = [torch.zeros(k.shape[1:], dtype=torch.float64, device=k.device) for _ in range(2)]
        for lo in range(0, self.q.shape[2], AT_ONCE):
            q, dout, out = (x[:, :, lo : lo + AT_ONCE] for x in (self.q, self.dout, self.one[0]))
            at = torch.arange(lo, lo + q.shape[2], device=q.device)
            lse = self.lse[0, :, lo : lo + AT_ONCE].double().unflatten(0, (-1, self.group))
            p = (self._scores(q, k, at, places) - lse[..., None]).exp()
            upstream = self._grouped(dout)
            delta = (upstream * self._grouped(out)).sum(-1, keepdim=True)
            ds = p * (torch.einsum("kgqd,ksd->kgqs", upstream, v) - delta)
            found[0] += torch.einsum("kgqs,kgqd->ksd", ds, self._grouped(q)) * self.scale
            found[1] += torch.einsum("kgqs,kgqd->ksd", p, upstream)
        return [x[None] for x in found]


def _largest(x: Tensor, exact: Tensor) -> float:
    return float((x.double() - exact).abs().max())


# --- an exchange, and all else ------------------------------------------------------------------------------


class Recorded:
    """Links that remember their exchanges."""

    def __init__(self, links: Links) -> None:
        self.links, self.rank, self.size = links, links.rank, links.size
        self.calls: list[tuple[Tensor, Sequence[int], Sequence[int]]] = []

    def all_to_all(self, rows: Tensor, sends: Sequence[int], receives: Sequence[int]) -> Callable[[], Tensor]:
        self.calls.append((torch.zeros_like(rows), sends, receives))
        return self.links.all_to_all(rows, sends, receives)

    def all_reduce(self, x: Tensor) -> Tensor:
        return self.links.all_reduce(x)

    def gather(self, value: Any) -> list[Any]:
        return self.links.gather(value)

    def again(self) -> list[Tensor]:
        """The same exchanges, one after another."""
        return [self.links.all_to_all(*call)() for call in self.calls]


class Absent(Recorded):
    """Links over which nothing comes: rows are what was in memory."""

    def all_to_all(self, rows: Tensor, sends: Sequence[int], receives: Sequence[int]) -> Callable[[], Tensor]:
        found = rows.new_empty(sum(receives), *rows.shape[1:])
        return lambda: found
