"""Queries with more keys than one rank should compute: their keys are divided among ranks, which they visit.

A global token sees every key, a drafted one the whole prefix. Such queries are guests of other ranks, each of
which computes them against some of the keys, most of all those that it holds: few queries and results travel
instead of many keys, as where a GPU splits the keys of few queries among its blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fa4flex.codegen.analyze.rows import one_thread
from fa4flex.parallel.placement import (
    UNEVEN,
    Candidate,
    Placement,
    Range,
    Split,
    candidates,
    contiguous,
    ranges_of,
    runs,
    seen_by,
)
from fa4flex.parallel.work import Work

SHARES = (1.0, 1 / 2, 1 / 4, 1 / 8, 1 / 16, 0.0)
"""Shares of the mean load: chunks with more work than one of them are split, of the largest that suffices."""

MOVED = 0.1
"""Least cost of what is received, as a share of that of the work, for which splits are looked at."""

OUTLIER = 4.0
"""Work of a chunk, in that of the median one, from which the keys of its queries are many."""

MOST_CELLS = 1 << 24
"""Pairs of chunks to be split and tiles of keys, at most."""

KEY, HOST, OWNER, CALLS = 290.0, 3.0, 2.0, 1 << 21
"""Cost of a key that is received, in pairs of a query and a key that are computed; of a query that visits, in
keys, to its host and to its owner; and of the exchanges of queries, in pairs: forward and backward with 32:8
heads of 128 in 16 bits, at 570 TFLOP/s, 281 GB/s and about 50 us for each of four exchanges."""


def divided(work: Work, ranks: int, plain: Placement, always: bool = False) -> Placement:
    """The cheaper one of a placement, and of the best one that divides the keys of some queries. always:
    such a one wherever `plain` is uneven, whatever it costs."""
    with one_thread():
        cost = _cost(work, ranks, _Dealt.plain(work, plain))
        uneven = plain.imbalance > UNEVEN
        moves = cost > (1 + MOVED) * max(plain.loads) and _few_see_many(work)
        if ranks == 1 or not (uneven or moves):
            return plain
        results = [(_cost(work, ranks, x) + CALLS, x) for x in _ways(work, ranks)]
        if not results:
            return plain
        best, dealt = min(results, key=lambda item: item[0])
        if best >= cost and not (always and uneven and float(dealt.loads.max()) < max(plain.loads)):
            return plain
        return _placement(work, ranks, dealt)


def _few_see_many(work: Work) -> bool:
    """True if queries are few, or some of them see many more keys than most."""
    return work.q_len < work.kv_len or float(work.area.max()) > OUTLIER * float(work.area.median())


@dataclass(frozen=True, eq=False)
class _Dealt:
    """Owners of all chunks; and of the cells, pairs of a chunk that is split and a tile of its keys, which
    rank computes each. chunk: of each cell; tile: of its keys."""

    candidate: Candidate
    light: Work
    loads: Tensor
    chunk: Tensor
    tile: Tensor
    to: Tensor

    @classmethod
    def plain(cls, work: Work, placement: Placement) -> _Dealt:
        owners = torch.zeros(len(work.area), dtype=torch.int64)
        for rank, own in enumerate(placement.queries):
            for lo, hi in own:
                owners[lo // work.chunk : -(-hi // work.chunk)] = rank
        loads, none = torch.tensor(placement.loads), owners[:0]
        return cls(Candidate(placement.kind, owners, loads, 0), work, loads, none, none, none)


def _ways(work: Work, ranks: int) -> list[_Dealt]:
    """Ways to split the chunks with most work: those with loads within 3 % of the mean, if there are any."""
    total, split = float(work.area.sum()), 0
    results: list[_Dealt] = []
    even: list[_Dealt] = []
    for share in SHARES:
        heavy = (work.area > share * total / ranks).nonzero().flatten()
        if len(heavy) == split or len(heavy) * -(-work.kv_len // work.tile) > MOST_CELLS:
            continue
        split = len(heavy)
        results += _deal(work, ranks, heavy)
        even = [x for x in results if float(x.loads.max()) * ranks <= total * (1 + UNEVEN)]
        # More splits would balance no better; but where keys are many, to split all queries may move less.
        if even and work.q_len >= work.kv_len:
            break
    return even or results


def _deal(work: Work, ranks: int, heavy: Tensor) -> Iterator[_Dealt]:
    """The rest of the chunks dealt as if those had no work, and their keys by what that leaves to be done."""
    cells = work.cells(heavy)
    at, tile = (cells > 0).nonzero(as_tuple=True)
    sizes, chunk = cells[at, tile], heavy[at]
    light = replace(
        work,
        area=work.area.index_fill(0, heavy, 0.0),
        sees=work.sees.index_fill(0, heavy, False),
    )
    total, mean = float(sizes.sum()), float(work.area.sum()) / ranks
    results = [(_level(x.loads, total), x) for x in candidates(light, ranks)]
    limit = max(min(level for level, _ in results), mean * (1 + UNEVEN / 2))
    _, best = min((x for x in results if x[0] <= limit), key=lambda item: item[1].moved)
    rooms = (_level(best.loads, total) - best.loads).clamp(min=0.0)
    for home in (_holders(work, best.owners, ranks), None):
        to = _hosts(sizes, tile, rooms, home)
        loads = best.loads.index_add(0, to, sizes)
        yield _Dealt(best, light, loads, chunk, tile, to)


def _level(loads: Tensor, more: float) -> float:
    """The load up to which so much more fills the least loaded ranks; the largest load, if that is more."""
    rising = loads.sort().values
    filled = (rising.cumsum(0) + more) / torch.arange(1, len(rising) + 1)
    above = torch.cat((rising[1:], torch.tensor([torch.inf])))
    return max(float(filled[(filled <= above).nonzero()[0]]), float(rising[-1]))


def _holders(work: Work, owners: Tensor, ranks: int) -> Tensor:
    """The rank that holds each tile of keys."""
    starts = torch.arange(0, work.kv_len, work.tile)
    if work.q_len == work.kv_len:
        return owners[starts // work.chunk]
    ends = [own[-1][1] if own else 0 for own in contiguous(work.kv_len, ranks, work.tile)]
    return torch.searchsorted(torch.tensor(ends).cummax(0).values, starts, right=True)


def _hosts(sizes: Tensor, tile: Tensor, rooms: Tensor, home: Tensor | None) -> Tensor:
    """The rank of each cell: first those whose keys it holds, as far as its room reaches, then the others in
    order of ranks. home: rank of each tile of keys, or None to deal all in order."""
    to = torch.full((len(sizes),), -1)
    if home is not None:
        rank, order = home[tile].sort(stable=True)
        before = sizes[order].cumsum(0) - sizes[order]
        first = torch.searchsorted(rank, torch.arange(len(rooms))).clamp(max=len(rank) - 1)
        fits = before - before[first][rank] + sizes[order] / 2 <= rooms[rank]
        to[order[fits]] = rank[fits]
        rooms = (rooms - torch.zeros_like(rooms).index_add(0, rank[fits], sizes[order][fits])).clamp(min=0.0)
    rest = to < 0
    if rest.any():
        middle = sizes[rest].cumsum(0) - sizes[rest] / 2
        ends = rooms.cumsum(0)
        ends = ends * (float(sizes[rest].sum()) / ends[-1].clamp(min=1e-9))
        to[rest] = torch.searchsorted(ends, middle).clamp(max=len(rooms) - 1)
    return to


def _cost(work: Work, ranks: int, dealt: _Dealt) -> float:
    """Work of the busiest rank, and what the one that receives most receives, in pairs."""
    owners, chunks, side = dealt.candidate.owners, len(work.area), work.tile
    each = work.chunk // side
    tiles = -(-work.kv_len // side)
    seen = seen_by(dealt.light, owners, ranks).repeat_interleave(each, 1)[:, :tiles]
    seen[dealt.to, dealt.tile] = True
    seen[_holders(work, owners, ranks), torch.arange(tiles)] = False
    visits = torch.zeros(ranks, chunks, dtype=torch.bool)
    visits[dealt.to, dealt.chunk] = True
    visits[owners, torch.arange(chunks)] = False
    lengths = torch.full((chunks,), work.chunk)
    lengths[-1:] = work.q_len - (chunks - 1) * work.chunk
    guests = (visits * lengths).sum(1)
    away = torch.zeros(ranks, dtype=torch.int64).index_add(0, owners, visits.sum(0) * lengths)
    keys = seen.sum(1) * side
    return float(dealt.loads.max()) + KEY * float((keys + HOST * guests + OWNER * away).max())


# --- as a placement ---------------------------------------------------------------------------------------


def _placement(work: Work, ranks: int, dealt: _Dealt) -> Placement:
    queries = ranges_of(dealt.candidate.owners, work.chunk, work.q_len, ranks)
    keys = queries if work.q_len == work.kv_len else contiguous(work.kv_len, ranks, work.tile)
    loads = tuple(dealt.loads.tolist())
    splits = _joined(_splits(work, dealt))
    return Placement(work.q_len, work.kv_len, queries, keys, dealt.candidate.kind, work.chunk, loads, splits)


def _splits(work: Work, dealt: _Dealt) -> Iterator[Split]:
    """The chunks of which others compute a part, in order."""
    chunks, counts = dealt.chunk.unique_consecutive(return_counts=True)
    cells = dealt.tile.split(counts.tolist()), dealt.to.split(counts.tolist())
    for chunk, tile, to in zip(chunks.tolist(), *cells, strict=True):
        first, last = runs(to, tile - torch.arange(len(tile)))
        parts: dict[int, list[Range]] = {}
        for rank, lo, hi in zip(to[first].tolist(), tile[first].tolist(), tile[last].tolist(), strict=True):
            keys = lo * work.tile, min((hi + 1) * work.tile, work.kv_len)
            parts.setdefault(rank, []).append(keys)
        owner = int(dealt.candidate.owners[chunk])
        if set(parts) != {owner}:
            queries = chunk * work.chunk, min((chunk + 1) * work.chunk, work.q_len)
            yield Split(queries, owner, tuple((rank, tuple(x)) for rank, x in sorted(parts.items())))


def _joined(splits: Iterator[Split]) -> tuple[Split, ...]:
    """Neighbours of one owner whose keys are divided alike, as one."""
    results: list[Split] = []
    for x in splits:
        last = results[-1] if results else None
        if last and (last.queries[1], last.owner, last.parts) == (x.queries[0], x.owner, x.parts):
            results[-1] = replace(last, queries=(last.queries[0], x.queries[1]))
        else:
            results.append(x)
    return tuple(results)
