"""Placement: which queries each rank computes, found from the proved work of each chunk of them."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy
import torch
from torch import Tensor

from fa4flex.codegen.analyze.rows import one_thread
from fa4flex.errors import InputError
from fa4flex.parallel.work import Work

Range = tuple[int, int]
"""Tokens from the first up to, not including, the second."""

Ranges = tuple[Range, ...]
Kind = Literal["contiguous", "head-tail", "min-heap"]

SLACK = 0.02
"""Share of the largest load by which a placement that moves less may exceed the best one."""

UNEVEN = 0.03
"""Share of the mean load by which the largest one may exceed it where some placement allows that."""


@dataclass(frozen=True)
class Split:
    """A range of queries whose keys are divided among ranks. parts: (rank, the keys that it computes them
    against), by ranks; no key is in two of them, and every key that some of the queries may see is in one."""

    queries: Range
    owner: int
    parts: tuple[tuple[int, Ranges], ...]


@dataclass(frozen=True)
class Placement:
    """Queries that each rank computes: `queries[r]`, ranges in order that do not touch.

    keys    which keys each rank holds, in the same form: those at its queries' places where there are as many
            keys as queries, else equal parts in order
    kind    how the queries were dealt
    chunk   tokens that are dealt together; ranges begin and end at its multiples, or at the end
    loads   the work of each rank, in pairs of tiles that are not empty
    splits  those of the queries that have more keys than one rank should compute, in order: they are guests
            of other ranks, which compute them against parts of their keys

    A rank's local tensor has the tokens of its ranges, one range after another.
    """

    q_len: int
    kv_len: int
    queries: tuple[Ranges, ...]
    keys: tuple[Ranges, ...]
    kind: Kind
    chunk: int
    loads: tuple[float, ...]
    splits: tuple[Split, ...] = ()

    @property
    def ranks(self) -> int:
        return len(self.queries)

    @property
    def imbalance(self) -> float:
        """Excess of the largest load over the mean: 0.03 where the slowest rank has 3 % more to do."""
        mean = sum(self.loads) / max(len(self.loads), 1)
        return max(self.loads) / mean - 1 if mean else 0.0

    def shard(self, x: Tensor, rank: int, dim: int = 2, of: Literal["queries", "keys"] = "queries") -> Tensor:
        """The part of a whole tensor that a rank holds, `dim` being the sequence. Gradients flow back."""
        total = self.q_len if of == "queries" else self.kv_len
        if x.shape[dim] != total:
            raise InputError(
                f"dimension {dim} of {tuple(x.shape)}",
                f"{total} {of}",
                "shard whole tensors, along the sequence",
            )
        own = (self.queries if of == "queries" else self.keys)[rank]
        parts = [x.narrow(dim, lo, hi - lo) for lo, hi in own]
        return torch.cat(parts, dim) if parts else x.narrow(dim, 0, 0)

    def unshard(
        self, parts: Sequence[Tensor], dim: int = 2, of: Literal["queries", "keys"] = "queries"
    ) -> Tensor:
        """The whole tensor of all ranks' parts. Gradients flow back."""
        pieces: list[tuple[int, Tensor]] = []
        for x, own in zip(parts, self.queries if of == "queries" else self.keys, strict=True):
            sizes = [hi - lo for lo, hi in own]
            if x.shape[dim] != sum(sizes):
                raise InputError(
                    f"dimension {dim} of {tuple(x.shape)}", f"{sum(sizes)} {of}", "pass each rank's own part"
                )
            pieces += zip((lo for lo, _ in own), x.split(sizes, dim), strict=True) if sizes else ()
        return torch.cat([piece for _, piece in sorted(pieces, key=lambda item: item[0])], dim)

    def positions(self, rank: int, of: Literal["queries", "keys"] = "queries") -> Tensor:
        """The place in the whole of each token of a rank, int64: position ids for rotary embeddings."""
        own = (self.queries if of == "queries" else self.keys)[rank]
        return torch.cat([torch.arange(0), *(torch.arange(lo, hi) for lo, hi in own)])

    def explain(self) -> str:
        """In words: how queries were dealt, and what that leaves each rank to do."""
        mean = sum(self.loads) / max(self.ranks, 1)
        lines = [
            f"{self.q_len} queries over {self.ranks} ranks, {self.kind}, in chunks of {self.chunk}: "
            f"the largest load is {self.imbalance:.2%} above the mean"
        ]
        for rank, (own, load) in enumerate(zip(self.queries, self.loads, strict=True)):
            if rank == MOST_SHOWN:
                lines.append(f"  ... and {self.ranks - rank} more")
                break
            tokens = sum(hi - lo for lo, hi in own)
            share = load / mean if mean else 0.0
            lines.append(f"  rank {rank}: {shown(own)} ({tokens} queries), {share:.3f} of the mean work")
        for at, split in enumerate(self.splits):
            if at == MOST_SHOWN:
                lines.append(f"  ... and {len(self.splits) - at} more whose keys are divided")
                break
            lines.append(
                f"  {shown([split.queries])} of rank {split.owner}: {len(split.parts)} ranks share their keys"
            )
        return "\n".join(lines)


def joined(ranges: Sequence[Ranges]) -> Ranges:
    """The ranges of all ranks, one after another."""
    return tuple(x for own in ranges for x in own)


MOST_SHOWN = 16


def shown(ranges: Sequence[Range]) -> str:
    """Ranges in words, the first few of them."""
    if not ranges:
        return "nothing"
    text = " ".join(f"{lo}:{hi}" for lo, hi in ranges[:6])
    return text if len(ranges) <= 6 else f"{text} ... in {len(ranges)} ranges"


# --- dealing chunks ---------------------------------------------------------------------------------------


def contiguous(total: int, ranks: int, unit: int = 1) -> tuple[Ranges, ...]:
    """Equal parts in order, cut at multiples of `unit`; the last ones may be short, or empty."""
    chunks = -(-total // unit)
    cuts = [min(-(-chunks * r // ranks) * unit, total) for r in range(ranks + 1)]
    return tuple(((lo, hi),) if hi > lo else () for lo, hi in pairwise(cuts))


def _owners(kind: Kind, area: Tensor, ranks: int, group: int) -> Tensor:
    """The rank of each chunk, int64. group: chunks that are dealt together."""
    chunks = len(area)
    at = torch.arange(chunks)
    if kind == "contiguous":
        return at * ranks // max(chunks, 1)
    if kind == "head-tail":
        piece = at * (2 * ranks) // max(chunks, 1)
        return torch.minimum(piece, 2 * ranks - 1 - piece)
    return _heaped(area, ranks, group)


def _heaped(area: Tensor, ranks: int, group: int, spare: int = 0) -> Tensor:
    """Groups of chunks, the largest first, each to the rank that has least to do of those with room left.

    spare: groups that a rank may have above its share, for others that have heavier ones. Without, numbers of
    groups differ by at most one.
    """
    groups = -(-len(area) // group)
    sums = torch.zeros(groups, dtype=area.dtype).index_add_(0, torch.arange(len(area)) // group, area)
    room = -(-groups // ranks) + spare
    full = (ranks if spare else groups - (room - 1) * ranks) if groups else 0
    heap = [(0.0, rank, 0) for rank in range(ranks)]
    owners = [0] * groups
    for at in sums.argsort(descending=True, stable=True).tolist():
        load, rank, count = heapq.heappop(heap)
        owners[at] = rank
        count += 1
        # `full` ranks take one more than the others.
        if count < room - 1 or (count == room - 1 and full > 0):
            heapq.heappush(heap, (load + float(sums[at]), rank, count))
        if count == room:
            full -= 1
    return torch.tensor(owners).repeat_interleave(group)[: len(area)]


def runs(*values: Tensor) -> tuple[Tensor, Tensor]:
    """The first and the last element of each run of elements that are equal in each of these tensors."""
    begins = torch.ones_like(values[0], dtype=torch.bool)
    for x in values:
        begins[1:] &= x.diff() == 0
    begins[1:] = ~begins[1:]
    first = begins.nonzero().flatten()
    return first, torch.cat((first, first.new_tensor([len(begins)])))[1:] - 1


def ranges_of(owners: Tensor, chunk: int, total: int, ranks: int) -> tuple[Ranges, ...]:
    """Each rank's chunks, neighbours joined."""
    own: list[list[Range]] = [[] for _ in range(ranks)]
    first, last = runs(owners)
    for rank, lo, hi in zip(owners[first].tolist(), first.tolist(), last.tolist(), strict=True):
        own[rank].append((lo * chunk, min((hi + 1) * chunk, total)))
    return tuple(map(tuple, own))


# --- the choice -------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Candidate:
    """A way to deal the chunks: owner of each chunk, work of the busiest rank, and key tokens that move."""

    kind: Kind
    owners: Tensor
    loads: Tensor
    moved: int


def candidates(work: Work, ranks: int) -> Iterator[Candidate]:
    """Ways to deal the chunks, those first that keep more neighbours together."""
    chunks = len(work.area)
    tried: list[tuple[Kind, int]] = [("contiguous", 1), ("head-tail", 1)]
    group = max(1, chunks // (2 * ranks))
    while group >= 1:
        tried.append(("min-heap", group))
        group //= 2
    for kind, group in tried:
        yield _candidate(work, kind, _owners(kind, work.area, ranks, group), ranks)


def _candidate(work: Work, kind: Kind, owners: Tensor, ranks: int) -> Candidate:
    loads = torch.zeros(ranks, dtype=torch.float64).index_add_(0, owners, work.area)
    return Candidate(kind, owners, loads, _moved(work, owners, ranks))


def seen_by(work: Work, owners: Tensor, ranks: int) -> Tensor:
    """bool [ranks, key chunks]: whether some query of a rank may see some key of a chunk."""
    result = numpy.zeros((ranks, work.packed.shape[1]), dtype=numpy.uint8)
    of, order = owners.sort(stable=True)
    first, _ = runs(of)
    if len(of):
        joined = numpy.bitwise_or.reduceat(work.packed[order.numpy()], first.numpy(), axis=0)
        result[of[first].numpy()] = joined
    bits = numpy.unpackbits(result, axis=1, count=work.sees.shape[1])
    return torch.from_numpy(bits).bool()


def _moved(work: Work, owners: Tensor, ranks: int) -> int:
    """Key tokens that ranks receive, together."""
    seen = seen_by(work, owners, ranks)
    sizes = torch.full((work.sees.shape[1],), work.chunk)
    if len(sizes):
        sizes[-1] = work.kv_len - (len(sizes) - 1) * work.chunk
    if work.q_len != work.kv_len:  # keys lie in equal parts, whoever computes the queries
        return int((seen * sizes).sum())
    seen[owners, torch.arange(len(owners))] = False
    return int((seen * sizes).sum())


def place(work: Work, ranks: int, kind: Kind | None = None) -> Placement:
    """The placement that moves least of those whose largest load is within 2 % of the best one's, and within
    3 % of the mean if any is. Ranks have equally many tokens but for a group that is dealt together. Only
    where no load is within 3 % of the mean so, some have fewer, and others at most 3 % more than their share.

    kind: only such placements.
    """
    with one_thread():
        results = [x for x in candidates(work, ranks) if kind in (None, x.kind)]
        most, spare = float(work.area.sum()) / ranks * (1 + UNEVEN), int(UNEVEN * len(work.area) / ranks)
        if spare and kind in (None, "min-heap") and all(float(x.loads.max()) > most for x in results):
            results.append(_candidate(work, "min-heap", _heaped(work.area, ranks, 1, spare), ranks))
    least = min(float(x.loads.max()) for x in results)
    limit = min(least * (1 + SLACK), max(least, most))
    fits = [x for x in results if float(x.loads.max()) <= limit]
    best = min(fits, key=lambda x: x.moved)
    queries = ranges_of(best.owners, work.chunk, work.q_len, ranks)
    keys = queries if work.q_len == work.kv_len else contiguous(work.kv_len, ranks, work.tile)
    loads = tuple(best.loads.tolist())
    return Placement(work.q_len, work.kv_len, queries, keys, best.kind, work.chunk, loads)
