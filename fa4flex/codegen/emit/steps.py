"""Indices as a base that a tile shares plus a step that the compiler knows: x * c + y and t[i + x] by steps.

A term that is linear in kv or in kv - q is then one multiply-add with an immediate operand, and a load is one
instruction with an immediate offset, because all that depends on the base is the same for a whole tile.
Floats that decide on a jump stay the sums and products that they are: those of a base and a step round
otherwise.
"""

from __future__ import annotations

from fa4flex.codegen.analyze.linear import Linear, linear
from fa4flex.codegen.emit.nodes import BASES, KV, ONE, credit, device, jumps, rate
from fa4flex.codegen.expr import Expr, apply, const, rewritten, substitute, walk
from fa4flex.errors import Origin


def with_steps(root: Expr, came: dict[Expr, Origin | None], pairs: bool = True) -> Expr:
    """`root` with what is linear in an index written by steps, from the same lines (`came`). `pairs`: a
    thread's keys begin at an even one, so that neighbours may be loaded at once."""
    exact = set(walk(*(a for x in walk(root) if jumps(x) for a in x.args if "score" not in a.free)))

    def change(node: Expr, args: tuple[Expr, ...]) -> Expr:
        result = _linear(node.op, args) if node.kind == "float" and node not in exact else None
        if result is None and node.op == "load":
            result = _near(node, args, pairs)
        made = result or device(node.op, *args, value=node.value, kind=node.kind)
        credit(made, came.get(node), came)
        return made

    return rewritten(root, change)


# --- multiply-adds --------------------------------------------------------------------------------------


def _linear(op: str, args: tuple[Expr, ...]) -> Expr | None:
    """`stepped` in place of a product or sum, where all but the index is uniform."""
    if op == "mul":
        for x, c in (args, args[::-1]):
            if _is_index(x) and rate(c) == "uniform":
                return device("stepped", x, c, const(0.0))
    if op in ("add", "sub"):
        for x, y in (args, args[::-1]):
            if (x.op == "stepped" or _is_index(x)) and rate(y) == "uniform":
                negative = op == "sub" and x is args[1]
                index, c, rest = x.args if x.op == "stepped" else (x, ONE, const(0.0))
                if negative:
                    c, rest = apply("neg", c), apply("neg", rest)
                return device("stepped", index, c, _plus(rest, y, op == "sub" and not negative))
    return None


def _is_index(x: Expr) -> bool:
    return x.op == "to_float" and x.args[0] in BASES


def _plus(rest: Expr, y: Expr, subtract: bool) -> Expr:
    if rest.op == "const" and rest.value == 0.0:
        return apply("neg", y) if subtract else y
    return apply("sub" if subtract else "add", rest, y)


# --- loads ----------------------------------------------------------------------------------------------


def _near(load: Expr, index: tuple[Expr, ...], pairs: bool) -> Expr | None:
    """`near` in place of a load whose index moves with the key by steps."""
    bases, steps = [], []
    for i in index:
        step = _step(i)
        if step is None:
            return None
        symbol, count = step
        bases.append(i if symbol is None else substitute(i, {symbol: BASES[symbol]}))
        steps.append((count, None if symbol is None else symbol.value))
    if not any(count for count, _ in steps):
        return None
    even = pairs and index[-1] is KV and not any(count for count, _ in steps[:-1])
    return device("near", *bases, value=(load.value, tuple(steps), even), kind=load.kind)


def _step(i: Expr) -> tuple[Expr | None, int] | None:
    """Base that i takes steps with, and steps for one of it; None where i is not linear in it."""
    moving = [x for x in BASES if x.value in i.free]
    if not moving:
        return None, 0
    form: Linear = linear(i)
    results = [(atom, c) for atom, c in form.terms if atom in BASES]
    rest = [atom for atom, _ in form.terms if atom not in BASES and any(x.value in atom.free for x in BASES)]
    return results[0] if len(results) == 1 and not rest else None
