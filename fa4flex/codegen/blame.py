"""Errors of evaluation in the user's words: which line, and which captured tensors and numbers.

What computes sees expressions and slots alone and raises errors that carry the `node` concerned. The door
knows the program, and dresses them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from fa4flex.codegen.expr import Expr
from fa4flex.errors import Fa4flexError, Origin


def dress(
    error: Fa4flexError,
    tensors: Sequence[str],
    numbers: Sequence[str],
    *origins: Mapping[Expr, Origin],
) -> None:
    """Give an error that carries a `node` the user's line, and the names of captured tensors and numbers.

    `tensors` and `numbers` are names by slot, `origins` the lines of traced nodes. Other errors, and errors
    that have a line already, stay as they are.
    """
    node = getattr(error, "node", None)
    if not isinstance(node, Expr) or error.where is not None:
        return
    names = {"t": tensors, "s": numbers}

    def named(result: re.Match[str]) -> str:
        known, slot = names[result[1]], int(result[2])
        return known[slot] if slot < len(known) else result[0]

    value = re.sub(r"\b([ts])(\d+)\b", named, error.given)
    slot = getattr(error, "slot", None)
    if slot is not None and slot < len(tensors):
        value = value.replace("a captured tensor", f"the captured tensor {tensors[slot]}", 1)
    Fa4flexError.__init__(error, value, error.expected, error.fix, _line(node, origins))


def _line(node: Expr, origins: Sequence[Mapping[Expr, Origin]]) -> Origin | None:
    """The line of a node. Lengths and numbers may have been put into it since: then that of one alike."""
    for lines in origins:
        if node in lines:
            return lines[node]
    for lines in origins:
        for other, line in lines.items():
            if (other.op, other.value, other.kind) == (node.op, node.value, node.kind):
                return line
    return None
