"""Extents that one proof serves: what is proved for all lengths up to some bound is proved once.

A proof for sequences of unknown lengths, as `Ragged` has them, holds for each of these lengths. So a call is
proved for a generous bound, and where that proof finds all that could be wished for, calls up to the bound
need none of their own. Where it does not, as a table of exactly kv_len elements is no longer than that,
smaller bounds are tried, and at last the call's own extents.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache

from fa4flex.codegen.analyze.domain import Ragged, Shape
from fa4flex.codegen.analyze.extents import ANY, Extents, Reach, each, extents_of
from fa4flex.codegen.analyze.facts import Facts
from fa4flex.codegen.analyze.prove import Proved
from fa4flex.codegen.expr import READS, index_of, nodes, slot_of

Sizes = tuple[tuple[int, ...], ...]
"""Shapes of captured tensors."""

LEAST_BOUND = 4096
"""Proofs hold up to this, or up to the next power of two."""


def widest(
    facts: Facts,
    shape: Shape,
    sizes: Sizes,
    planned: Callable[[Shape], Reach],
    proved: Callable[[Shape], Proved | None],
) -> tuple[Reach, Shape]:
    """Extents around those of `shape` that one proof serves, and one plan, and the problem to prove.

    `planned` plans with the proof of a problem and returns the extents for which the plan is valid. `proved`
    is what is found for a problem, None where it cannot be used for other extents. Where nothing is found for
    large bounds, bounds are no larger than what one plan serves. With indices that no proof finds in range,
    longer calls share what is found for `shape`.
    """
    exact = extents_of(shape)
    bounds = list(_bounds(facts, exact, sizes))
    largest = Ragged(bounds[0][0], shape.heads, *bounds[0][1:])
    result = proved(largest)
    if result is not None and result.in_range:
        return planned(largest).within(Reach(most=bounds[0])), largest
    limit = planned(shape)
    bounds = [each(min, most, limit.most) for most in bounds]
    problems = [Ragged(most[0], shape.heads, *most[1:]) for most in bounds]
    for most, problem in zip(bounds, problems, strict=True):
        result = proved(problem)
        if result is not None and result.in_range:
            return planned(problem).within(Reach(limit.least, most)), problem
    result = proved(problems[0])
    if result is not None and result == proved(shape):
        return planned(problems[0]).within(Reach(exact, bounds[0])), problems[0]
    return Reach.exactly(exact), shape


def _bounds(facts: Facts, exact: Extents, sizes: Sizes) -> Iterator[Extents]:
    """Upper bounds to try, the largest first."""
    result = _directly_read(facts)
    caps = [_cap(result.get(name, ()), sizes, n) for name, n in zip(("b", "q", "kv"), exact, strict=True)]
    most = each(
        min, (generous(exact[0]), generous(exact[1]), generous(exact[2])), (caps[0], caps[1], caps[2])
    )
    yield most
    # Tables of distances between queries and keys have 2 n - 1 elements for lengths of n.
    halves = [(n + 1) // 2 for size in sizes for n in size if (n + 1) // 2 >= max(exact[1:])]
    if halves and min(halves) < max(most[1:]):
        yield each(min, most, (ANY, min(halves), min(halves)))
    # Indices of queries or of keys, as `table[q // 2]` has, end with these alone.
    yield each(min, most, (ANY, next_power(exact[1]), ANY))
    yield each(min, most, (ANY, ANY, next_power(exact[2])))
    yield exact


def generous(n: int) -> int:
    """The bound to prove for where an extent is n."""
    return max(LEAST_BOUND, next_power(n))


def next_power(n: int) -> int:
    """The power of two that is not smaller."""
    return 1 << max(n - 1, 0).bit_length()


def _cap(reads: tuple[tuple[int, int], ...], sizes: Sizes, n: int) -> int:
    """The end of the shortest of these dimensions that does not end before n."""
    ends = (sizes[slot][dim] for slot, dim in reads if dim < len(sizes[slot]))
    return min((end for end in ends if end >= n), default=ANY)


@lru_cache(maxsize=1024)
def _directly_read(facts: Facts) -> Mapping[str, tuple[tuple[int, int], ...]]:
    """Dimensions of captured tensors, by slot, that a symbol itself is the index of. In an output function
    "kv" is a channel."""
    results: dict[str, tuple[tuple[int, int], ...]] = {}
    pairs = frozenset(nodes(facts.score, facts.mask))
    for node in nodes(*facts.roots):
        if node.op in READS:
            for dim, index in enumerate(index_of(node)):
                if index.op == "sym" and (node in pairs or index.value != "kv"):
                    results[index.value] = (*results.get(index.value, ()), (slot_of(node), dim))
    return results
