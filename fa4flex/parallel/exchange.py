"""Exchange: which keys go from whom to whom, in which stage, and which rectangles each rank computes then."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from fa4flex.codegen.analyze.rows import one_thread
from fa4flex.parallel.placement import (
    MOST_SHOWN,
    Placement,
    Range,
    Ranges,
    Split,
    joined,
    runs,
    shown,
)
from fa4flex.parallel.work import Work

Sends = tuple[tuple[int, int, Ranges], ...]
"""(from rank, to rank, keys), in order; pairs that exchange nothing are left out."""

MOST_PIECES, LEAST_SPARED = 3, 2048
"""Ranges that one is cut into at most, and queries without keys of others in them at least: a kernel more
costs what merging the results of some thousand queries with nothing would."""

LATE = 0.5
"""Share of a rank's work, at most, that waits in the forward pass until all of its keys have arrived: the
rest hides the exchange. Such queries are one rectangle where their keys are one range, and nothing of them
is merged."""


@dataclass(frozen=True)
class Rectangle:
    """Queries against keys that some of them may see, both by places in the whole."""

    queries: Range
    keys: Range


@dataclass(frozen=True)
class Exchange:
    """Transfers before each stage of attention. Stage 0 moves nothing: its keys are the rank's own.

    held        the keys that each rank has
    queries     the queries that each rank has, cut where their keys are divided, and where they begin or
                cease to see keys of others
    sends       per later stage, what goes from whom to whom: only chunks of keys that some query of the
                receiver may see
    rectangles  per stage and rank, in the order in which results are put together: of its own queries, then
                of guests; their keys are own ones or have arrived, in this stage or before
    backward    the same for gradients, of which parts are only added: nothing waits, each rectangle has keys
                of one stage, and queries next to each other whose keys are one range are one
    guests      queries that visit other ranks, which compute them against parts of their keys: (from owner,
                to rank, queries)
    """

    held: tuple[Ranges, ...]
    queries: tuple[Ranges, ...]
    sends: tuple[Sends, ...]
    rectangles: tuple[tuple[tuple[Rectangle, ...], ...], ...]
    backward: tuple[tuple[tuple[Rectangle, ...], ...], ...]
    guests: Sends = ()

    @property
    def ranks(self) -> int:
        return len(self.held)

    @cached_property
    def received(self) -> tuple[int, ...]:
        """Keys that each rank receives, over all stages."""
        return self._counts(1)

    @cached_property
    def sent(self) -> tuple[int, ...]:
        """Keys that each rank sends, over all stages; one that goes to two ranks counts twice."""
        return self._counts(0)

    def _counts(self, end: int) -> tuple[int, ...]:
        """Keys by the rank at one end of each transfer: 0 for the sender, 1 for the receiver."""
        counts = [0] * self.ranks
        for sends in self.sends:
            for source, to, keys in sends:
                counts[(source, to)[end]] += tokens(keys)
        return tuple(counts)

    def outgoing(self, stage: int, rank: int) -> list[Ranges]:
        """Ranges of keys that a rank sends before a stage, by receiver."""
        return _from(self.sends[stage - 1], rank, self.ranks)

    def incoming(self, stage: int, rank: int) -> list[Ranges]:
        """Ranges of keys that a rank receives before a stage, by sender."""
        return _to(self.sends[stage - 1], rank, self.ranks)

    def visits(self, rank: int) -> list[Ranges]:
        """Ranges of a rank's queries that visit others, by host."""
        return _from(self.guests, rank, self.ranks)

    def visitors(self, rank: int) -> list[Ranges]:
        """Ranges of queries that visit a rank, by owner."""
        return _to(self.guests, rank, self.ranks)

    def explain(self) -> str:
        """In words: how many keys move, beside a gather of all of them."""
        total = sum(tokens(x) for x in self.held)
        everything = max(sum(total - tokens(x) for x in self.held), 1)
        moved = sum(self.received)
        lines = [
            f"{moved} keys move in {len(self.sends)} stage(s), {moved / everything:.1%} of what gathering "
            f"all of them on every rank moves; a rank receives at most {max(self.received, default=0)}"
        ]
        for rank in range(self.ranks):
            if rank == MOST_SHOWN:
                lines.append(f"  ... and {self.ranks - rank} more")
                break
            calls = [len(of_ranks[rank]) for of_ranks in self.rectangles]
            lines.append(
                f"  rank {rank}: holds {shown(self.held[rank])}, receives {self.received[rank]}, "
                f"sends {self.sent[rank]}; rectangles by stage: {calls}"
                f"{self._of_guests(rank)}"
            )
        return "\n".join(lines)

    def _of_guests(self, rank: int) -> str:
        away, here = (sum(map(tokens, x)) for x in (self.visits(rank), self.visitors(rank)))
        return f"; {here} queries of others visit it, {away} of its own visit others" if away or here else ""


def tokens(ranges: Sequence[Range]) -> int:
    return sum(hi - lo for lo, hi in ranges)


def _from(sends: Sends, rank: int, ranks: int) -> list[Ranges]:
    results: list[Ranges] = [()] * ranks
    for source, to, ranges in sends:
        if source == rank:
            results[to] = ranges
    return results


def _to(sends: Sends, rank: int, ranks: int) -> list[Ranges]:
    results: list[Ranges] = [()] * ranks
    for source, to, ranges in sends:
        if to == rank:
            results[source] = ranges
    return results


# --- from a placement -------------------------------------------------------------------------------------


def exchange(
    work: Work, placement: Placement, held: tuple[Ranges, ...] | None = None, stages: int = 1
) -> Exchange:
    """The exchange of a placement, keys lying where `held` says, or else where the placement has them.

    stages: how often keys arrive; each time about as many, of the nearest places first.
    """
    with one_thread():
        return _exchange(work, placement, placement.keys if held is None else held, stages)


def _exchange(work: Work, placement: Placement, held: tuple[Ranges, ...], stages: int) -> Exchange:
    cuts, holder, chunk_of = _segments(work, held, placement.splits)
    places = cuts.tolist()
    every: list[dict[tuple[int, int], Ranges]] = [{} for _ in range(stages)]
    rectangles: list[list[tuple[Rectangle, ...]]] = [[] for _ in range(stages + 1)]
    backward: list[list[tuple[Rectangle, ...]]] = [[] for _ in range(stages + 1)]
    queries = tuple(_cut(own, placement.splits) for own in placement.queries)
    guests = _guests(placement.splits)
    whole = frozenset(split.queries for split in placement.splits)
    queries = tuple(
        _spared(work, own, _keys_of_others(work, holder != rank, chunk_of), whole)
        for rank, own in enumerate(queries)
    )
    for rank, own in enumerate(queries):
        rows = (*own, *joined(_to(guests, rank, placement.ranks)))
        seen = torch.stack([_seen(work, x) for x in rows]) if rows else work.sees[:0]
        wanted = seen[:, chunk_of]  # [ranges of queries, segments]
        for split in placement.splits:
            if split.queries in rows:
                wanted[rows.index(split.queries)] &= _inside(dict(split.parts).get(rank, ()), cuts)
        mine = holder == rank
        late = _late(work, rows, (wanted & ~mine).any(1), whole)
        stage = _stages(wanted[~late].any(0), mine, cuts, stages)
        stage[wanted.any(0) & (stage < 0)] = 1  # of late queries alone
        stage[mine] = 0
        when = torch.where(wanted, stage, -1)
        at_last = torch.where(wanted & late[:, None], when.amax(1, keepdim=True), when)
        for at in range(stages + 1):
            rectangles[at].append(_rectangles(rows, at_last == at, places))
            backward[at].append(_neighbours(_rectangles(rows, when == at, places), whole))
            if at:
                for source, keys in _by_holder(stage == at, holder, places):
                    every[at - 1][source, rank] = keys
    sends = tuple(tuple((*pair, keys) for pair, keys in sorted(x.items())) for x in every)
    return Exchange(held, queries, sends, tuple(map(tuple, rectangles)), tuple(map(tuple, backward)), guests)


def _guests(splits: Sequence[Split]) -> Sends:
    results: dict[tuple[int, int], list[Range]] = {}
    for split in splits:
        for rank, _ in split.parts:
            if rank != split.owner:
                results.setdefault((split.owner, rank), []).append(split.queries)
    return tuple((*pair, tuple(queries)) for pair, queries in sorted(results.items()))


def _cut(own: Ranges, splits: Sequence[Split]) -> Ranges:
    """These ranges, of which each split's queries are one."""
    results = []
    for lo, hi in own:
        inside = [x.queries for x in splits if lo <= x.queries[0] < hi]
        cuts = sorted({lo, hi, *(at for pair in inside for at in pair)})
        results += list(pairwise(cuts))
    return tuple(results)


def _keys_of_others(work: Work, other: Tensor, chunk_of: Tensor) -> Tensor:
    """bool [key chunks]: those of which another rank holds a part."""
    result = torch.zeros(work.sees.shape[1], dtype=torch.bool)
    result[chunk_of[other]] = True
    return result


def _spared(work: Work, own: Ranges, others: Tensor, whole: frozenset[Range]) -> Ranges:
    """These ranges, but for whole ones cut such that results of queries without keys of others are merged
    with nothing."""
    results: list[Range] = []
    for lo, hi in own:
        reach = work.sees[lo // work.chunk : -(-hi // work.chunk), others].any(1)
        runs = [(lo + first * work.chunk, min(lo + end * work.chunk, hi)) for first, end in _runs(~reach)]
        pieces = list(pairwise(sorted({lo, hi, *(at for run in runs for at in run)})))
        few = len(pieces) <= MOST_PIECES and tokens(runs) >= LEAST_SPARED
        results += pieces if few and (lo, hi) not in whole else [(lo, hi)]
    return tuple(results)


def _late(work: Work, rows: Ranges, far: Tensor, whole: frozenset[Range]) -> Tensor:
    """bool [ranges]: those that are computed when all of their keys have arrived, the smallest first. far:
    those that see keys of others; guests, and queries that visit, never wait."""
    area = torch.tensor([float(work.area[lo // work.chunk : -(-hi // work.chunk)].sum()) for lo, hi in rows])
    may = (far & torch.tensor([x not in whole for x in rows], dtype=torch.bool)).nonzero().flatten()
    may = may[area[may].argsort(stable=True)]
    some = may[area[may].cumsum(0) <= LATE * area.sum()]
    return torch.zeros_like(far).index_fill_(0, some, True)


def _inside(keys: Ranges, cuts: Tensor) -> Tensor:
    """bool [segments]: those of these keys."""
    steps = torch.zeros(len(cuts), dtype=torch.int32)
    ends = torch.tensor(keys, dtype=torch.int64).reshape(-1, 2)
    for side, sign in ((0, 1), (1, -1)):
        at = torch.searchsorted(cuts, ends[:, side].contiguous())
        steps.index_add_(0, at, torch.full((len(at),), sign, dtype=torch.int32))
    return steps.cumsum(0)[:-1] > 0


def _segments(work: Work, held: tuple[Ranges, ...], splits: Sequence[Split]) -> tuple[Tensor, Tensor, Tensor]:
    """Keys cut where chunks end, holders change, or another rank computes a split: the cuts, and each
    segment's holder and chunk."""
    owned = sorted((lo, hi, rank) for rank, own in enumerate(held) for lo, hi in own)
    ends = {0, work.kv_len, *range(0, work.kv_len, work.chunk), *(lo for lo, _, _ in owned)}
    ends |= {end for split in splits for _, keys in split.parts for pair in keys for end in pair}
    cuts = torch.tensor(sorted(ends))
    starts = torch.tensor([lo for lo, _, _ in owned], dtype=torch.int64)
    ranks = torch.tensor([rank for _, _, rank in owned], dtype=torch.int64)
    holder = ranks[torch.searchsorted(starts, cuts[:-1], right=True) - 1] if len(ranks) else cuts[:0]
    return cuts, holder, cuts[:-1] // work.chunk


def _seen(work: Work, queries: Range) -> Tensor:
    """bool [key chunks]: those that some of these queries may see."""
    return work.sees[queries[0] // work.chunk : -(-queries[1] // work.chunk)].any(0)


def _stages(needed: Tensor, own: Tensor, cuts: Tensor, stages: int) -> Tensor:
    """The stage of each segment, int64: 0 for the rank's own, -1 for what it does not need."""
    stage = torch.full((len(needed),), -1)
    stage[needed & own] = 0
    far = (needed & ~own).nonzero().flatten()
    sizes = cuts.diff()[far]
    before = sizes.cumsum(0) - sizes
    total = int(sizes.sum())
    stage[far] = 1 + (before * stages // max(total, 1)).clamp(max=stages - 1)
    return stage


def _runs(there: Tensor) -> list[tuple[int, int]]:
    """First and last (exclusive) of each run of True."""
    steps = torch.nn.functional.pad(there.to(torch.int8), (1, 1)).diff()
    firsts, ends = ((steps == sign).nonzero().flatten().tolist() for sign in (1, -1))
    return list(zip(firsts, ends, strict=True))


def _rectangles(own: Ranges, wanted: Tensor, cuts: list[int]) -> tuple[Rectangle, ...]:
    return tuple(
        Rectangle(queries, (cuts[lo], cuts[hi]))
        for queries, row in zip(own, wanted, strict=True)
        for lo, hi in _runs(row)
    )


def _neighbours(rectangles: tuple[Rectangle, ...], whole: frozenset[Range]) -> tuple[Rectangle, ...]:
    """The same rectangles, those of queries next to each other as one where their keys are one range: the
    mask hides the rest. Queries that visit, or have several rectangles, stay by themselves."""
    count = Counter(x.queries for x in rectangles)
    alone = {queries for queries in count if count[queries] == 1} - whole
    results: list[Rectangle] = []
    for x in rectangles:
        both = _joined(results[-1], x) if results and {results[-1].queries, x.queries} <= alone else None
        if both is None:
            results.append(x)
        else:
            results[-1] = both
            alone.add(both.queries)
    return tuple(results)


def _joined(first: Rectangle, then: Rectangle) -> Rectangle | None:
    """One rectangle of two, if their queries are next to each other and their keys meet."""
    apart = then.keys[0] > first.keys[1] or first.keys[0] > then.keys[1]
    if first.queries[1] != then.queries[0] or apart:
        return None
    keys = min(first.keys[0], then.keys[0]), max(first.keys[1], then.keys[1])
    return Rectangle((first.queries[0], then.queries[1]), keys)


def _by_holder(there: Tensor, holder: Tensor, cuts: list[int]) -> list[tuple[int, Ranges]]:
    """The segments' keys by who holds them, neighbours joined."""
    at = there.nonzero().flatten()
    of, order = holder[at].sort(stable=True)
    at = at[order]
    first, last = runs(of, at - torch.arange(len(at)))
    results: dict[int, list[Range]] = {}
    for source, lo, hi in zip(of[first].tolist(), at[first].tolist(), at[last].tolist(), strict=True):
        results.setdefault(source, []).append((cuts[lo], cuts[hi + 1]))
    return [(source, tuple(keys)) for source, keys in results.items()]
