"""One row per operation of the expression grammar: all that the stages need to know of it.

trace        `torch`: the functions and Tensor methods that mean it
expr         `takes` and `gives`: kinds of its arguments and of its value; `fold`: its value on constants
analyze      `range`: an interval of its values; `slopes`: its derivative by each argument
plan         `cost`: what a GPU spends on one value
emit         `device`: its function in kernels/common/math.py, or `formula`; `operator`, `word`, `odd`
evaluate     the torch function named first in `torch`
tests        `domain` and `ulps`: where it is compared with torch in float64, and how near it is

A stage treats some operations in a way of its own (torch's `add` takes `alpha`, ranges of integers are exact,
powers of 2 and 3 are products): it names those itself, and asks the row for all others.

Rows are data: they name functions of torch and of devices and import neither. They are tuples, since planning
loads them, and dataclasses of as many fields take three times as long to make.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

Takes = Literal["bool", "int", "float", "any", "number"]
"""Kind that arguments are converted to; "any": their common kind; "number": likewise, with bools as ints."""
Gives = Literal["bool", "int", "float", "same"]
"""Kind of the value; "same": that of the converted arguments."""

Slopes = Callable[..., tuple[Any, ...]]
"""(value, *arguments) -> the derivative by each argument, None where it is 0. What is passed knows
arithmetic, and every operation of the grammar as a method: `(-x).exp()`."""

Formula = Callable[..., Any]
"""(*arguments) -> the value by other operations, in the same way."""


class Cost(NamedTuple):
    """`special`: results of the special-function unit; `fp32`: slots of the fp32 pipe; `loads`: lanes."""

    special: float = 0
    fp32: float = 0
    loads: float = 0

    def times(self, n: float) -> Cost:
        return Cost(*(x * n for x in self))

    def plus(self, other: Cost) -> Cost:
        return Cost(*(x + y for x, y in zip(self, other, strict=True)))


class Range(NamedTuple):
    """Range of a function of floats, given an interval of its argument.

    rising, falling   at the ends of the interval; NaN outside the domain [low, high]
    even              rising in the size of the argument
    within            somewhere in [low, high], whatever the argument
    exact             no value is rounded; other functions may be several units in the last place away
    """

    shape: Literal["rising", "falling", "even", "within"]
    low: float = -math.inf
    high: float = math.inf
    exact: bool = False


class Domain(NamedTuple):
    """Interval of an argument of a function of floats. Tests take numbers of every size from it, subnormal
    and infinite ones too, and many close to its ends and to `hard` places: zeros, poles, bends, overflows."""

    low: float = -math.inf
    high: float = math.inf
    hard: tuple[float, ...] = ()


class Operation(NamedTuple):
    """An elementwise operation.

    torch      names of the functions and Tensor methods that mean it, the one that evaluates it first
    range      None where analyze/rules.py has a rule of its own
    slopes     None where no argument or value is a float, or analyze/gradient.py has a rule of its own
    device     "" where devices compute it by an operator, or as other operations: `formula`, emit/lower.py
    formula    its value by other operations, for devices
    operator   infix or prefix, by arity
    word       what a generated module calls its values; "": its device function, or name
    odd        whether f(-x) is -f(x)
    branches   whether the device function has branches, behind which the compiler moves what uses its value
    domain     of each argument; () for what is no function of floats, or exact
    ulps       largest error within it, in units in the last place of float32, on devices whose approximate
               instructions round exactly; subnormal numbers may be taken for 0, as those instructions do
    growth     further units, times the size of the argument: what its rounding by a formula costs
    """

    name: str
    arity: int
    takes: Takes
    gives: Gives
    cost: Cost
    torch: tuple[str, ...] = ()
    range: Range | None = None
    slopes: Slopes | None = None
    fold: Callable[..., Any] | None = None
    device: str = ""
    formula: Formula | None = None
    operator: str = ""
    word: str = ""
    odd: bool = False
    branches: bool = False
    domain: tuple[Domain, ...] = ()
    ulps: float = 0
    growth: float = 0

    @property
    def slow(self) -> bool:
        """True if a value of floats costs a special function, and is no mere rounding."""
        exact = self.range is not None and self.range.exact
        return self.gives == "float" and self.cost.special > 0 and not exact


# --- parts of rows ----------------------------------------------------------------------------------------

RISING, EXACT, EVEN = Range("rising"), Range("rising", exact=True), Range("even")
_REALS, _NONNEGATIVE, _SIZE_ONE = Domain(), Domain(0.0, hard=(1.0,)), Domain(-1.0, 1.0)
_ANGLES = Domain(hard=(1.5707964, 3.1415927, 6.2831855))
_LOG2_E = 1.4426950408889634
_FREE, _ONE, _TWO, _DIVISION = Cost(), Cost(0, 1), Cost(0, 2), Cost(1, 24)


def _flat(value: Any, *arguments: Any) -> tuple[None, ...]:
    return (None,) * len(arguments)


def _minimum(value: Any, a: Any, b: Any) -> tuple[Any, Any]:
    return _won(a.le(b), a.eq(b)), _won(b.le(a), b.eq(a))


def _maximum(value: Any, a: Any, b: Any) -> tuple[Any, Any]:
    return _won(b.le(a), a.eq(b)), _won(a.le(b), b.eq(a))


def _won(wins: Any, ties: Any) -> Any:
    """The argument that wins takes the gradient; equal ones share it, as in torch."""
    return wins.where(ties.where(0.5, 1.0), 0.0)


def _angle(value: Any, y: Any, x: Any) -> tuple[Any, Any]:
    square = y * y + x * x
    # At the origin, where the angle has no slope, torch says 0; dividing by 1 there makes it so.
    square = square.eq(0.0).where(1.0, square)
    return x / square, -(y / square)


def _truncated(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if a * b >= 0 else -1)


_WIDEST_SHIFT = 128


def _few(shift: int) -> int:
    if shift > _WIDEST_SHIFT:  # a number of any size would have to be written down
        raise ArithmeticError
    return shift


def _arithmetic(name: str, arity: int, cost: Cost, **more: Any) -> Operation:
    """An operation on ints and floats alike."""
    return Operation(name, arity, "number", "same", cost, **more)


def _bits(name: str, sign: str, fold: Callable[..., int], torch: str, word: str, arity: int = 2) -> Operation:
    return Operation(name, arity, "int", "int", _TWO, (torch,), operator=sign, fold=fold, word=word)


def _test(
    name: str, takes: Takes, arity: int, cost: Cost, *torch: str, sign: str = "", **more: Any
) -> Operation:
    return Operation(name, arity, takes, "bool", cost, torch, operator=sign, **more)


def _function(
    name: str,
    slope: Callable[[Any, Any], Any],
    range: Range,
    cost: Cost,
    *also: str,
    domain: Domain,
    ulps: float,
    **more: Any,
) -> Operation:
    """A function of one float that torch and devices call by this name, and torch `also` by others; `slope`
    is its derivative, given its value y and its argument x."""
    more = {"device": "" if "formula" in more else name, "domain": (domain,), "ulps": ulps, **more}
    return Operation(
        name, 1, "float", "float", cost, (name, *also), range, lambda y, x: (slope(y, x),), **more
    )


def _rounding(name: str, *also: str, **more: Any) -> Operation:
    more = {"device": name, "domain": (Domain(hard=(0.5, 1.0, 1.5, 2.5, 8388608.0)),), **more}
    return Operation(name, 1, "float", "float", Cost(1, 0), (name, *also), EXACT, _flat, **more)


# --- the rows ---------------------------------------------------------------------------------------------

_ROWS = (
    # Arithmetic. floordiv and mod floor, as in Python.
    _arithmetic("add", 2, _ONE, torch=("add",), slopes=lambda y, a, b: (1.0, 1.0),
                fold=operator.add, operator="+", word="added"),
    _arithmetic("sub", 2, _ONE, torch=("sub", "subtract"), slopes=lambda y, a, b: (1.0, -1.0),
                fold=operator.sub, operator="-", word="difference"),
    _arithmetic("mul", 2, _ONE, torch=("mul", "multiply"), slopes=lambda y, a, b: (b, a),
                fold=operator.mul, operator="*", word="product"),
    # neg and abs are modifiers of the next instruction.
    _arithmetic("neg", 1, _FREE, torch=("neg", "negative"), slopes=lambda y, x: (-1.0,),
                fold=operator.neg, operator="-", word="negative"),
    _arithmetic("abs", 1, _FREE, torch=("abs", "absolute"), slopes=lambda y, x: (x.sign(),),
                fold=abs, device="absolute", word="size"),
    _arithmetic("minimum", 2, _TWO, torch=("minimum",), slopes=_minimum, fold=min, device="minimum",
                word="least"),
    _arithmetic("maximum", 2, _TWO, torch=("maximum",), slopes=_maximum, fold=max, device="maximum",
                word="most"),
    _arithmetic("sign", 1, Cost(0, 4), torch=("sign", "sgn"), slopes=_flat, device="sign"),
    _arithmetic("floordiv", 2, _DIVISION, torch=("floor_divide",), slopes=_flat,
                fold=operator.floordiv, device="floor_div", operator="//", word="quotient"),
    _arithmetic("mod", 2, _DIVISION, torch=("remainder",), slopes=lambda y, a, b: (1.0, -(a // b)),
                fold=operator.mod, operator="%"),
    _arithmetic("truncdiv", 2, _DIVISION, slopes=_flat, fold=_truncated, device="trunc_div",
                word="quotient"),

    # Bits of integers.
    _bits("bitand", "&", operator.and_, "bitwise_and", "bits"),
    _bits("bitor", "|", operator.or_, "bitwise_or", "bits"),
    _bits("bitxor", "^", operator.xor, "bitwise_xor", "bits"),
    _bits("bitnot", "~", operator.invert, "bitwise_not", "", 1),
    _bits("shl", "<<", lambda a, s: a << _few(s), "bitwise_left_shift", "shifted"),
    _bits("shr", ">>", lambda a, s: a >> _few(s), "bitwise_right_shift", "shifted"),

    # Comparisons and logic. `gt` and `ge` are `lt` and `le` with the arguments swapped.
    _test("lt", "any", 2, _TWO, "lt", "less", sign="<", fold=operator.lt, word="below"),
    _test("le", "any", 2, _TWO, "le", "less_equal", sign="<=", fold=operator.le, word="within"),
    _test("eq", "any", 2, _TWO, "eq", sign="==", fold=operator.eq, word="same"),
    _test("ne", "any", 2, _TWO, "ne", "not_equal", sign="!=", fold=operator.ne, word="other"),
    _test("and_", "bool", 2, _ONE, "logical_and", sign="&", fold=operator.and_, word="both"),
    _test("or_", "bool", 2, _ONE, "logical_or", sign="|", fold=operator.or_, word="either"),
    _test("xor", "bool", 2, _ONE, "logical_xor", sign="^", fold=operator.xor),
    _test("not_", "bool", 1, _ONE, "logical_not", sign="~", fold=operator.not_, word="opposite"),
    _test("isnan", "any", 1, _TWO, "isnan", device="is_nan"),
    _test("isinf", "any", 1, _TWO, "isinf", device="is_inf"),

    # Choices, conversions, and what gradients are told. Kinds of their arguments: `expr.apply`.
    Operation("where", 3, "any", "same", _TWO, ("where",), device="where", word="choice",
              slopes=lambda y, c, a, b: (None, c.where(1.0, 0.0), c.where(0.0, 1.0))),
    Operation("to_float", 1, "any", "float", _TWO, slopes=_flat, word="number"),
    Operation("to_int", 1, "any", "int", _TWO, word="integer"),  # truncates towards zero
    Operation("to_bool", 1, "any", "bool", _TWO),
    Operation("detach", 1, "float", "float", _FREE, ("detach",), slopes=_flat),  # no gradient
    # (value, x, slope): value, whose derivative by x is declared to be slope
    Operation("with_grad", 3, "float", "float", _FREE, slopes=lambda y, value, x, slope: (None, slope, None)),

    # Functions of floats. The reciprocal of what is beyond 2^126 is subnormal: its instruction gives 0.
    Operation("div", 2, "float", "float", Cost(1, 2), ("div", "divide", "true_divide"), fold=operator.truediv,
              slopes=lambda y, a, b: (1.0 / b, -(y / b)), device="divide", operator="/", word="ratio",
              domain=(_REALS, Domain(-(2.0**126), 2.0**126)), ulps=2),
    Operation("pow", 2, "float", "float", Cost(2, 1), ("pow", "float_power"), fold=operator.pow,
              device="power", operator="**", branches=True, domain=(_NONNEGATIVE, Domain(hard=(1.0, 2.0))),
              ulps=2),
    Operation("atan2", 2, "float", "float", Cost(1, 16), ("atan2", "arctan2"),
              Range("within", -3.1416, 3.1416), _angle, device="atan2", domain=(_REALS, _REALS), ulps=4),
    _function("exp", lambda y, x: y, RISING, Cost(1, 1), fold=math.exp,
              formula=lambda x: (x * _LOG2_E).exp2(), domain=Domain(hard=(88.72284, -87.33655)), ulps=2,
              growth=0.9),
    _function("exp2", lambda y, x: math.log(2) * y, RISING, Cost(1, 0), fold=lambda a: 2.0**a,
              word="exponential", domain=Domain(hard=(128.0, -126.0)), ulps=1),
    _function("expm1", lambda y, x: y + 1.0, RISING, Cost(1, 4), domain=Domain(hard=(88.72284, -17.0)),
              ulps=2),
    _function("log", lambda y, x: 1.0 / x, Range("rising", 0.0), Cost(1, 1), fold=math.log,
              formula=lambda x: x.log2() * math.log(2), domain=_NONNEGATIVE, ulps=3),
    _function("log2", lambda y, x: 1 / math.log(2) / x, Range("rising", 0.0), Cost(1, 0), fold=math.log2,
              word="logarithm", domain=_NONNEGATIVE, ulps=1),
    _function("log1p", lambda y, x: 1.0 / (1.0 + x), Range("rising", -1.0), Cost(1, 4), branches=True,
              domain=Domain(-1.0), ulps=2),
    _function("sqrt", lambda y, x: 0.5 / y, Range("rising", 0.0), Cost(1, 1), fold=math.sqrt, word="root",
              domain=_NONNEGATIVE, ulps=1),
    _function("sin", lambda y, x: x.cos(), Range("within", -1.0, 1.0), Cost(1, 1), odd=True,
              branches=True, domain=_ANGLES, ulps=2),
    _function("cos", lambda y, x: -x.sin(), Range("within", -1.0, 1.0), Cost(1, 1), branches=True,
              domain=_ANGLES, ulps=2),
    _function("tan", lambda y, x: 1.0 + y * y, Range("within"), Cost(3, 1), odd=True, branches=True,
              domain=_ANGLES, ulps=4),
    _function("asin", lambda y, x: 1.0 / (1.0 - x * x).sqrt(), Range("rising", -1.0, 1.0), Cost(1, 16),
              "arcsin", odd=True, domain=_SIZE_ONE, ulps=2),
    _function("acos", lambda y, x: -1.0 / (1.0 - x * x).sqrt(), Range("falling", -1.0, 1.0), Cost(1, 16),
              "arccos", domain=_SIZE_ONE, ulps=2),
    _function("atan", lambda y, x: 1.0 / (1.0 + x * x), RISING, Cost(1, 16), "arctan", odd=True,
              branches=True, domain=Domain(hard=(1.0,)), ulps=2),
    _function("sinh", lambda y, x: x.cosh(), RISING, Cost(2, 3), odd=True,
              domain=Domain(hard=(1.0, 89.41599)), ulps=2),
    _function("cosh", lambda y, x: x.sinh(), EVEN, Cost(2, 3), domain=Domain(hard=(89.41599,)), ulps=2),
    _function("tanh", lambda y, x: 1.0 - y * y, RISING, Cost(1, 0), odd=True,
              domain=Domain(hard=(9.0,)), ulps=1),
    _function("sigmoid", lambda y, x: y * (1.0 - y), RISING, Cost(2, 3), "expit",
              formula=lambda x: 1.0 / (1.0 + (x * -_LOG2_E).exp2()), domain=Domain(hard=(-88.72284, 17.0)),
              ulps=4, growth=0.9),
    _function("erf", lambda y, x: 2 / math.sqrt(math.pi) * (-(x * x)).exp(), RISING, Cost(1, 19), odd=True,
              domain=Domain(hard=(1.0, 4.0)), ulps=2),
    _rounding("floor", fold=lambda a: float(math.floor(a))),
    _rounding("ceil"),
    _rounding("round", device="rounded"),  # halves to even
    _rounding("trunc", "fix"),
)  # fmt: skip

OPS: dict[str, Operation] = {row.name: row for row in _ROWS}

INFIX = {row.name: row.operator for row in _ROWS if row.operator and row.arity == 2}
PREFIX = {row.name: row.operator for row in _ROWS if row.operator and row.arity == 1}
DIVISIONS = frozenset(("floordiv", "mod", "truncdiv"))
"""Operations that integers have no value of where the second argument is 0."""
COMPARISONS = frozenset(("lt", "le", "eq", "ne"))
FOLDS = {"sum": "add", "prod": "mul", "max": "maximum", "min": "minimum", "any": "or_", "all": "and_"}
"""Operations that reductions fold terms by."""
