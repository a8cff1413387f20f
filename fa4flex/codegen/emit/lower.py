"""Traced expressions -> what a device computes, term by term at the lowest rate.

The meaning is that of `evaluate` at float32. Sums of floats may be added in another order; but a difference
of a query's number and a key's, both of which may be large, is taken before any product. Of integers, sums of
indices become functions of kv - q where they depend on nothing else, comparisons put what changes with the
key on one side and what changes with the query on the other, and conversions to float, slow on a GPU, move to
the indices, whose float values a kernel keeps. Floats that jump (floor, comparisons, remainders) know no such
freedom where no score is in them: torch's own value decides on which side of a whole number they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from fa4flex.codegen.analyze.linear import Linear, linear, nonnegative
from fa4flex.codegen.emit.nodes import (
    KV,
    OFFSET,
    ONE,
    SCALE,
    SCORE,
    Q,
    Rate,
    axes,
    credit,
    device,
    jumps,
    power_of_two,
    rate,
)
from fa4flex.codegen.emit.terms import (
    UNIT,
    Factor,
    Groups,
    Terms,
    combined,
    merged,
    plus,
    scaled,
    single,
    total,
)
from fa4flex.codegen.expr import Expr, apply, const, load, nodes, rebuild, search, to_float
from fa4flex.codegen.formula import Formula
from fa4flex.codegen.ops import COMPARISONS, OPS
from fa4flex.errors import Origin

_QUOTIENTS = {"floordiv": "floor_quotient", "mod": "remainder"}
"""Operations on floats, by the operation on integers and floats."""
_ARITHMETIC = frozenset(
    ("add", "sub", "mul", "div", "neg", "abs", "minimum", "maximum", "where", "detach", "with_grad")
)
_REWRITTEN = frozenset(("detach", "with_grad", "pow", "floordiv", "mod", "truncdiv"))
"""Operations on floats that no device function computes as they are, besides those with a formula."""


class Lowering:
    """One module's expressions. `came` says which line of the user's code a lowered node comes from.

    in_range   captured tensors are indexed within [0, size) for every allowed pair: no index is wrapped
    wide       integers are Int64
    unit       the factor of sym("score") where it stands for at.score: the scale of q.k; 1 of an output
    """

    def __init__(
        self, in_range: bool, wide: bool, origins: Mapping[Expr, Origin], unit: Expr | None = SCALE
    ) -> None:
        self._unit = unit
        self._in_range, self._wide, self._origins = in_range, wide, origins
        self.came: dict[Expr, Origin | None] = {}
        self._here: Origin | None = None
        self._values: dict[Expr, Expr] = {}
        self._exact: dict[Expr, Expr] = {}
        self._terms: dict[Expr, Terms] = {}

    def unscaled(self) -> Lowering:
        """The same of expressions of an output."""
        other = self.anew(None)
        other.came = self.came
        return other

    def anew(self, unit: Expr | None = SCALE) -> Lowering:
        """One that has lowered nothing yet."""
        return Lowering(self._in_range, self._wide, self._origins, unit)

    def value(self, x: Expr) -> Expr:
        """Lowered expression of x."""
        if x not in self._values:
            above, self._here = self._here, self._origins.get(x, self._here)
            lowered = (
                self._bool(x) if x.kind == "bool" else self._int(x) if x.kind == "int" else self._float(x)
            )
            self._values[x] = lowered
            credit(lowered, self._here, self.came)
            self._here = above
        return self._values[x]

    def value_within(self, x: Expr, around: Expr) -> Expr:
        """`value` of an expression that analysis derived from `around`."""
        self._here = self._origins.get(around)
        result = self.value(x)
        self._here = None
        return result

    def place(self, slot: int, index: tuple[Expr, ...], around: Expr) -> tuple[Expr, ...]:
        """The index of an element of operand `slot`, whose gradient analysis derived from `around`."""
        self._here = self._origins.get(around)
        result = self._index(slot, index)
        for i in result:
            credit(i, self._here, self.came)
        self._here = None
        return result

    def _values_of(self, xs: Iterable[Expr]) -> tuple[Expr, ...]:
        return tuple(self.value(x) for x in xs)

    # --- any kind -----------------------------------------------------------------------------------

    def _plain(self, x: Expr) -> Expr:
        """x on lowered arguments."""
        match x.op:
            case "sym" | "const" | "scalar":
                return x
            case "load":
                return load(x.value, self._index(x.value, x.args), x.kind)
            case "search":
                slot, side = x.value
                return search(slot, side, self.value(x.args[0]), self._index(slot, x.args[1:]))
            case "reduce":
                return device("reduce", self.value(x.args[0]), value=x.value, kind=x.kind)
        if jumps(x):
            return rebuild(x, tuple(map(self._exactly, x.args)))
        return rebuild(x, self._values_of(x.args))

    def _exactly(self, x: Expr) -> Expr:
        """A float by the mod's operations in the mod's order: 41 * (1 / 41) is below 1, and so may a sum be
        whose products were added up apart. A score's own error is larger than that."""
        if "score" in x.free or rate(x) == "uniform" or x.op not in _ARITHMETIC:
            return self.value(x)
        if x not in self._exact:
            args = tuple(self._exactly(a) if a.kind == "float" else self.value(a) for a in x.args)
            if x.op in ("detach", "with_grad"):
                self._exact[x] = args[0]
            else:
                self._exact[x] = device("exact_ratio", *args) if x.op == "div" else rebuild(x, args)
        return self._exact[x]

    def _index(self, slot: int, index: tuple[Expr, ...]) -> tuple[Expr, ...]:
        return tuple(self._position(slot, dimension, i) for dimension, i in enumerate(index))

    def _position(self, slot: int, dimension: int, i: Expr) -> Expr:
        if self._in_range:
            return self.value(i)
        if any(node.op == "load" for node in nodes(i)):  # memory may hold any number
            return device("confined", self.value(i), value=(slot, dimension), kind="int")
        if nonnegative(i):
            return self.value(i)
        return device("wrapped", self.value(i), value=(slot, dimension), kind="int")

    # --- integers -----------------------------------------------------------------------------------

    def _int(self, x: Expr) -> Expr:
        form = linear(x)
        if form.terms == ((x, 1),) or rate(x) == "uniform":
            return self._atom(x)
        return combined({level: part.expr() for level, part in self._parts(form).items()}, plus)

    def _parts(self, form: Linear) -> dict[Rate, Linear]:
        """A sum by rate, over lowered atoms; q and kv become kv - q where all else is uniform."""
        coefficients = dict(form.terms)
        across, along = coefficients.pop(Q, 0), coefficients.pop(KV, 0)
        lowered = [(self.value(atom), c) for atom, c in coefficients.items()]
        diagonal = across == -along != 0 and all(rate(x) in ("uniform", "diagonal") for x, _ in lowered)
        lowered += [(OFFSET, along)] if diagonal else [(Q, across), (KV, along)]
        return _by_rate(Linear(tuple((atom, c) for atom, c in lowered if c), form.constant))

    def _atom(self, x: Expr) -> Expr:
        match x.op:
            case "floordiv":
                return self._floor_div(*x.args)
            case "mod" if power_of_two(x.args[1]) is not None:
                return apply("bitand", self.value(x.args[0]), const(x.args[1].value - 1))
            case "mod":
                n, d = self._values_of(x.args)
                return apply("sub", n, apply("mul", self._floor_div(*x.args), d))
            case "to_int" if x.args[0].kind == "bool":
                return apply("where", self.value(x.args[0]), const(1), const(0))
        return self._plain(x)

    def _floor_div(self, numerator: Expr, by: Expr) -> Expr:
        n, d, shift = self.value(numerator), self.value(by), power_of_two(by)
        if shift is not None:
            return apply("shr", n, const(shift))
        if by.op == "const" and by.value > 0 and nonnegative(numerator):
            return device("natural_div", n, d, kind="int")
        invariant = by.op != "const" and rate(by) == "uniform" and not axes(by)
        if invariant and rate(numerator) != "uniform" and not self._wide:
            return device("divided", n, device("divisor", d, kind="int"), kind="int")
        return apply("floordiv", n, d)

    # --- booleans -----------------------------------------------------------------------------------

    def _bool(self, x: Expr) -> Expr:
        if x.op in COMPARISONS and x.args[0].kind == "int" and rate(x) in ("pair", "element"):
            return self._compared(x)
        if x.op in ("and_", "or_"):
            groups: Groups = {}
            for part in map(self.value, _flattened(x.op, x)):
                known = groups.get(rate(part))
                groups[rate(part)] = part if known is None else apply(x.op, known, part)
            return combined(groups, lambda a, b: apply(x.op, a, b))
        if x.op == "to_bool":
            inner = self.value(x.args[0])
            return apply("ne", inner, const(0 if inner.kind == "int" else 0.0))
        return self._plain(x)

    def _compared(self, x: Expr) -> Expr:
        """Comparison with the key's terms on one side, the query's on the other."""
        parts = self._parts(linear(x.args[0]) - linear(x.args[1]))
        nothing = Linear((), 0)
        left, right = nothing, nothing
        for level, part in parts.items():
            if level in ("uniform", "row"):
                right = right - part
            else:
                left = left + part
        if left.terms and all(c < 0 for _, c in left.terms):
            return apply(x.op, _sum_by_rate(-right), _sum_by_rate(-left))
        return apply(x.op, _sum_by_rate(left), _sum_by_rate(right))

    # --- floats -------------------------------------------------------------------------------------

    def _float(self, x: Expr) -> Expr:
        if rate(x) != "uniform":
            return total(self.terms(x))
        return total(self._sum_of(x)) if x.op in _REWRITTEN or _formula(x) else self._plain(x)

    def terms(self, x: Expr) -> Terms:
        """A float as a sum."""
        if x not in self._terms:
            above, self._here = self._here, self._origins.get(x, self._here)
            factor = self._factor(x)
            self._terms[x] = merged(self._sum_of(x) if factor is None else ((factor, ONE),))
            for _, atom in self._terms[x]:
                credit(atom, self._here, self.came)
            self._here = above
        return self._terms[x]

    def define(self, x: Expr, terms: Terms) -> None:
        """Let a float that was not lowered yet be this sum."""
        self._terms[x] = terms

    def _factor(self, x: Expr) -> Factor | None:
        """A float that changes with the work tile at most, as a coefficient."""
        if rate(x) != "uniform":
            return None
        return Factor(x.value) if x.op == "const" else Factor(1.0, self.value(x))

    def _sum_of(self, x: Expr) -> Terms:
        match x.op:
            case "sym":
                return ((Factor(1.0) if self._unit is None else Factor(1.0, self._unit), SCORE),)
            case "add":
                return self.terms(x.args[0]) + self.terms(x.args[1])
            case "sub":
                return self._difference(*x.args)
            case "neg":
                return scaled(self.terms(x.args[0]), Factor(-1.0))
            case "mul":
                return self._product(*x.args)
            case "div":
                return self._quotient(*x.args)
            case "detach" | "with_grad":
                return self.terms(x.args[0])
            case "shared":
                return ((UNIT, self.value(x.args[0])),)
            case "saturated":
                return self._saturated(*x.args)
            case "to_float":
                return self._converted(x.args[0])
            case "floordiv" | "mod":
                return ((UNIT, device(_QUOTIENTS[x.op], *map(self._exactly, x.args))),)
            case "truncdiv":
                ratio = device("exact_ratio", *map(self._exactly, x.args))
                return ((UNIT, apply("trunc", ratio)),)
            case "pow" if x.args[1].op == "const" and x.args[1].value in (2.0, 3.0, -1.0, 0.5):
                return self._power(x.args[0], x.args[1].value)
        formula = _formula(x)
        return self.terms(formula(*map(Formula, x.args)).expr) if formula else ((UNIT, self._plain(x)),)

    def _saturated(self, x: Expr, factor: Expr, addend: Expr) -> Terms:
        """x * factor + addend within [0, 1]; a coefficient of x joins the factor."""
        one = single(self.terms(x))
        by, atom = (UNIT, self.value(x)) if one is None else one
        by = by * Factor(factor.value)
        return ((UNIT, device("saturated", atom, by.expr(), addend)),)

    def _difference(self, a: Expr, b: Expr) -> Terms:
        """a - b. Products of large numbers of queries and of keys would round away what is left of their
        difference."""
        if a.op == b.op == "to_float" and a.args[0].kind == b.args[0].kind == "int":
            return self._converted(apply("sub", a.args[0], b.args[0]))
        if {rate(a), rate(b)} == {"row", "column"}:
            return ((UNIT, device("difference", self.value(a), self.value(b))),)
        return self.terms(a) + scaled(self.terms(b), Factor(-1.0))

    def _power(self, x: Expr, exponent: float) -> Terms:
        if exponent == 0.5:
            return ((UNIT, apply("sqrt", self.value(x))),)
        if exponent == -1.0:
            return self._quotient(ONE, x)
        square = apply("mul", x, x)
        return self._product(x, x) if exponent == 2.0 else self._product(square, x)

    def _parted(self, x: Expr) -> tuple[Factor, Expr]:
        """x as coefficient times the rest."""
        one = single(self.terms(x))
        return (UNIT, self.value(x)) if one is None or one[1] is ONE else one

    def _product(self, a: Expr, b: Expr) -> Terms:
        for x, y in ((a, b), (b, a)):
            factor = self._factor(x)
            if factor is not None:
                return scaled(self.terms(y), factor)
        (f, x), (g, y) = self._parted(a), self._parted(b)
        return ((f * g, apply("mul", x, y)),)

    def _quotient(self, a: Expr, b: Expr) -> Terms:
        """A division by what changes more slowly than the rest is a product with its reciprocal."""
        if b.op == "const" and b.value != 0.0:
            return scaled(self.terms(a), Factor(1.0 / b.value))
        divisor = self.value(b)
        if rate(b) == "uniform":
            return scaled(self.terms(a), Factor(1.0, device("reciprocal", divisor)))
        f, x = self._parted(a)
        if rate(divisor) not in ("pair", "element"):
            inverse = device("reciprocal", divisor)
            return ((f, inverse if x is ONE else apply("mul", x, inverse)),)
        return ((f, apply("div", x, divisor)),)

    def _converted(self, x: Expr) -> Terms:
        """An integer or boolean as a float: of indices, the float that the kernel keeps."""
        if x.kind == "bool":
            return ((UNIT, apply("where", self.value(x), ONE, const(0.0))),)
        form = linear(x)
        if form.terms != ((x, 1),):
            return self._converted_sum(form)
        if x in (Q, KV):
            return ((UNIT, to_float(x)),)
        if rate(x) != "row":
            args = [to_float(a) for a in x.args]
            if x.op in ("abs", "minimum", "maximum"):
                return ((UNIT, apply(x.op, *self._values_of(args))),)
            if x.op == "where":
                return ((UNIT, apply("where", self.value(x.args[0]), *self._values_of(args[1:]))),)
            if x.op == "mul":
                return self._product(*args)
        return ((UNIT, to_float(self.value(x))),)

    def _converted_sum(self, form: Linear) -> Terms:
        """Each index by itself; what is uniform as one integer."""
        parts = self._parts(form)
        offset = dict(parts["diagonal"].terms).get(OFFSET) if "diagonal" in parts else None
        result: Terms = ((Factor(float(offset)), to_float(OFFSET)),) if offset else ()
        moving: dict[Rate, Terms] = {}
        for atom, c in form.terms:
            if rate(atom) != "uniform" and not (offset and atom in (Q, KV)):
                converted = scaled(self._converted(atom), Factor(float(c)))
                moving[rate(atom)] = (*moving.get(rate(atom), ()), *converted)
        constant: Terms = ()
        if "uniform" in parts:
            uniform = to_float(parts["uniform"].expr())
            constant = ((Factor(uniform.value) if uniform.op == "const" else Factor(1.0, uniform), ONE),)
        if {"row", "column"} <= moving.keys():
            across, along = moving.pop("row"), moving.pop("column")
            # Integers below 2^24, and sums and differences of them, are exact as floats.
            apart = device("difference", total(across + constant), total(scaled(along, Factor(-1.0))))
            result, constant = (*result, (UNIT, apart)), ()
        return sum(moving.values(), result) + constant


def _formula(x: Expr) -> Callable[..., Formula] | None:
    return OPS[x.op].formula if x.op in OPS else None


def _by_rate(lowered: Linear) -> dict[Rate, Linear]:
    parts: dict[Rate, Linear] = {}
    for atom, c in lowered.terms:
        parts[rate(atom)] = parts.get(rate(atom), Linear((), 0)) + Linear(((atom, c),), 0)
    if lowered.constant or not parts:
        parts["uniform"] = parts.get("uniform", Linear((), 0)) + Linear((), lowered.constant)
    return parts


def _sum_by_rate(lowered: Linear) -> Expr:
    return combined({level: part.expr() for level, part in _by_rate(lowered).items()}, plus)


def _flattened(op: str, x: Expr) -> list[Expr]:
    """The operands of a chain of one associative operation."""
    if x.op != op:
        return [x]
    return [part for arg in x.args for part in _flattened(op, arg)]
