"""The whole flow from a variant to a program, one line per stage, and the traces that are kept.

Running and analysing a user's functions takes a millisecond and more, so traces are kept by the code of the
functions. A kept trace serves another call, also with other closures over the same code, while its guards
hold; captured tensors and numbers are read anew at each call in either case (see `trace/paths.py`).
"""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import cached_property
from types import FunctionType, MappingProxyType, MethodType
from typing import Any, NamedTuple

from torch import Tensor

from fa4flex.codegen.analyze.facts import SCORE, Facts, analyze
from fa4flex.codegen.evaluate import Captured
from fa4flex.codegen.expr import TRUE, keep, load, scalar
from fa4flex.codegen.trace import Captures, Operand, Traced, trace
from fa4flex.codegen.trace.dispatch import no_more_registered, registrations
from fa4flex.codegen.trace.dtypes import same_default_dtype
from fa4flex.codegen.trace.paths import Guard, Reader, reader_of, root
from fa4flex.codegen.trace.traced import ModKind, renumber
from fa4flex.errors import UnsupportedError
from fa4flex.primitives.base import Mod as AnyMod
from fa4flex.primitives.weights import SOFTMAX, Weights
from fa4flex.variant import Variant

Mod = Callable[..., Any]

MOST_CODES, MOST_TRACES = 1024, 32
"""Traces are kept for so many pairs of functions, so many for each pair; the least recently used go first."""


@dataclass(frozen=True, eq=False)
class Trace:
    """Result of tracing and analysing a variant's functions, without any tensor or number of theirs.

    `operands` have in place of their tensors positions among the tensors that `reader` finds. An output
    function has a trace of its own, whose facts have it in place of the score mod.
    """

    score: Traced | None
    mask: Traced | None
    output: Traced | None
    facts: Facts
    operands: tuple[Operand, ...]
    bases: int
    """Number of tensors that `reader` finds."""
    scalar_names: tuple[str, ...]
    reader: Reader | None
    """None where something captured could change without notice: such a trace serves one call."""

    def tensors(self, bases: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The captured tensors by slot, derived ones computed now."""
        if len(bases) == len(self.operands) and not self.derived:
            return bases
        return tuple([operand.of(bases).value() for operand in self.operands])

    @property
    def functions(self) -> tuple[Traced, ...]:
        """The traced functions that there are."""
        return tuple([x for x in (self.score, self.mask, self.output) if x is not None])

    @cached_property
    def derived(self) -> bool:
        """True if some operand is computed from captured tensors."""
        return any(operand.recipe is not None for operand in self.operands)


class Bound(NamedTuple):
    """A trace, with the captured tensors and numbers of one variant as they are now."""

    trace: Trace
    bases: tuple[Tensor, ...]
    scalars: tuple[int | float, ...]

    def beside(self, output: Bound, trace: Trace) -> Bound:
        """Captures of this and of an output function, under the trace of both."""
        return Bound(trace, (*self.bases, *output.bases), (*self.scalars, *output.scalars))


def joined(core: Trace, output: Trace) -> Trace:
    """The trace of attention and its output function, for kernels that compute both: tensors and numbers of
    the function come after those of the attention."""
    slots = {slot: len(core.operands) + slot for slot in range(len(output.operands))}
    numbers = {slot: len(core.scalar_names) + slot for slot in range(len(output.scalar_names))}
    facts = replace(core.facts, output=renumber(output.facts.score, slots, numbers, {}))
    operands = (*core.operands, *(operand.moved(core.bases) for operand in output.operands))
    names, bases = (*core.scalar_names, *output.scalar_names), core.bases + output.bases
    return Trace(core.score, core.mask, output.output, facts, operands, bases, names, None)


def dropped(
    facts: Facts, operands: tuple[Tensor, ...], scalars: tuple[Any, ...], seed: Tensor, threshold: int
) -> tuple[Facts, tuple[Tensor, ...], tuple[Any, ...]]:
    """The same facts and captures with dropout, whose seed and threshold come after all others."""
    kept = keep(load(len(operands), (), "int"), scalar(len(scalars), "int"))
    return analyze(facts.score, facts.mask, kept, facts.weights), (*operands, seed), (*scalars, threshold)


@dataclass(frozen=True)
class Program:
    """A variant, traced and analysed, with what it captured as it is now.

    `output` is the trace of its output function, where it has one; all else is of the variant without it.
    """

    variant: Variant
    bound: Bound
    output: Bound | None = None

    @property
    def of_output(self) -> Program | None:
        """The output function as a program, whose facts have it in place of a score mod."""
        return None if self.output is None else Program(self.variant, self.output)

    @property
    def joined(self) -> Program:
        """The program with its output function among its facts, as kernels apply it."""
        if self.output is None:
            return self
        trace = joined(self.bound.trace, self.output.trace)
        return Program(self.variant, self.bound.beside(self.output, trace))

    @property
    def score(self) -> Traced | None:
        """The score mod; in a program of an output function that function."""
        trace = self.bound.trace
        return trace.score if trace.facts.output is not None else trace.score or trace.output

    @property
    def mask(self) -> Traced | None:
        return self.bound.trace.mask

    @property
    def facts(self) -> Facts:
        return self.bound.trace.facts

    @property
    def scalars(self) -> tuple[int | float, ...]:
        return self.bound.scalars

    @property
    def scalar_names(self) -> tuple[str, ...]:
        return self.bound.trace.scalar_names

    @cached_property
    def operands(self) -> tuple[Operand, ...]:
        return tuple(operand.of(self.bound.bases) for operand in self.bound.trace.operands)

    def captured(self) -> Captured:
        """The captured tensors and numbers."""
        return Captured(self.tensors(), self.scalars)

    def tensors(self) -> tuple[Tensor, ...]:
        return self.bound.trace.tensors(self.bound.bases)


def build(variant: Variant) -> Program:
    """Variant -> Program. Raises TraceError where a mod cannot be turned into an expression."""
    output = None if variant.output_mod is None else bind_output(variant.output_mod)
    return Program(variant, bind(variant.shown), output)


# --- kept traces --------------------------------------------------------------------------------------------

_kept: OrderedDict[Hashable, tuple[Trace, ...]] = OrderedDict()
_changing = threading.Lock()
"""Held while entries are exchanged. An entry never changes: other threads look through it meanwhile."""


def bind(variant: Variant, likely: Trace | None = None) -> Bound:
    """A trace of the variant's functions that holds now, and what they captured. `likely` is asked first.

    Raises UnsupportedError for a variant with an output function, which has a trace of its own: whoever calls
    with such a variant here would leave its function out. Likewise for dropout whose seed was not drawn.
    """
    if variant.output_mod is not None:
        raise UnsupportedError(
            f"the output function {variant.output_mod!r} in a call that does not apply it",
            "calls of fa4flex.compile(...), fa4flex.attention and fa4flex.nn.Attention",
            "compile without output_mod, and apply the function to the output in PyTorch",
        )
    dropout = variant.dropout
    if dropout is not None and not isinstance(dropout.seed, Tensor):
        raise UnsupportedError(
            f"{dropout!r} in a call that draws no seed",
            "calls of fa4flex.compile(...), fa4flex.attention and fa4flex.nn.Attention",
            "leave dropout out, or give its seed as a tensor on q's device",
        )
    mods: Any = variant.scored, variant.allowed, dropout
    return _bind(PAIRS, mods, likely, variant.weights)


def bind_output(mod: Mod, likely: Trace | None = None) -> Bound:
    """The same of an output function alone."""
    return _bind(("output",), (mod,), likely)


def _bind(
    kinds: tuple[ModKind, ...],
    mods: tuple[Mod | None, ...],
    likely: Trace | None,
    weights: Weights = SOFTMAX,
) -> Bound:
    """mods: functions by kind, None for those that there are none of."""
    if likely is not None and likely.reader is not None and likely.facts.weights == weights:
        reading = likely.reader(*mods)
        if reading is not None:
            return Bound(likely, *reading)
    key = kinds, weights, registrations(), *map(code_key, mods)
    traces = _kept.get(key, ())
    for result in traces:
        reading = None if result is likely or result.reader is None else result.reader(*mods)
        if reading is not None:
            if result is not traces[0]:
                _put_first(key, result)
            return Bound(result, *reading)
    bound = _traced(kinds, mods, weights)
    if bound.trace.reader is not None:
        _put_first(key, bound.trace)
    return bound


def _put_first(key: Hashable, trace: Trace) -> None:
    with _changing:
        others = [x for x in _kept.get(key, ()) if x is not trace]
        _kept[key] = trace, *others[: MOST_TRACES - 1]
        _kept.move_to_end(key)
        while len(_kept) > MOST_CODES:
            _kept.popitem(last=False)


PAIRS: tuple[ModKind, ...] = "score", "mask", "dropout"
"""Kinds of functions of pairs, in the order in which readers take them."""


def code_key(fn: Any) -> Hashable:
    """Key of functions that may share a trace: their code, whatever it closes over."""
    if fn is None:
        return None
    if isinstance(fn, FunctionType):
        return fn.__code__
    if isinstance(fn, MethodType):
        return code_key(fn.__func__), type(fn.__self__)
    if isinstance(fn, functools.partial):
        return functools.partial, code_key(fn.func)
    if isinstance(fn, AnyMod):
        parts = [part for part in vars(fn).values() if callable(part)]
        return (type(fn), *[code_key(part) for part in parts])
    return id(type(fn))


def _traced(kinds: tuple[ModKind, ...], of_kinds: tuple[Mod | None, ...], weights: Weights) -> Bound:
    """The stages: trace the functions, analyse the expressions, write down how to read what they captured."""
    captures = Captures()
    mods = dict(zip(kinds, of_kinds, strict=True))
    traced = [_TRACED.get(kind, trace)(mod, kind, captures) for kind, mod in mods.items() if mod is not None]
    traces = {t.kind: t for t in captures.finish(*traced)}
    score, mask, output = traces.get("score"), traces.get("mask"), traces.get("output")
    value = score or output
    kept = traces.get("dropout")
    roots = SCORE if value is None else value.root, TRUE if mask is None else mask.root
    facts = analyze(*roots, None if kept is None else kept.root, weights)
    bases = captures.bases()
    operands = tuple(operand.at(bases) for operand in captures.operands)
    # A function that there is has guards of its own. One that there is none of has nothing to be read.
    absent = [Guard("is", root(kind), None) for kind, mod in mods.items() if mod is None]
    names = tuple(x.name for x in captures.numbers)
    reader = _reader(kinds, captures, bases, absent)
    made = Trace(score, mask, output, facts, operands, len(bases), names, reader)
    return Bound(made, bases, captures.scalars)


def _traced_dropout(dropout: Any, kind: ModKind, captures: Captures) -> Traced:
    """Dropout as its expression: its seed is a captured tensor, and its threshold a captured number."""
    place = root(kind)
    seed, path = dropout.seed, place.attribute("seed")
    slot = captures.slot(seed, "dropout seed", seed)
    number = captures.scalar_slot("dropout threshold", dropout.threshold, place.attribute("threshold"))
    guards = [Guard("type", place, type(dropout))]
    captures.depend(guards, {id(seed): (seed, "dropout seed", path)}, {id(seed): {"element"}}, None)
    return Traced("dropout", kind, keep(load(slot, (), "int"), scalar(number, "int")), MappingProxyType({}))


_TRACED: dict[ModKind, Callable[..., Traced]] = {"dropout": _traced_dropout}
"""Functions that trace what is not run on proxies, by kind."""


def _reader(
    kinds: tuple[ModKind, ...], captures: Captures, bases: tuple[Tensor, ...], absent: list[Guard]
) -> Reader | None:
    if captures.opaque is not None:
        return None
    guards = *absent, no_more_registered(), same_default_dtype(), *captures.guards
    tensors, numbers = [captures.paths[id(x)] for x in bases], [x.path for x in captures.numbers]
    return reader_of(kinds, guards, tensors, numbers)
