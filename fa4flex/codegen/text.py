"""Expressions as text: JSON, one row per node, arguments by the rows' numbers.

Programs travel as text in the graphs that torch.compile and torch.export keep. A file may come from anywhere,
so reading one builds nothing but nodes of the grammar, and raises InputError for anything else.
"""

from __future__ import annotations

import json
import math
from typing import Any

from fa4flex.codegen.expr import (
    REDUCTIONS,
    Expr,
    apply,
    const,
    load,
    reduce,
    round_to,
    scalar,
    search,
    sym,
    walk,
)
from fa4flex.codegen.ops import OPS
from fa4flex.errors import InputError


def dump(*roots: Expr) -> str:
    """The expressions as text; equal expressions give equal text."""
    rows: dict[Expr, int] = {}
    lines: list[Any] = []
    for node in walk(*roots):
        rows[node] = len(lines)
        args = [rows[arg] for arg in node.args]
        lines.append([node.op, node.kind, _plain(node.value), args])
    return json.dumps([lines, [rows[root] for root in roots]], separators=(",", ":"))


def parse(text: str) -> tuple[Expr, ...]:
    """The expressions that `dump` wrote. Raises InputError for any other text."""
    try:
        lines, roots = json.loads(text)
        made: list[Expr] = []
        for op, kind, value, args in lines:
            made.append(_node(op, kind, value, [made[arg] for arg in args]))
        return tuple(made[root] for root in roots)
    except (ValueError, TypeError, KeyError, IndexError) as error:
        raise InputError(
            f"the text of a program that cannot be read: {error}",
            "text written by this version of fa4flex",
            "export or compile the model again",
        ) from error


def _plain(value: Any) -> Any:
    """A float that JSON has no number for as {"float": its name}."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(value)}
    return list(value) if isinstance(value, tuple) else value


def _node(op: str, kind: Any, value: Any, args: list[Expr]) -> Expr:
    if op == "sym":
        return sym(str(value))
    if op == "const":
        return const(float(value["float"]) if isinstance(value, dict) else _const(value, kind))
    if op == "scalar":
        return scalar(int(value), _kind(kind))
    if op == "load":
        return load(int(value), args, _kind(kind))
    if op == "search":
        slot, side = value
        if side not in ("left", "right"):
            raise ValueError(f"side {side!r}")
        return search(int(slot), side, args[0], args[1:])
    if op == "reduce":
        how, axis, extent = value
        if how not in REDUCTIONS:
            raise ValueError(f"reduction {how!r}")
        return reduce(how, str(axis), int(extent), args[0])
    if op == "round_to":
        if value not in ("float16", "bfloat16", "float32"):
            raise ValueError(f"precision {value!r}")
        return round_to(value, args[0])
    if op not in OPS:
        raise ValueError(f"operation {op!r}")
    return apply(op, *args)


def _const(value: Any, kind: Any) -> bool | int | float:
    if type(value) not in (bool, int, float):
        raise TypeError(f"constant {value!r}")
    return float(value) if kind == "float" else value


def _kind(kind: Any) -> Any:
    if kind not in ("bool", "int", "float"):
        raise ValueError(f"kind {kind!r}")
    return kind
