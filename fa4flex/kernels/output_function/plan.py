"""The plan of the kernels of an output function, and what they take. Data only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from fa4flex.codegen.analyze.facts import Facts
from fa4flex.codegen.analyze.gradient import CapturedGradient, plain_index
from fa4flex.codegen.analyze.prove import Proved
from fa4flex.codegen.expr import READS, nodes, slot_of
from fa4flex.errors import UnsupportedError
from fa4flex.kernels.output_function.config import BYTES, THREADS, Config, Piecewise, Sum
from fa4flex.kernels.plan.lengths import Lengths
from fa4flex.kernels.plan.problem import Half, Problem, itemsize
from fa4flex.kernels.plan.target import Target

MOST_ROWS = 1 << 30
"""Rows of all heads that 32-bit arithmetic counts."""

ELEMENTS = ("bfloat16", "float16", "float32", "int8", "int16", "uint8", "uint16", "bool")
"""Dtypes of captured tensors that arithmetic of 32 bits is exact for, whatever they hold."""

MOST_SUMS = 8
"""Gradients of captured tensors that one launch makes: each takes registers of every thread."""


@dataclass(frozen=True)
class Table:
    """A captured tensor. even: its last stride is 1, its address and the others are multiples of BYTES."""

    dtype: str
    shape: tuple[int, ...]
    even: bool


@dataclass(frozen=True)
class Inputs:
    """Calls that one plan is for.

    dtype        of the output
    compute      that the function is computed in
    width        channels of a head
    sizes        sequences, heads and rows of the tensors; packed, of all tokens
    lengths      "dense", "packed" or "used"
    heads_inner  heads of a token lie closer together than tokens of a head do
    placed       rows have positions in a whole, or heads begin with another than the whole's first
    q_len        rows of the whole
    operands     captured tensors
    """

    dtype: str
    compute: str
    width: int
    sizes: tuple[int, int, int]
    lengths: Lengths
    heads_inner: bool
    placed: bool
    q_len: int
    operands: tuple[Table, ...]

    @property
    def problem(self) -> Problem:
        """Raises UnsupportedError for dtypes and widths that no kernel has."""
        operands = tuple([(x.dtype, len(x.shape)) for x in self.operands])
        kind: Half = self.dtype  # type: ignore[assignment]
        return Problem(
            self.width, self.width, kind, kind, self.lengths, operands=operands, in_range=False, output=True
        )


@dataclass(frozen=True)
class Finish:
    """Steps from what a launch writes to a gradient.

    whole   the launch writes all of it: memory may hold anything before
    summed  of parts, the dimensions that are added up, by names; the others are those of the tensor's `index`
    """

    whole: bool
    index: tuple[str, ...] = ()
    summed: tuple[str, ...] = ()


@dataclass(frozen=True)
class OutputPlan:
    """A pass on `target`: `finishes` of its sums, if it is a backward pass."""

    target: Target
    problem: Problem
    direction: Literal["output", "output_backward"]
    heads_inner: bool
    piecewise: tuple[Piecewise, ...]
    sums: tuple[Sum, ...] = ()
    finishes: tuple[Finish, ...] = ()

    module: ClassVar[str] = "fa4flex.kernels.output_function"

    def config(self) -> Config:
        return Config(
            self.problem.head_dim_v, self.problem.lengths, self.heads_inner, self.piecewise, self.sums
        )

    def explain(self) -> str:
        config = self.config()
        lines = [
            f"Output function on {self.target.chip}: {config.lanes} threads take a row, {BYTES} bytes each",
            f"{config.rows} rows per block of {THREADS} threads",
        ]
        ways = {"each": "each element written once", "row": "sums of rows", "parts": "sums of sums of rows"}
        lines += [f"gradient of captured tensor {one.slot}: {ways[one.adding]}" for one in self.sums]
        return "\n".join(lines)


def accepts(facts: Facts, inputs: Inputs, needs: Sequence[int] | None = None) -> None:
    """Raise UnsupportedError for what PyTorch operations compute instead. needs: of backward passes, slots of
    captured tensors whose gradients are wanted; None for forward passes."""
    problem = inputs.problem if inputs.dtype in get_args(Half) else None
    if problem is None:
        raise _no_kernel(f"{inputs.dtype} outputs")
    if inputs.compute != "float32":
        raise _no_kernel(f"arithmetic in {inputs.compute}")
    for x in inputs.operands:
        if x.dtype not in ELEMENTS:
            raise _no_kernel(f"captured tensors in {x.dtype}")
    if 0 in (*inputs.sizes, *(n for x in inputs.operands for n in x.shape)):
        raise _no_kernel("tensors without elements")
    if math.prod(inputs.sizes) >= MOST_ROWS:
        raise _no_kernel(f"{MOST_ROWS} rows or more")
    roots = [facts.score]
    if needs is not None:
        terms = facts.gradient.of_slots(needs)
        roots += [facts.gradient.by_score, *(term.value for term in terms)]
    if any(node.op == "reduce" for node in nodes(*roots)):
        raise _no_kernel("sums and their like over a captured tensor")
    if len(needs or ()) > MOST_SUMS:
        raise _no_kernel(f"gradients of more than {MOST_SUMS} captured tensors")
    for slot in needs or ():
        _sum_of(facts, inputs, slot)


def plan_output(
    facts: Facts, inputs: Inputs, proved: Proved, target: Target, needs: Sequence[int] | None = None
) -> OutputPlan:
    """The plan of a forward pass, or with `needs` of a backward pass. Raises UnsupportedError as `accepts`
    does, and for integers of 64 bits."""
    accepts(facts, inputs, needs)
    if proved.wide_index:
        raise _no_kernel("integers beyond 2^31")
    made = [_sum_of(facts, inputs, slot) for slot in needs or ()]
    return OutputPlan(
        target,
        inputs.problem,
        "output" if needs is None else "output_backward",
        inputs.heads_inner,
        _piecewise(facts, inputs),
        tuple([x for x, _ in made]),
        tuple([x for _, x in made]),
    )


def _no_kernel(what: str) -> UnsupportedError:
    return UnsupportedError(
        f"an output function with {what}",
        "what kernels of output functions take",
        "nothing: it is computed in PyTorch operations instead",
    )


# --- captured tensors -----------------------------------------------------------------------------------


def _piecewise(facts: Facts, inputs: Inputs) -> tuple[Piecewise, ...]:
    """Tensors whose reads are all at one place, in which the channel is last."""
    results = []
    for slot, table in enumerate(inputs.operands):
        reads = [x for x in nodes(facts.score) if x.op in READS and slot_of(x) == slot]
        index = plain_index(reads[0].args) if len(reads) == 1 and reads[0].op == "load" else None
        whole = table.even and len(table.shape) > 0 and table.shape[-1] >= inputs.width
        if index and index[-1] == "kv" and whole:
            results.append(Piecewise(slot, index))
    return tuple(results)


def _sum_of(facts: Facts, inputs: Inputs, slot: int) -> tuple[Sum, Finish]:
    """The way to the gradient of a captured tensor. Raises UnsupportedError where elements are read in
    several places, or by some elements of the output that are not whole rows."""
    table, terms = inputs.operands[slot], facts.gradient.of_slots([slot])
    index = _index(terms)
    if index is None:
        raise _no_kernel("gradients of captured tensors that are read at computed places, or at several")
    sizes = _sizes(inputs)
    present = {*index, *(name for name, size in sizes.items() if size == 1)}
    if any(size < sizes[name] for name, size in zip(index, table.shape, strict=True) if name in sizes):
        raise _no_kernel("captured tensors that end before the output does")
    exact = all(size == sizes.get(name) for name, size in zip(index, table.shape, strict=True))
    if {"b", "h", "q"} <= present and "q" in index:
        whole = exact and not inputs.placed and inputs.lengths != "packed"
        if "kv" not in index:
            return Sum(slot, "row", table.dtype, index), Finish(whole, index)
        pieces = index[-1] == "kv" and table.shape[-1] * itemsize(table.dtype) % BYTES == 0
        pieces = pieces and itemsize(table.dtype) in (2, 4)
        return Sum(slot, "each", table.dtype, index, pieces), Finish(whole, index)
    if "kv" in index:
        raise _no_kernel("gradients of captured tensors whose channels several rows read")
    summed = ("h",) if inputs.lengths == "packed" else ("b", "q", "h")
    if not set(index) <= set(summed) or (inputs.placed and {"q", "h"} & set(index)):
        raise _no_kernel("gradients of captured tensors that parts of several sequences read")
    rest = tuple([name for name in ("b", "q", "h") if name not in index])
    return Sum(slot, "parts", "float32"), Finish(exact, index, rest)


def _index(terms: Sequence[CapturedGradient]) -> tuple[str, ...] | None:
    if len(terms) != 1 or terms[0].axes:
        return None
    return plain_index(terms[0].index)


def _sizes(inputs: Inputs) -> dict[str, int]:
    """Values that symbols may have: of packed rows, their places in a sequence are not known."""
    batch, heads, rows = inputs.sizes
    sizes = {"b": batch, "h": heads, "kv": inputs.width}
    return sizes if inputs.lengths == "packed" else {**sizes, "q": max(rows, inputs.q_len)}
