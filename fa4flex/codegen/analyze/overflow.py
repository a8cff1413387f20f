"""How large integers get: exact ranges of every integer node over the whole problem.

Device code computes indices in 32 bits where they fit and in 64 where they do not; nothing wraps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch

from fa4flex.codegen.analyze.bounds import bounds
from fa4flex.codegen.analyze.domain import Shape, on_host
from fa4flex.codegen.analyze.rules import Bounds
from fa4flex.codegen.analyze.tables import Tables
from fa4flex.codegen.evaluate import Captured
from fa4flex.codegen.expr import Expr, nodes
from fa4flex.errors import UnsupportedError

_SAFE = 1 << 61
"""Beyond this, the difference of two int64 numbers might not be one."""


def index_ranges(roots: Sequence[Expr], shape: Shape, captured: Captured) -> dict[Expr, tuple[int, int]]:
    """Bounds, as exact Python ints, of every integer node under `roots` over all b, h, q, kv of `shape`."""
    wanted = integers(*roots)
    found = _ranges(roots, wanted, shape, Tables(on_host(captured, *wanted)))
    return {node: (int(found[node].lo), int(found[node].hi)) for node in wanted}


@lru_cache(maxsize=1024)
def integers(*roots: Expr) -> tuple[Expr, ...]:
    """Every integer node under `roots`: what these are computed from decides indices."""
    return tuple(node for node in nodes(*roots) if node.kind == "int")


def overflowing(
    roots: Sequence[Expr], shape: Shape, captured: Captured, bits: int = 32
) -> list[tuple[Expr, tuple[int, int]]]:
    """Integer nodes that may not fit in a signed integer of `bits`, with their ranges, arguments first."""
    limit = 1 << (bits - 1)
    ranges = index_ranges(roots, shape, captured)
    return [(node, ends) for node, ends in ranges.items() if ends[0] < -limit or ends[1] >= limit]


def refuse_overflow(roots: Sequence[Expr], shape: Shape, captured: Captured) -> None:
    """Raise UnsupportedError where integer arithmetic of `roots` might not fit in 64 bits."""
    grows = (
        node for node in nodes(*roots) if node.kind == "int" and node.op in ("mul", "shl", "reduce", "to_int")
    )
    if next(grows, None) is None:
        return  # sums of a few indices and lengths cannot get there
    for node, (low, high) in overflowing(roots, shape, captured, bits=64):
        raise UnsupportedError(
            f"`{node}` lies between {low} and {high} at q_len={shape.q_len}, kv_len={shape.kv_len}",
            "integer arithmetic that fits in 64-bit integers",
            "keep the products smaller: compare before multiplying, or compute in floats with .float()",
        )


def beyond_int64(root: Expr, shape: Shape, tables: Tables) -> Mapping[Expr, Bounds]:
    """Ranges over the whole problem of nodes that int64 interval arithmetic cannot be trusted with.

    These are the nodes that may be too large, and all that is computed from them.
    """
    found = _ranges([root], [root], shape, tables)
    tainted: dict[Expr, Bounds] = {}
    for node in nodes(root):
        x = found.get(node)
        too_large = node.kind == "int" and x is not None and (x.lo < -_SAFE or x.hi > _SAFE)
        if x is not None and (too_large or any(a in tainted for a in node.args)):
            tainted[node] = x
    return tainted


def _ranges(
    roots: Sequence[Expr], wanted: Sequence[Expr], shape: Shape, tables: Tables
) -> dict[Expr, Bounds]:
    """Of every node under those `wanted`, which are under `roots`, and perhaps in their loops."""
    every = nodes(*wanted)
    infinity = torch.tensor(torch.inf, dtype=torch.float64)
    symbols = shape.ranges() | {"score": Bounds(-infinity, infinity, True)}
    axes = {node.value[1]: Bounds(0, node.value[2] - 1) for node in nodes(*roots) if node.op == "reduce"}
    # A loop bounds its body step by step. What is inside is bounded apart, over all steps at once.
    outside = [node for node in every if not node.free & axes.keys()]
    inside = [node for node in every if node.free & axes.keys()]
    found = dict(zip(outside, bounds(outside, symbols, tables)))
    return found | dict(zip(inside, bounds(inside, symbols | axes, tables)))
