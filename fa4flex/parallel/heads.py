"""Heads that are spread over other ranks than the sequence is: by tensor parallelism, or for one call."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fa4flex.errors import InputError
from fa4flex.parallel.exchange import tokens
from fa4flex.parallel.links import Links
from fa4flex.parallel.placement import Placement, Range, Ranges


@dataclass(frozen=True, eq=False)
class Share:
    """Share of the heads that a rank's tensors have: the `part`-th of `parts` equal ones.

    links   to the ranks that have the other heads of the same tokens, one for each dimension of a mesh over
            which heads are spread
    """

    part: int = 0
    parts: int = 1
    links: tuple[Links, ...] = ()

    def of_sinks(self, sinks: Tensor | None, heads: int) -> Tensor | None:
        """The sinks of this share's query heads, so many in each share."""
        return sinks if sinks is None else sinks[self.part * heads : (self.part + 1) * heads]


ALL = Share()


def told_of_heads(q: int, k: int, v: int) -> str:
    """Numbers of heads of q, k and v in words."""
    return f"{q} query heads and " + (f"{k} KV heads" if k == v else f"{k} heads of keys and {v} of values")


def check_heads(heads: tuple[int, int, int], parts: int) -> None:
    """Raise InputError unless heads of q, k and v can be spread evenly."""
    if any(n % parts for n in heads):
        raise InputError(
            f"{told_of_heads(*heads)} spread over {parts} ranks",
            "numbers of heads that are multiples of the number of ranks",
            "spread heads over fewer ranks, or repeat the KV heads",
        )


# --- tokens of a rank of the sequence, spread over those that exchange them for heads -----------------------


def parts_in_order(total: int, ranks: int) -> tuple[Ranges, ...]:
    """The tokens that torch's Shard gives each rank: equal parts, rounded up, as long as there are any."""
    each = max(-(-total // ranks), 1)
    cuts = [min(rank * each, total) for rank in range(ranks + 1)]
    return tuple(((cuts[r], cuts[r + 1]),) if cuts[r] < cuts[r + 1] else () for r in range(ranks))


def split(own: Ranges, parts: int) -> tuple[Ranges, ...]:
    """Tokens of these ranges in equal parts, in their order."""
    return tuple(_between(own, part[0] if part else (0, 0)) for part in parts_in_order(tokens(own), parts))


def _between(own: Ranges, wanted: Range) -> Ranges:
    result, at = [], 0
    for lo, hi in own:
        first, last = max(wanted[0] - at, 0), min(wanted[1] - at, hi - lo)
        if first < last:
            result.append((lo + first, lo + last))
        at += hi - lo
    return tuple(result)


def split_placement(whole: Placement, parts: int) -> Placement:
    """The placement whose rank `r * parts + i` holds the i-th part of the tokens of rank r, and does as large
    a part of its work."""
    queries, keys = (
        tuple(part for own in held for part in split(own, parts)) for held in (whole.queries, whole.keys)
    )
    loads = tuple(load / parts for load in whole.loads for _ in range(parts))
    return Placement(whole.q_len, whole.kv_len, queries, keys, whole.kind, whole.chunk, loads)
