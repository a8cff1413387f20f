"""At which batch, heads and lengths a program can be shown, when only some of them are given."""

from __future__ import annotations

from dataclasses import dataclass

import numpy

from fa4flex.codegen.analyze.tiles import Shape
from fa4flex.codegen.build import Program
from fa4flex.codegen.expr import Expr, loads
from fa4flex.errors import InputError

USUAL_LENGTH = 2048
USUAL_HEADS = 8


@dataclass(frozen=True)
class Setting:
    """The shape a program is shown at, and what had to be chosen differently from what was asked."""

    shape: Shape
    notes: tuple[str, ...] = ()


def implied(program: Program) -> dict[str, int]:
    """Extents that captured tensors give to b, h, q, kv and d: `ids[b, kv]` has ids.shape[1] keys."""
    results = _implied(program)
    if program.of_output is not None:
        others = _implied(program.of_output)
        if "kv" in others:
            others["d"] = others.pop("kv")
        results |= {name: min(size, results.get(name, size)) for name, size in others.items()}
    blocks, sinks = program.variant.blocks, program.variant.sinks
    if blocks is not None:
        results |= {"q": blocks.q_len, "kv": blocks.kv_len}
        results |= {name: size for name, size in zip("bh", blocks.classes.shape) if size > 1}
    if sinks is not None:
        results["h"] = sinks.now().shape[0]
    return results


def _implied(program: Program) -> dict[str, int]:
    """The same by the functions of a program, under the symbols of its expressions."""
    results: dict[str, int] = {}
    for load in loads(program.facts.score, program.facts.mask):
        shape = program.operands[load.value].shape
        for index, extent in zip(load.args, shape):
            name, per_entry = _plain(program, index)
            if name in ("b", "h", "q", "kv"):
                results[name] = min(extent * per_entry, results.get(name, extent * per_entry))
    return results


def _plain(program: Program, index: Expr) -> tuple[str, int]:
    """The symbol that walks a dimension, and how many of its values share an entry: ("q", 64) for q // 64."""
    if index.op == "sym":
        return index.value, 1
    if index.op == "floordiv" and index.args[0].op == "sym":
        symbol, divisor = index.args
        if divisor.op in ("const", "scalar"):
            return symbol.value, divisor.value if divisor.op == "const" else int(
                program.scalars[divisor.value]
            )
    return "", 1


def is_size(value: object) -> bool:
    """True if `value` counts something: a positive int."""
    return isinstance(value, (int, numpy.integer)) and not isinstance(value, bool) and bool(value > 0)


def setting(
    program: Program,
    q_len: int | None = None,
    kv_len: int | None = None,
    batch: int | None = None,
    heads: int | None = None,
) -> Setting:
    """Sizes as given where possible; lengths beyond a captured tensor are cut to it, with a note."""
    for name, value in (("q_len", q_len), ("kv_len", kv_len), ("batch", batch), ("heads", heads)):
        if value is not None and not is_size(value):
            raise InputError(f"{name}={value!r}", "a positive int", f"leave {name} out, or give a size")
    known = implied(program)
    q_len, kv_len, notes = _lengths(program, known, q_len, kv_len)
    heads = heads or known.get("h") or (USUAL_HEADS if _needs_heads(program) else 1)
    return Setting(Shape(batch or known.get("b", 1), heads, q_len, kv_len), notes)


def _lengths(
    program: Program, known: dict[str, int], q_len: int | None, kv_len: int | None
) -> tuple[int, int, tuple[str, ...]]:
    square = kv_len is None or kv_len == q_len
    asked_q = known.get("q", known.get("kv", USUAL_LENGTH)) if q_len is None else q_len
    asked_kv = (known.get("kv", asked_q) if q_len is None else asked_q) if kv_len is None else kv_len
    most_q, most_kv = known.get("q", asked_q), known.get("kv", asked_kv)
    if program.variant.blocks is not None:
        shown_q, shown_kv = most_q, most_kv
    else:
        shown_q, shown_kv = min(asked_q, most_q), min(asked_kv, most_kv)
        if square and asked_q == asked_kv:
            shown_q = shown_kv = min(shown_q, shown_kv)
    fixed = "captured tensors fix" if program.variant.blocks is None else "the block map fixes"
    notes = tuple(
        f"{fixed} {name} at {shown}: shown at {shown} instead of {asked}"
        for name, shown, asked in (("q_len", shown_q, q_len), ("kv_len", shown_kv, kv_len))
        if asked is not None and shown != asked
    )
    return shown_q, shown_kv, notes


def _needs_heads(program: Program) -> bool:
    functions = [program, *([] if program.of_output is None else [program.of_output])]
    roots = [root for each in functions for root in (each.facts.score, each.facts.mask)]
    return any({"h", "num_heads"} & root.free for root in roots)
