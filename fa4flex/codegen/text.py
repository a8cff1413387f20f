"""Expressions as text: JSON, one row per node, arguments by the rows' numbers.

Programs travel as text in the graphs that torch.compile and torch.export keep. A file may come from anywhere,
so reading one builds nothing but nodes of the grammar, and raises InputError for anything else.
"""

from __future__ import annotations

import json
import math
from typing import Any

from fa4flex.codegen.expr import Expr, make, walk
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
    match op:
        case "const":
            value = float(value["float"]) if isinstance(value, dict) else _const(value, kind)
        case "sym":
            value = str(value)
        case "scalar" | "load":
            value, kind = int(value), _one_of(("bool", "int", "float"), kind)
        case "search":
            value = int(value[0]), _one_of(("left", "right"), value[1])
        case "reduce":
            value = value[0], str(value[1]), int(value[2])
        case "round_to":
            value = _one_of(("float16", "bfloat16", "float32"), value)
    return make(op, tuple(args), value, kind)


def _const(value: Any, kind: Any) -> bool | int | float:
    if type(value) not in (bool, int, float):
        raise TypeError(f"constant {value!r}")
    return float(value) if kind == "float" else value


def _one_of(choices: tuple[str, ...], value: Any) -> Any:
    if value not in choices:
        raise ValueError(f"{value!r} where one of {choices} is needed")
    return value
