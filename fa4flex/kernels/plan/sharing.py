"""Tensor memory over time: what shares columns never lives at once.

A content lives from its first write to its last read, and which contents there are follows from the pipeline.
Two that share columns are legal where, in every timing of the chip, one has ended before the other begins.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise
from textwrap import wrap
from typing import TYPE_CHECKING

from fa4flex.kernels.plan.errors import PlanError
from fa4flex.kernels.plan.happens_before import Lifetime, Step, Trace
from fa4flex.kernels.plan.tensor_memory import WHOLE, Columns
from fa4flex.kernels.plan.topology import WIDTH, Topology
from fa4flex.kernels.plan.verify import round_robin, trace

if TYPE_CHECKING:
    import networkx

KEY_TILES = (3, 1, 2)
"""Numbers of key tiles of the query tiles whose run shows how contents follow each other."""

Content = tuple[str, int]
"""Content of a range: its name and its number."""


@lru_cache(maxsize=64)
def lifetimes(topology: Topology, columns: Columns) -> networkx.DiGraph:
    """Nodes are contents, with `written` and `read` by whom; an edge leads from each to the next one that
    takes some of its columns, with `because`: the hand-overs that lead from the last read of the one to the
    first write of the other.

    Raises PlanError where none do, so that both may live at once.
    """
    import networkx

    run = trace(topology, KEY_TILES[:1] if topology.one_tile else KEY_TILES, round_robin())
    steps = run.graph
    graph = networkx.DiGraph()
    known = {name for name in columns.names if name != WHOLE}
    contents = {c: life for c, life in run.lifetimes.items() if c[0] in known and life.writes}
    for content, life in contents.items():
        written, read = ({run.steps[i].who for i in some} for some in (life.writes, life.reads))
        graph.add_node(content, written=tuple(sorted(written)), read=tuple(sorted(read)))
    shared = set(columns.overlaps) | {(name, name) for name in known}
    stages = dict(topology.stages)
    for (a, b), stage in ((pair, s) for pair in shared for s in range(stages.get(pair[0], 1))):
        both = [c for c in contents if c[0] in (a, b) and c[1] % stages.get(c[0], 1) == stage]
        for before, after in pairwise(sorted(both, key=lambda c: min(contents[c].writes))):
            chain = _chain(run, steps, contents[before], contents[after])
            if chain is None:
                raise PlanError(
                    f"{_said(before)} and {_said(after)} share columns of tensor memory and may live at once",
                    "one that ends before the other begins",
                    "give one of them columns of its own",
                )
            graph.add_edge(before, after, because=chain)
    return graph


def _chain(run: Trace, steps: networkx.DiGraph, before: Lifetime, after: Lifetime) -> tuple[Step, ...] | None:
    """Hand-overs from the end of one content to the beginning of the next; None where a use of the one may
    come after the beginning of the other."""
    import networkx

    # An update is a use of the content before, and the first write of its own.
    ends = [i for i in before.writes + before.reads if i not in after.writes]
    pairs = [(end, begin) for end in ends for begin in after.writes]
    if not all(run.before(end, begin) or _other_rows(run, end, begin) for end, begin in pairs):
        return None
    end, begin = max(ends), next(i for i in after.writes if run.before(max(ends), i))
    return tuple(run.steps[i] for i in networkx.shortest_path(steps, end, begin))


def _other_rows(run: Trace, a: int, b: int) -> bool:
    """Warps of a warpgroup touch different rows."""
    first, second = run.steps[a].warp, run.steps[b].warp
    return None not in (first, second) and first != second


def sharing(topology: Topology, columns: Columns) -> Iterator[str]:
    """Reasons why ranges that share columns may, in words, line by line."""
    graph = lifetimes(topology, columns)
    for a, b in columns.overlaps:
        if a == WHOLE:
            continue
        for first, second in ((a, b), (b, a)):
            edges = [e for e in graph.edges(data="because") if (e[0][0], e[1][0]) == (first, second)]
            if edges:
                why = _reason(*min(edges, key=lambda e: len(e[2])))
                yield from wrap(why, WIDTH, initial_indent=" " * 2, subsequent_indent=" " * 4)


def _reason(before: Content, after: Content, chain: tuple[Step, ...]) -> str:
    kept = [chain[0], *(step for last, step in pairwise(chain[:-1]) if step.who != last.who), chain[-1]]
    told = ", then ".join(map(str, kept))
    return f"{_said(before)} has ended when {_said(after)} begins: {told}"


def _said(content: Content) -> str:
    return f"{content[0]} tile {content[1]}"
