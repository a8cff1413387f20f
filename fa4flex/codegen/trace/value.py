"""Proxies: what the user's function computes on instead of tensors and numbers.

`Value` stands for a tensor: a scalar, or a small vector left over when a captured tensor was indexed with
fewer indices than it has dimensions. `Number` stands for a captured Python number. Operators call the
operation table by name (`dispatch.OPERATIONS`), so `x + y`, `torch.add(x, y)` and `x.add(y)` are one thing.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import torch

from fa4flex.codegen.expr import Expr, apply, const, scalar
from fa4flex.codegen.trace.state import current
from fa4flex.errors import TraceError


class Dim:
    """One dimension of a vector: the axis symbol that runs over it (None when nothing varies along it).

    Whoever reads the extent makes the trace depend on it.
    """

    __slots__ = ("_extent", "axis")

    def __init__(self, axis: str | None, extent: int) -> None:
        self.axis, self._extent = axis, extent

    @property
    def extent(self) -> int:
        current().measure(self.axis)
        return self._extent

    @property
    def is_one(self) -> bool:
        """True for an extent of 1, on which the trace then depends; on how large others are it does not."""
        return self._extent == 1 and self.extent == 1

    @property
    def size(self) -> Any:
        """The extent, as a run-time number where it is one."""
        owner = current().owner(self.axis)
        result = self._extent if owner is None else extent_of(*owner, self._extent)
        return self.extent if result is self._extent else result


Dims = tuple[Dim, ...]
Call = Callable[..., Any]
_call: list[Call] = []


def on_call(call: Call) -> None:
    """Install what runs an operation by name; the operation table needs these classes, not the reverse."""
    _call[:] = [call]


def call(name: str, *args: Any, **kwargs: Any) -> Any:
    return _call[0](name, args, kwargs)


class UnknownAttribute(TraceError, AttributeError):
    """An attribute that tensors have and traced values do not; hasattr() sees it as missing."""


class Proxy:
    """Operators that both kinds of proxy share: each calls an entry of the operation table."""

    __slots__ = ()
    __array_ufunc__ = None  # numpy then leaves `array * proxy` to __rmul__, which explains

    def __pos__(self) -> Any:
        return self

    def __divmod__(self, other: Any) -> tuple[Any, Any]:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> tuple[Any, Any]:
        return other // self, other % self

    @classmethod
    def __torch_function__(cls, func: Call, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _call[0](func, args, kwargs or {})

    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise current().error(
            given=f"numpy was given the traced value {self!r}",
            expected="torch tensors and torch functions inside a mod",
            fix="convert the array once, outside the mod: torch.from_numpy(array)",
        )


def _operator(name: str, reflected: bool = False) -> Call:
    def method(self: Proxy, other: Any) -> Any:
        if other is None or isinstance(other, str):
            return NotImplemented
        return call(name, *((other, self) if reflected else (self, other)))

    return method


BINARY = {
    "add": "add", "sub": "sub", "mul": "mul", "truediv": "div", "floordiv": "floor_divide",
    "mod": "remainder", "pow": "pow", "and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor",
    "lshift": "bitwise_left_shift", "rshift": "bitwise_right_shift",
}  # fmt: skip
COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
UNARY = {"neg": "neg", "abs": "abs", "invert": "bitwise_not"}


class Value(Proxy):
    """A traced tensor: an expression whose free axis symbols are those of `dims`, and torch's dtype for it.

    `dtype` is None for a Python number, which takes no part in torch's type promotion. `wraps`: it was cast
    to int32, or computed from what was, and its arithmetic keeps 32 bits.
    """

    __slots__ = ("dims", "dtype_or_none", "expr", "wraps")

    def __init__(
        self, expr: Expr, dims: Dims = (), dtype: torch.dtype | None = None, wraps: bool = False
    ) -> None:
        self.expr, self.dims, self.dtype_or_none, self.wraps = expr, dims, dtype, wraps

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # isinstance(score, torch.Tensor) holds, as it does without tracing
        return torch.Tensor

    def __repr__(self) -> str:
        return f"<traced {self.expr.kind} {self.expr}>"

    def __format__(self, spec: str) -> str:
        return repr(self)

    __hash__ = object.__hash__

    def __getattr__(self, name: str) -> Any:
        return call("getattr", self, name)

    def __getitem__(self, index: Any) -> Any:
        return call("getitem", self, index)

    def __setitem__(self, index: Any, value: Any) -> NoReturn:
        call("setitem", self, index, value)
        raise AssertionError("unreachable: assignment into a traced value is refused")

    def __len__(self) -> int:
        if not self.dims:
            raise TypeError("len() of a 0-d tensor")
        return self.dims[0].extent

    def __iter__(self) -> Iterator[Value]:
        if not self.dims:
            raise self._needs_data("iterates over")
        return iter([self[i] for i in range(len(self))])

    def __matmul__(self, other: Any) -> Any:
        return call("matmul", self, other)

    def __rmatmul__(self, other: Any) -> Any:
        return call("matmul", other, self)

    def __contains__(self, item: object) -> NoReturn:
        raise self._needs_data("searches with `in`")

    def __bool__(self) -> NoReturn:
        raise self._needs_data("branches on (if, while, and, or, not, min(), max())")

    def __int__(self) -> NoReturn:
        raise self._needs_data("converts to a Python int")

    def __float__(self) -> NoReturn:
        raise self._needs_data("converts to a Python float")

    def __index__(self) -> NoReturn:
        raise self._needs_data("uses as a Python integer (range, a list index, a numpy index, a shape)")

    def __round__(self, digits: int = 0) -> NoReturn:
        raise self._needs_data("rounds with round()")

    def _needs_data(self, action: str) -> TraceError:
        return current().error(
            given=f"the mod {action} `{self.expr}`, whose value differs for every (query, key) pair",
            expected="one expression for all pairs, without control flow that depends on data",
            fix="choose with torch.where(condition, a, b); combine conditions with & | ~; bound with "
            "torch.minimum / torch.maximum / clamp; index torch tensors, not lists, nor numpy arrays "
            "(torch.from_numpy(array) converts one, outside the mod)",
        )


class Number(Proxy):
    """A captured Python number whose value may change without a new program.

    It carries its value now. Arithmetic stays symbolic; when the code needs the value (an `if`, range(), a
    shape) the numbers in it are noted, and the trace starts over with those as plain constants.
    """

    __slots__ = ("_expr", "_leaf", "sources", "value")

    def __init__(
        self, value: int | float | bool, sources: Mapping[str, int | float], expr: Expr | None = None
    ) -> None:
        self.value, self.sources, self._expr = value, dict(sources), expr

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # isinstance(window, int) holds, as it does without tracing
        return type(self.value)

    @property
    def expr(self) -> Expr:
        """Slots are given at first use, so that numbers the mod never touches take none."""
        if self._expr is None:
            (name,) = self.sources
            state = current()
            slot = state.captures.scalar_slot(name, *state.numbers[name])
            self._expr = scalar(slot, "int" if isinstance(self.value, int) else "float")
        return self._expr

    def look(self) -> int | float | bool:
        """The value, now: its numbers become constants."""
        current().look(self.sources)
        return self.value

    def __repr__(self) -> str:
        return repr(self.value)

    def __hash__(self) -> int:
        return hash(self.look())

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.look(), name)  # is_integer(), real, bit_length(), ...


def extent_of(tensor: int, dimension: int, now: Any) -> Any:
    """An extent of the tensor with that id, as a run-time number where it may vary; else what it is `now`."""
    state = current()
    name = state.extent(tensor, dimension)
    if name is None:
        return int(now)
    if name not in state.extents:
        value = plain_number(state.numbers[name][0])
        state.extents[name] = Number(value, {name: value})
    return state.extents[name]


class Shape(tuple[Any, ...]):
    """Sizes of a tensor, some of which are run-time numbers; torch.Size holds plain ones alone."""

    __slots__ = ()

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return torch.Size

    def __getitem__(self, at: Any) -> Any:
        result = super().__getitem__(at)
        return Shape(result) if isinstance(at, slice) else result

    def numel(self) -> Any:
        return math.prod(self)


def is_number(x: object) -> bool:
    return type(x) is Number


def is_real(x: object) -> bool:
    """True for a tensor that is there, rather than traced."""
    return isinstance(x, torch.Tensor) and type(x) is not Value


def plain_number(x: Any) -> Any:
    """The value of a number for now: of a symbolic one, without a guard."""
    node = getattr(x, "node", None) if isinstance(x, (torch.SymInt, torch.SymFloat, torch.SymBool)) else None
    return x if node is None else node.hint if node.has_hint() else 1


def scalar_of(x: Any) -> Any:
    """`x`, or the value of a Number, which thereby becomes a constant of the trace."""
    return x.look() if is_number(x) else x


def _install_operators() -> None:
    for name, entry in BINARY.items():
        setattr(Value, f"__r{name}__", _operator(entry, reflected=True))
        setattr(Number, f"__r{name}__", _number_operator(_PYTHON[name], entry, reflected=True))
    for name, entry in {**BINARY, **dict(zip(COMPARISONS, COMPARISONS, strict=True))}.items():
        setattr(Value, f"__{name}__", _operator(entry))
        setattr(Number, f"__{name}__", _number_operator(_PYTHON[name], entry, reflected=False))
    for name, entry in UNARY.items():
        setattr(Value, f"__{name}__", lambda self, entry=entry: call(entry, self))
        setattr(Number, f"__{name}__", _number_unary(_PYTHON[name], name))
    for name, function in _LOOKING.items():
        setattr(Number, f"__{name}__", lambda self, *args, of=function: of(self.look(), *args))


_PYTHON: dict[str, Call] = {
    name: getattr(operator, f"__{name}__") for name in (*BINARY, *COMPARISONS, *UNARY)
}
_LOOKING: dict[str, Call] = {
    "bool": bool, "int": int, "float": float, "index": operator.index, "round": round, "str": str,
    "floor": math.floor, "ceil": math.ceil, "trunc": math.trunc, "format": format, "complex": complex,
}  # fmt: skip
_EXACT: dict[str, str] = {
    "add": "add", "sub": "sub", "mul": "mul", "div": "div", "floor_divide": "floordiv", "remainder": "mod",
    "bitwise_left_shift": "shl", "bitwise_right_shift": "shr", **{name: name for name in COMPARISONS},
}  # fmt: skip
_LOGIC = {"bitwise_and": ("bitand", "and_"), "bitwise_or": ("bitor", "or_"), "bitwise_xor": ("bitxor", "xor")}


def _number_operator(python: Call, entry: str, reflected: bool) -> Call:
    """Number op number stays a Number; with anything traced or real it is an operation of the table."""

    def method(self: Number, other: Any) -> Any:
        if type(other) not in (Number, int, float, bool):
            if isinstance(other, (Proxy, torch.Tensor)):
                return call(entry, *((other, self) if reflected else (self, other)))
            return NotImplemented
        pair = (other, self) if reflected else (self, other)
        plain = [x.value if is_number(x) else x for x in pair]
        node = _number_expr(entry, [_expr_of(x) for x in pair], plain)
        sources = {**self.sources, **(other.sources if is_number(other) else {})}
        if node is None:
            current().look(sources)
            return python(*plain)
        return Number(python(*plain), sources, node)

    return method


def _expr_of(x: Any) -> Expr:
    return x.expr if is_number(x) else const(x)


def _number_expr(entry: str, exprs: list[Expr], plain: list[Any]) -> Expr | None:
    """The expression of an operation on Python numbers; None where the grammar has no exact counterpart."""
    if entry in _LOGIC:
        return apply(_LOGIC[entry][all(isinstance(x, bool) for x in plain)], *exprs)
    if entry == "pow":
        floats = any(isinstance(x, float) for x in plain)
        return apply("pow", *exprs) if floats and plain[0] > 0 else None
    return apply(_EXACT[entry], *exprs)


def _number_unary(python: Call, name: str) -> Call:
    def method(self: Number) -> Any:
        op = "bitnot" if name == "invert" else name
        return Number(python(self.value), self.sources, apply(op, self.expr))

    return method


_install_operators()
