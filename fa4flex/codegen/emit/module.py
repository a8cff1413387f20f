"""Assemble one module: hooks by rate, and the kernel that takes them."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any

from fa4flex.codegen.analyze.facts import ASKED, Facts
from fa4flex.codegen.emit.logistic import by_groups, way_of
from fa4flex.codegen.emit.lower import Lowering
from fa4flex.codegen.emit.nodes import RATES, SCALE, Rate, device
from fa4flex.codegen.emit.operand_gradients import LoweredShare, lowered_shares
from fa4flex.codegen.emit.printer import Names, Printer
from fa4flex.codegen.emit.scale import in_units
from fa4flex.codegen.emit.source import Source
from fa4flex.codegen.emit.steps import with_steps
from fa4flex.codegen.emit.vectors import with_vectors
from fa4flex.codegen.emit.weights import shortened
from fa4flex.codegen.emit.writer import Function, Span, cut, folds_in
from fa4flex.codegen.expr import Expr, apply, const, sym, walk
from fa4flex.codegen.ops import OPS
from fa4flex.errors import InputError, Origin

ARGUMENT_RATES: tuple[Rate, ...] = ("row", "column", "diagonal", "pair")
_SUFFIX = {"uniform": "", "row": "_q", "column": "_kv", "diagonal": "_diagonal", "pair": "_pair"}
_DEVICE_TYPES = ("Boolean", "Float32", "Int32", "Int64")
_ARITHMETIC = frozenset(("add", "sub", "mul", "neg", "stepped"))
_WIDTH = 104
_LARGEST_HALF = 65504.0


@dataclass(frozen=True)
class Captions:
    """Names for people: of the variant, and of captured tensors and numbers by slot."""

    title: str = "attention"
    tensors: Sequence[str] = ()
    numbers: Sequence[str] = ()


def emit_forward(
    facts: Facts,
    plan: Any,
    title: str | Captions = "attention",
    origins: Mapping[Expr, Origin] | None = None,
) -> Source:
    """The module of a forward kernel; its `kernel` is the host function to compile.

    `origins` says which line of the user's code an expression comes from. Raises UnsupportedError where no
    device code can be written for a mod, naming that line.
    """
    captions = title if isinstance(title, Captions) else Captions(title)
    return Source(captions.title, Module(facts, plan, captions, origins or {}).text())


def emit_backward(
    facts: Facts,
    plan: Any,
    title: str | Captions = "attention",
    origins: Mapping[Expr, Origin] | None = None,
) -> Source:
    """The module of a backward kernel: the forward's hooks, and the score's derivative. Errors likewise."""
    captions = title if isinstance(title, Captions) else Captions(title)
    return Source(captions.title, Module(facts, plan, captions, origins or {}, BACKWARD).text())


def emit_mass(
    facts: Facts,
    plan: Any,
    title: str | Captions = "sums per key",
    origins: Mapping[Expr, Origin] | None = None,
) -> Source:
    """The module of a kernel for sums of probabilities per key: the forward's hooks. Errors likewise."""
    captions = title if isinstance(title, Captions) else Captions(title)
    return Source(captions.title, Module(facts, plan, captions, origins or {}, MASS).text())


def emit_tangents(
    facts: Facts,
    plan: Any,
    title: str | Captions = "attention",
    origins: Mapping[Expr, Origin] | None = None,
) -> Source:
    """The module of a kernel of attention and its tangents: the forward's hooks, and the score's derivative.
    Errors likewise."""
    captions = title if isinstance(title, Captions) else Captions(title)
    return Source(captions.title, Module(facts, plan, captions, origins or {}, TANGENTS).text())


def emit_sequences(facts: Facts, plan: Any) -> Source:
    """The module of the kernel that corrects lengths and sorts tiles: of the mask the key intervals alone."""
    captions = Captions("sequences")
    mask = Facts(mask=facts.mask, intervals=facts.intervals)
    return Source(captions.title, Module(mask, plan, captions, {}, SEQUENCES).text())


@dataclass(frozen=True)
class Pass:
    """word        for people
    kernel      the class that a module makes its kernel of
    pairs       whether a thread holds keys next to each other, whose captured numbers may be read as one
    slope       whether the derivative of the score is asked for
    ordered     whether maxima are taken of what the score becomes
    """

    word: str
    kernel: str
    pairs: bool
    slope: bool
    ordered: bool = True


FORWARD = Pass("forward", "Forward", True, False)
BACKWARD = Pass("backward", "Backward", False, True, ordered=False)
MASS = Pass("sums per key", "Mass", False, False)
TANGENTS = Pass("tangents", "Tangents", True, True)
SEQUENCES = Pass("lengths", "Sequences", False, False)


@dataclass(frozen=True)
class _Ends:
    """Intervals that a kernel computes itself: what they are of, the hook that does, at a rate, the fact that
    they are, and the symbol that an end beyond all others is."""

    word: str
    hook: str
    rate: Rate
    fact: str
    length: str


ENDS = {
    "spans": _Ends("key", "spans", "row", "keys", "kv_len"),
    "queries": _Ends("query", "queries", "column", "queries", "q_len"),
}
"""Intervals that a kernel computes itself, for each mask_form."""
ALLOWED = _Ends("key", "spans", "row", "allowed", "kv_len")
"""Intervals whose keys a mask allows that is asked of all others."""


class Module:
    """Text of a module: which hooks there are, `fill` says."""

    def __init__(
        self,
        facts: Facts,
        plan: Any,
        captions: Captions,
        origins: Mapping[Expr, Origin],
        which: Pass = FORWARD,
    ) -> None:
        problem = plan.problem
        self._plan, self._captions, self._pass = plan, captions, which
        self._lowering = Lowering(problem.in_range, problem.wide_index, origins)
        self._printer = Printer(Names(captions.tensors, captions.numbers), problem.wide_index)
        self._printer.names.reserve(*facts.roots)
        self._factor: Expr | None = None
        self._weights = facts.weights
        self._dropout: tuple[int, int] | None = None
        """Slots of the seed and of the threshold of dropout."""
        self._roots: dict[str, Expr] = {}
        self._spans: tuple[Span, ...] = ()
        self._shares: dict[str, LoweredShare] = {}
        self._loops: dict[str, tuple[str, ...]] = {}
        self._ends = ENDS.get(problem.mask_form, ENDS["spans"])
        self.fill(facts)
        self._roots = {name: self._rewritten(root) for name, root in self._roots.items()}
        self._folds = {name: folds_in(root) for name, root in self._roots.items()}
        self._needs = {
            name: cut([root], _rate_of(name, root), self._folds[name]) for name, root in self._roots.items()
        }
        self._needs |= {f"{name}_place": cut(share.place, share.at) for name, share in self._shares.items()}
        self._named = self._names_of_shared_values()

    def fill(self, facts: Facts) -> None:
        """Expressions of the hooks, lowered."""
        problem, which = self._plan.problem, self._pass
        if facts.weights.kind == "elementwise":
            self._fill_weight(facts)
            return
        units = in_units(facts.score, self._lowering, problem.positive_scale, ordered=which.ordered)
        self._factor = units.factor
        scores = {"start": units.start, "score": units.y}
        self._roots = {name: x for name, x in scores.items() if x is not None}
        self._fill_rest(facts, facts.gradient.by_score)

    def _fill_weight(self, facts: Facts) -> None:
        """The same where the modified score is the weight. What a 16-bit weight cannot hold stays finite."""
        score, slope, weight = facts.score, facts.gradient.by_score, None
        if self._pass is BACKWARD:
            score, slope = shortened(score, slope)
        elif self._pass is FORWARD and self._plan.by_groups:
            weight = by_groups(score, self._lowering, self._plan.problem.dtype)
        if weight is None:
            weight = self._lowering.value_within(score, facts.score)
        if self._plan.problem.dtype == "float16":
            weight = apply("minimum", apply("maximum", weight, const(-_LARGEST_HALF)), const(_LARGEST_HALF))
        self._roots = {"score": weight}
        self._fill_rest(facts, slope)

    def _fill_rest(self, facts: Facts, slope: Expr) -> None:
        """The other hooks. slope: the derivative of the modified score."""
        problem, which = self._plan.problem, self._pass
        if which.slope and slope is not const(1.0):
            self._roots["slope"] = self._lowering.value_within(slope, facts.score)
        if facts.kept is not None:
            seed, threshold, *_ = facts.kept.args
            self._dropout = seed.value, threshold.value
        if facts.output is not None and which is FORWARD:
            self._roots["output"] = self._lowering.unscaled().value(facts.output)
        if problem.mask_form in ASKED:
            self._roots["mask"] = self._lowering.value(facts.mask)
        if problem.mask_form in ENDS or (problem.mask_form == "pairs" and facts.allowed is not None):
            self._spans = self._lowered_spans(facts, ENDS.get(problem.mask_form, ALLOWED))
        self._shares = self._named_shares(facts) if which.slope else {}
        for name, share in self._shares.items():
            if share.weight is not None:
                self._roots[f"{name}_weight"] = share.weight
                self._loops[f"{name}_weight"] = tuple(axis for axis, _ in share.loop)

    def _rewritten(self, root: Expr) -> Expr:
        came, pairs = self._lowering.came, self._pass.pairs
        return with_steps(with_vectors(root, came) if pairs else root, came, pairs)

    def _named_shares(self, facts: Facts) -> dict[str, LoweredShare]:
        """After the tensors whose gradients they make."""
        results: dict[str, LoweredShare] = {}
        problem = self._plan.problem
        copied = {
            slot
            for slot, adding in problem.gradients
            if adding == "once in pairs" and self._plan.copies and problem.operands[slot][0] == problem.dtype
        }
        for share in lowered_shares(facts, problem.gradients, self._lowering, copied):
            base = name = self._printer.names.tensor(share.slot)
            while name in results:
                name = f"{base}_{sum(other.slot == share.slot for other in results.values()) + 1}"
            results[name] = share
        return results

    def _lowered_spans(self, facts: Facts, ends: _Ends) -> tuple[Span, ...]:
        intervals = getattr(facts, ends.fact)
        if intervals is None:
            raise InputError(
                f"mask_form={ends.hook!r} for a mask that is no union of {ends.word} intervals",
                f"{ends.hook} where Facts.{ends.fact} is not None",
                "use tables",
            )
        everything = sym(ends.length)
        return tuple(
            (
                None if lo is const(0) else self._lowering.value_within(lo, facts.mask),
                None if hi is everything else self._lowering.value_within(hi, facts.mask),
            )
            for lo, hi in intervals.spans
        )

    def _span_ends(self) -> list[Expr]:
        return [end for span in self._spans for end in span if end is not None]

    def _uniform(self) -> list[Expr]:
        """Values that all hooks share."""
        results = [x for needed in self._needs.values() for x in needed["uniform"]]
        results += cut(self._span_ends(), self._ends.rate)["uniform"]
        if self._factor is not None and self._factor.op != "const":
            results.append(self._factor)
        return list(dict.fromkeys(results))

    def _names_of_shared_values(self) -> dict[Expr, str]:
        named: dict[Expr, str] = {}
        shared: list[tuple[Rate, Expr]] = [("uniform", x) for x in self._uniform()]
        shared += [(at, x) for need in self._needs.values() for at in ARGUMENT_RATES for x in need[at]]
        shared += [("pair", x) for folds in self._folds.values() for x in folds]
        for level, x in shared:
            if x not in named:
                named[x] = self._printer.names.fresh(self._name(x, level))
        return named

    def _name(self, x: Expr, level: Rate) -> str:
        if x is self._factor:
            return "softmax_scale"
        if x.op == "mul" and SCALE in walk(x) and device("reciprocal", SCALE) not in walk(x):
            return "score_scale"
        if x.op in _ARITHMETIC:
            return "coefficient" if level == "uniform" and x.op in ("mul", "neg") else f"{level}_term"
        return self._printer.base_name(x) + _SUFFIX[level]

    # --- text ---------------------------------------------------------------------------------------

    def text(self) -> str:
        functions = [self._text(function) for function in self._functions()]
        wiring = [
            *_config(self._plan.config()),
            *self.hooks(),
            "",
            f"kernel = {self._pass.kernel}(CONFIG, HOOKS)",
        ]
        parts = [self._docstring(), *self._imports(), "", ""]
        for lines in functions:
            parts += [*lines, "", ""]
        return "\n".join([*parts, *wiring]) + "\n"

    def _functions(self) -> list[Function]:
        result = [Function("uniform", "uniform", tuple(self._uniform()))] if self._uniform() else []
        for name, root in self._roots.items():
            for level in ARGUMENT_RATES:
                shared = tuple(self._needs[name][level])
                result += [Function(f"{name}_{level}", level, shared, name)] * bool(shared)
            result += self._terms(name)
            loop = self._loops.get(name, ())
            result.append(Function(name, _rate_of(name, root), (root,), name, "one", loop))
        for name, share in self._shares.items():
            result += self._place_functions(f"{name}_place", share)
        if self._factor is not None:
            result.append(Function("factor", "row", (self._factor,), returns="one"))
        if self._spans:
            result.append(
                Function(self._ends.hook, self._ends.rate, tuple(self._span_ends()), returns="spans")
            )
        return result

    def _terms(self, name: str) -> list[Function]:
        """Functions of the terms of a hook's folds; each sees the folds before its own."""
        return [
            Function(term, "element", fold.args, name, "one", (fold.value[1],), number)
            for number, (term, fold) in enumerate(self._named_terms(name))
        ]

    def _named_terms(self, name: str) -> list[tuple[str, Expr]]:
        folds = self._folds.get(name, [])
        return [(f"{name}_term" + (f"_{n}" if n > 1 else ""), fold) for n, fold in enumerate(folds, 1)]

    def _place_functions(self, name: str, share: LoweredShare) -> list[Function]:
        slower = [level for level in ARGUMENT_RATES if self._needs[name][level]]
        results = [
            Function(f"{name}_{level}", level, tuple(self._needs[name][level]), name) for level in slower
        ]
        # A function at the rate "uniform" computes what all others share; this one is called with that.
        here: Rate = "row" if share.at == "uniform" else share.at
        return [*results, Function(name, here, share.place, name, loop=tuple(axis for axis, _ in share.loop))]

    def _text(self, function: Function) -> list[str]:
        provided: dict[str, Sequence[Expr]] = {}
        if function.here != "uniform":
            provided["uniform"] = self._uniform()
        if function.here in ("pair", "element"):
            whole = function.name == function.hook
            slower = ARGUMENT_RATES[: None if whole else RATES.index(function.here) - 1]
            provided |= {level: self._needs[function.hook][level] for level in slower}
            provided["folds"] = self._folds.get(function.hook, [])[: function.folds]
        with self._printer.names.local():
            return function.text(self._printer, self._lowering.came, provided, self._named, self._spans)

    def _docstring(self) -> str:
        places = [f"{name}_place" for name in self._shares]
        arguments = [*self._roots, *[self._ends.hook] * bool(self._spans), *places]
        hooks = ", ".join(arguments) or "no hooks: the scaled product over every key"
        return (
            f'"""{self._captions.title}: {self._pass.word} for {self._plan.target.name}. Hooks: {hooks}."""\n'
        )

    def _imports(self) -> list[str]:
        used = self._printer.used
        types = sorted(used & set(_DEVICE_TYPES))
        helpers = sorted(used - set(_DEVICE_TYPES))
        lines = [f"from cutlass import {', '.join(types)}", ""] if types else []
        hooks = "Hooks, Pointwise" if self._roots or self._shares else "Hooks"
        hooks = "Dropped, " * (self._dropout is not None) + hooks
        hooks = "Fold, " * any(self._folds.values()) + hooks + ", Share" * bool(self._shares)
        lines.append(f"from fa4flex.kernels.common.hooks import {hooks}")
        if helpers:
            lines += call("from fa4flex.kernels.common.math import ", helpers)
        if self._way:
            lines.append(f"from fa4flex.kernels.common.logistic import {self._way}")
        for module, names in _dataclasses_of(self._plan.config()):
            lines += call(f"from {module} import ", names)
        lines.append(f"from {self._plan.module}.kernel import {self._pass.kernel}")
        return lines

    def hooks(self) -> list[str]:
        """Lines that make the hooks."""
        items = ["uniform=uniform"] if self._uniform() else []
        weights = [f"{name}_weight" for name in self._shares]
        items += [f"{name}={self.pointwise(name)}" for name in self._roots if name not in weights]
        items += ["factor=factor"] * (self._factor is not None)
        if self._dropout is not None:
            items.append("dropout=Dropped(seed={}, threshold={})".format(*self._dropout))
        kind, eps = self._weights
        items += [f'weights="{kind}"'] * (kind != "softmax") + [f"eps={eps!r}"] * (kind == "softpick")
        items += [f"{self._ends.hook}={self._ends.hook}"] * bool(self._spans)
        lines = []
        for name, share in self._shares.items():
            arguments = [
                str(share.which),
                repr(share.rate).replace("'", '"'),
                self.pointwise(f"{name}_place"),
            ]
            if share.weight is not None:
                arguments.append(f"weight={self.pointwise(f'{name}_weight')}")
            arguments += ["scaled=True"] * share.scaled
            if share.once:
                arguments.append(f"axes={share.axes}")
            if share.loop:
                arguments.append(f"loop={tuple(extent for _, extent in share.loop)}")
            lines += call(f"{name}_share = Share", arguments)
        shares = [f"{name}_share" for name in self._shares]
        items += [f"shares=({', '.join(shares)},)"] * bool(shares)
        return [*lines, *call("HOOKS = Hooks", items)]

    @property
    def _way(self) -> str:
        """Name of the way by which a weight's logistic function is computed, "" where it has none."""
        return way_of(self._roots["score"]) if self._weights.kind == "elementwise" and self._roots else ""

    def pointwise(self, name: str) -> str:
        arguments = [f"{level}={name}_{level}" for level in ARGUMENT_RATES if self._needs[name][level]]
        folds = [f"Fold({', '.join(self._printer.folded(x, term))})" for term, x in self._named_terms(name)]
        arguments += [f"folds=({', '.join(folds)},)"] * bool(folds)
        if name.endswith("_weight") and "score" in self._roots[name].free:
            arguments.append("scored=True")
        if name == "score" and self._way:
            arguments.append(f"logistic={self._way}")
        if name == "start" and any(x.op in OPS and OPS[x.op].branches for x in walk(self._roots[name])):
            arguments.append("branches=True")
        return f"Pointwise({', '.join([name, *arguments])})"


def _rate_of(hook: str, root: Expr) -> Rate:
    """Only some hooks are called where there is a score."""
    wanted = hook in ("score", "slope", "output") or (hook.endswith("_weight") and "score" in root.free)
    return "element" if wanted else "pair"


DEFAULT = "default"
"""Metadata of fields of a config that a module does not name where they have this value: modules stay as they
are for all who do not ask for them."""
_TOLD = object()


def _config(config: Any) -> list[str]:
    """All fields, so that a default that changes later changes no module that exists."""
    told = [f for f in fields(config) if getattr(config, f.name) != f.metadata.get(DEFAULT, _TOLD)]
    return call("CONFIG = Config", [f"{f.name}={getattr(config, f.name)!r}" for f in told])


def _dataclasses_of(config: Any) -> list[tuple[str, list[str]]]:
    """Modules, and the dataclasses of each that the repr of a config names."""
    arguments = (getattr(config, f.name) for f in fields(config))
    parts = [part for x in arguments for part in (x if isinstance(x, tuple) else (x,))]
    named = sorted({(type(x).__module__, type(x).__name__) for x in (config, *parts) if is_dataclass(x)})
    return [(module, [name for _, name in names]) for module, names in groupby(named, itemgetter(0))]


def call(head: str, items: Sequence[str]) -> list[str]:
    """`head(items)`, on one line where it fits."""
    line = f"{head}({', '.join(items)})"
    if head.startswith("from "):
        line = head + ", ".join(items)
    if len(line) <= _WIDTH:
        return [line]
    body = textwrap.wrap(", ".join(items) + ",", _WIDTH - 4, break_long_words=False, break_on_hyphens=False)
    return [f"{head}(", *(f"    {row}" for row in body), ")"]
