"""Attention of one rank, stage by stage, with gradients: what is computed while keys are on their way."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from fa4flex.parallel.exchange import Exchange, Rectangle, tokens
from fa4flex.parallel.guests import Guests
from fa4flex.parallel.links import Links
from fa4flex.parallel.moves import by_heads, by_tokens, results_by, send
from fa4flex.parallel.pieces import SEQUENCE, Pieces, in_order, order_of, rows_of, tensors_of
from fa4flex.parallel.placement import Range, Ranges, joined
from fa4flex.parallel.rectangle import Rectangles
from fa4flex.parallel.sums import Added, Result, Sums


@dataclass(frozen=True, eq=False)
class Job:
    """Work of one rank in one call, without its tensors. output, compute: dtypes of results and of sums.
    sm_margin: of kernels that run while an exchange is in flight."""

    exchange: Exchange
    rank: int
    links: Links
    rectangles: Rectangles
    output: torch.dtype
    compute: torch.dtype
    sm_margin: int = 0

    def beside(self, in_flight: bool) -> Rectangles:
        """The rectangles, by kernels that leave multiprocessors to an exchange, if one is in flight."""
        if not in_flight or not self.sm_margin:
            return self.rectangles
        return self.rectangles.leaving(self.sm_margin)

    @property
    def queries(self) -> Ranges:
        return self.exchange.queries[self.rank]

    def moving(self) -> list[int]:
        """The stages before which some rank sends something."""
        return [at + 1 for at, sends in enumerate(self.exchange.sends) if sends]

    def of_stage(self, stage: int) -> tuple[Rectangle, ...]:
        return self.exchange.rectangles[stage][self.rank]

    def own_keys(self) -> tuple[tuple[Rectangle, ...], tuple[Rectangle, ...]]:
        """Rectangles of own keys: of own queries, and of guests."""
        every = self.of_stage(0)
        own = tuple(x for x in every if x.queries in self.queries)
        return own, every[len(own) :]

    @cached_property
    def alone(self) -> frozenset[Range]:
        """Own queries that one rectangle of this rank computes, against all keys that they see."""
        away = {queries for ranges in self.exchange.visits(self.rank) for queries in ranges}
        every = Counter(x.queries for stage in self.exchange.rectangles for x in stage[self.rank])
        return frozenset(x for x in self.queries if every[x] == 1 and x not in away)

    @cached_property
    def guests(self) -> Guests:
        return Guests(self.exchange, self.rank, self.links)


class Attend(torch.autograd.Function):
    """Local queries against all keys that they may see.

    Partial results are put together by their log-sum-exps, at the precision of the sums, stage by stage and
    within a stage by places; then those that other ranks have computed, by ranks; sinks come last, once. So
    results do not depend on what arrives first.
    """

    @staticmethod
    def forward(
        ctx: Any, job: Job, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *operands: Tensor
    ) -> Any:
        visitors = job.guests.send([q])
        arrivals = {stage: _send(job, stage, (k, v)) for stage in job.moving()}
        results = _Results(job, q, v.shape[-1], sinks)
        received = []
        here = _held(job, (k, v))
        mine, of_guests = job.own_keys()
        results.add(mine, here, job.beside(bool(arrivals or job.exchange.guests)))
        (theirs,) = visitors()
        results.q.extend(theirs, job.guests.visitors)
        results.add(of_guests, here, job.beside(bool(arrivals)))
        for stage, arrival in arrivals.items():
            received.append(in_order(arrival(), joined(job.exchange.incoming(stage, job.rank))))
            _arrived(job, stage, received[-1], here)
            results.add(job.of_stage(stage), here, job.beside(stage < max(arrivals)))
        results.return_guests()
        out, lse = results.finish()
        ctx.job, ctx.operands = job, len(operands)
        ctx.save_for_backward(q, k, v, sinks, out, lse, theirs, *operands, *received)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        job: Job = ctx.job
        q, k, v, sinks, out, lse, theirs, *rest = ctx.saved_tensors
        operands, received = rest[: ctx.operands], rest[ctx.operands :]
        needs = [slot for slot in range(len(operands)) if ctx.needs_input_grad[5 + slot]]
        upstream = torch.zeros_like(out) if dout is None else dout, dlse
        sums = _Gradients(job, q, (out, lse), upstream, {slot: operands[slot] for slot in needs})
        sums.receive_guests(theirs)
        here, of_keys = _held(job, (k, v)), (Sums(job.compute), Sums(job.compute))
        of_stages = list(zip(job.moving(), received, strict=True))
        for stage, rows in of_stages:
            _arrived(job, stage, rows, here)
        # Gradients of others' keys leave first: they travel while those of the own keys are computed.
        arrivals: list[tuple[int, Any]] = []
        for stage, rows in reversed(of_stages):
            sums.add(stage, here, of_keys, job.beside(bool(arrivals)))
            arrivals.append((stage, _send_back(job, stage, of_keys, torch.empty_like(rows), (k, v))))
        sums.add(0, here, of_keys, job.beside(bool(arrivals)))
        sums.return_guests(theirs)
        for stage, arrival in reversed(arrivals):
            _add_back(job, stage, of_keys, tensors_of(arrival(), (k, v)))
        own = job.exchange.held[job.rank]
        dk, dv = (total.whole(own, x) for total, x in zip(of_keys, (k, v), strict=True))
        dsinks = None if sinks is None else _of_sinks(sinks, (out, lse), upstream)
        of_operands: list[Tensor | None] = [None] * len(operands)
        for slot, total in sums.operands.items():
            of_operands[slot] = total.to(operands[slot].dtype)
        return (None, sums.dq, dk, dv, dsinks, *of_operands)


def attend_heads(
    job: Job,
    held: tuple[tuple[Ranges, ...], tuple[Ranges, ...]],
    qkv: tuple[Tensor, Tensor, Tensor],
    sinks: Tensor | None,
    operands: tuple[Tensor, ...],
) -> tuple[Tensor, Tensor]:
    """Attention of local queries, computed head by head: each rank has all tokens of its heads meanwhile.
    held: queries and keys of each rank (Jacobs et al., "DeepSpeed Ulysses", arXiv:2309.14509)."""
    links, heads = job.links, qkv[0].shape[1] // job.links.size
    first = links.rank * heads
    q, k, v = (by_heads(links, own, x) for x, own in zip(qkv, (*held, held[1]), strict=True))
    whole = Rectangle((0, q.shape[2]), (0, k.shape[2]))
    there = q.shape[2] > 0 and k.shape[2] > 0
    rectangles = (((whole,) if there else (),),)
    alone = Exchange(((whole.keys,),), ((whole.queries,),), (), rectangles, rectangles)
    of_heads = replace(
        job,
        exchange=alone,
        rank=0,
        rectangles=replace(job.rectangles, h_start=(job.rectangles.h_start or 0) + first),
    )
    logits = None if sinks is None else sinks[first : first + heads]
    return results_by(partial(by_tokens, links, held[0]), *Attend.apply(of_heads, q, k, v, logits, *operands))


# --- moving keys --------------------------------------------------------------------------------------------


def _held(job: Job, kv: tuple[Tensor, Tensor]) -> tuple[Pieces, Pieces]:
    """The rank's own keys and values."""
    own = job.exchange.held[job.rank]
    return Pieces(kv[0], own), Pieces(kv[1], own)


def _arrived(job: Job, stage: int, rows: Tensor, here: tuple[Pieces, Pieces]) -> None:
    """Keys and values of a stage, in the order in which they are kept, join those that are here."""
    places = order_of(joined(job.exchange.incoming(stage, job.rank)))
    for pieces, x in zip(here, tensors_of(rows, [pieces.x for pieces in here]), strict=True):
        pieces.extend(x, places)


def _send(job: Job, stage: int, kv: tuple[Tensor, Tensor]) -> Any:
    outgoing, incoming = job.exchange.outgoing(stage, job.rank), job.exchange.incoming(stage, job.rank)
    return send(job.links, rows_of(kv, job.exchange.held[job.rank], outgoing), outgoing, incoming)


def _send_back(
    job: Job, stage: int, of_keys: tuple[Sums, ...], rows: Tensor, kv: tuple[Tensor, Tensor]
) -> Any:
    """Send gradients of keys and values to their owners, in `rows`."""
    outgoing, incoming = job.exchange.outgoing(stage, job.rank), job.exchange.incoming(stage, job.rank)
    for total, place in zip(of_keys, tensors_of(rows, kv), strict=True):
        total.pop(joined(incoming), place)
    return send(job.links, rows, incoming, outgoing)


def _add_back(job: Job, stage: int, of_keys: tuple[Sums, ...], parts: list[Tensor]) -> None:
    """Add what came back from each rank, in their order: one key may come back from several."""
    at = 0
    for lo, hi in joined(job.exchange.outgoing(stage, job.rank)):
        for total, part in zip(of_keys, parts, strict=True):
            total.add((lo, hi), part.narrow(SEQUENCE, at, hi - lo))
        at += hi - lo


# --- the forward pass ---------------------------------------------------------------------------------------


class _Results:
    """Output and log-sum-exp of each range of local queries so far. What is merged, with other keys or with
    sinks, has the dtype of sums until then; what is not is rounded where it is computed."""

    def __init__(self, job: Job, q: Tensor, dim_v: int, sinks: Tensor | None) -> None:
        self.job, self.q, self.dim_v, self.sinks = job, Pieces(q, job.queries), dim_v, sinks
        rounds = job.output.itemsize < job.compute.itemsize
        self.rounded = job.alone if rounds and sinks is None else frozenset()
        self.results: dict[Range, Result] = {}

    def add(self, wanted: tuple[Rectangle, ...], kv: tuple[Pieces, Pieces], rectangles: Rectangles) -> None:
        for x in wanted:
            q = self.q.take(x.queries)
            k, v = (part.take(x.keys) for part in kv)
            dtype = self.job.output if x.queries in self.rounded else self.job.compute
            self._add(x.queries, *rectangles.forward((q, k, v), (x.queries[0], x.keys[0]), dtype))

    def _add(self, queries: Range, out: Tensor, lse: Tensor) -> None:
        if queries in self.results:
            self.results[queries].add(out, lse)
        else:
            kind = Result if self.job.rectangles.facts.weights.summed else Added
            self.results[queries] = kind(out, lse)

    def return_guests(self) -> None:
        """Results of guests go to their owners; those of local queries that others have computed come."""
        visitors = self.job.guests.visitors
        out, lse = self._written(visitors, self.job.compute)
        for queries in visitors:
            self.results.pop(queries, None)
        for queries, (part, of_part) in self.job.guests.send_back([out, lse.unsqueeze(-1)]):
            self._add(queries, part, of_part.squeeze(-1))

    def finish(self) -> tuple[Tensor, Tensor]:
        """The results of all local queries, in their order."""
        if self.sinks is not None:  # also of queries without keys
            for queries in self.job.queries:
                if queries not in self.results:
                    self.results[queries] = self._of_no_keys(queries)
                self.results[queries].add_sinks(self.sinks)
        return self._written(self.job.queries, self.job.output)

    def _of_no_keys(self, queries: Range) -> Result:
        q = self.q.x
        sizes = q.shape[0], q.shape[1], queries[1] - queries[0]
        out = q.new_zeros(*sizes, self.dim_v, dtype=self.job.compute)
        return Result(out, q.new_full(sizes, -torch.inf, dtype=self.job.compute))

    def _written(self, ranges: Ranges, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The results of these queries, one range after another, in their dtypes; a lone part itself."""
        alone = self.results.get(ranges[0]) if len(ranges) == 1 else None
        if alone is not None and alone.last is None and alone.out.dtype == dtype:
            return alone.out, alone.lse
        q, at = self.q.x, 0
        sizes = q.shape[0], q.shape[1], tokens(ranges)
        out = q.new_empty(*sizes, self.dim_v, dtype=dtype)
        lse = q.new_empty(sizes, dtype=self.job.compute)
        for lo, hi in ranges:
            place = tuple(x.narrow(SEQUENCE, at, hi - lo) for x in (out, lse))
            if (lo, hi) in self.results:
                self.results[lo, hi].write(*place)
            else:
                place[0].zero_()
                place[1].fill_(-torch.inf)
            at += hi - lo
        return out, lse


# --- the backward pass --------------------------------------------------------------------------------------


class _Gradients:
    """Sums of gradients, at the precision of the forward pass's sums; captured ones in float32."""

    def __init__(
        self,
        job: Job,
        q: Tensor,
        results: tuple[Tensor, Tensor],
        upstream: tuple[Tensor, Tensor | None],
        operands: dict[int, Tensor],
    ) -> None:
        self.job, self.q = job, Pieces(q, job.queries)
        self.of_queries = Sums(job.compute)
        (out, lse), (dout, dlse) = results, upstream
        self.of_rows = [Pieces(x, job.queries) for x in (out, lse.unsqueeze(-1), dout)]
        if job.exchange.guests and dlse is None:
            dlse = torch.zeros_like(lse)  # those of guests may have gradients
        if dlse is not None:
            self.of_rows.append(Pieces(dlse.unsqueeze(-1), job.queries))
        self.operands = {
            slot: torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))
            for slot, x in operands.items()
        }

    def receive_guests(self, theirs: Tensor) -> None:
        """Exchange results and gradients of rows: those of guests come from their owners, those of local
        queries that visit go to others."""
        if not self.job.exchange.guests:
            return
        visitors = self.job.guests.visitors
        arrived = self.job.guests.send([x.x for x in self.of_rows])()
        self.q.extend(theirs, visitors)
        for of_rows, x in zip(self.of_rows, arrived, strict=True):
            of_rows.extend(x.contiguous(), visitors)

    def return_guests(self, theirs: Tensor) -> None:
        """Gradients of guests go to their owners; those of local queries that have visited others come."""
        visitors = self.job.guests.visitors
        of_guests = self.of_queries.whole(visitors, theirs)
        for queries, (part,) in self.job.guests.send_back([of_guests]):
            self.of_queries.add(queries, part)

    def add(
        self, stage: int, here: tuple[Pieces, Pieces], of_keys: tuple[Sums, Sums], rectangles: Rectangles
    ) -> None:
        """Add what the rectangles of a stage contribute, to gradients of keys and values in `of_keys`."""
        needs = list(self.operands)
        for x in self.job.exchange.backward[stage][self.job.rank]:
            out, lse, dout, *dlse = (rows.take(x.queries) for rows in self.of_rows)
            k, v = (part.take(x.keys) for part in here)
            of_q, *of_kv = rectangles.backward(
                (self.q.take(x.queries), k, v),
                (out, lse.squeeze(-1)),
                (dout, dlse[0].squeeze(-1) if dlse else None),
                (x.queries[0], x.keys[0]),
                needs,
            )
            self.of_queries.add(x.queries, of_q)
            for total, part in zip(of_keys, of_kv[:2], strict=True):
                total.add(x.keys, part)
            for slot, part in zip(needs, of_kv[2:], strict=True):
                self.operands[slot] += part

    @property
    def dq(self) -> Tensor:
        """Gradient of the local queries, in their dtype."""
        return self.of_queries.whole(self.job.queries, self.q.x)


def _of_sinks(
    sinks: Tensor, results: tuple[Tensor, Tensor], upstream: tuple[Tensor, Tensor | None]
) -> Tensor:
    (out, lse), (dout, dlse) = results, upstream
    delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    if dlse is not None:
        delta = delta - dlse
    weights = (sinks.to(lse.dtype)[:, None] - lse).exp()
    return -(weights * delta).sum((0, 2)).to(sinks.dtype)
