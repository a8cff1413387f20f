"""From what a mod passes to an operation, to a Value: coercion, broadcasting and torch's type promotion.

Dtypes are tracked so that casts and `.dtype` answer as torch does; arithmetic itself is exact on ints and at
the computation's precision on floats. A product of two bfloat16 tables is therefore not rounded to bfloat16.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import numpy
import torch
from torch import Tensor

from fa4flex.codegen import expr
from fa4flex.codegen.expr import Expr, Kind, const, load, substitute, sym
from fa4flex.codegen.ops import DIVISIONS
from fa4flex.codegen.trace.captures import Recipe
from fa4flex.codegen.trace.narrow import NARROW, WRAPPING, narrowed
from fa4flex.codegen.trace.paths import Path
from fa4flex.codegen.trace.state import current
from fa4flex.codegen.trace.value import Dim, Dims, Number, Value, is_number

DEFAULT_DTYPE: dict[Kind, torch.dtype] = {"bool": torch.bool, "int": torch.int64, "float": torch.float32}
_MAY_WRAP = frozenset((
    "add", "sub", "mul", "neg", "abs", "shl", "bitnot", "bitand", "bitor", "bitxor", "floordiv", "truncdiv",
))  # fmt: skip


def kind_of(dtype: torch.dtype) -> Kind:
    if dtype is torch.bool:
        return "bool"
    if dtype.is_complex:
        raise current().error(
            f"a tensor of {dtype}", "bool, integer or floating tensors", "split it with view_as_real"
        )
    return "float" if dtype.is_floating_point else "int"


def made(node: Expr, dims: Dims = (), dtype: torch.dtype | None = None, wraps: bool = False) -> Value:
    """A new Value: its expression gets the user's current line; torch.no_grad() cuts its gradient."""
    if node.kind == "float" and not torch.is_grad_enabled():
        node = expr.apply("detach", node)
    current().record(node)
    return Value(node, dims, dtype, wraps)


def coerce(x: Any) -> Value:
    """Anything that a torch function takes as a tensor or a number, as a Value."""
    if isinstance(x, Value):
        return x
    if is_number(x):
        return Value(x.expr)
    if isinstance(x, (bool, int, float)):
        return Value(const(next(plain(x) for plain in (bool, int, float) if isinstance(x, plain))))
    if isinstance(x, Tensor):
        return normalised(from_tensor(x))
    if isinstance(x, numpy.generic):
        return Value(const(x.item()))
    if isinstance(x, numpy.ndarray):
        raise current().error(
            given=f"a numpy array of shape {x.shape} meets a traced value",
            expected="torch tensors inside a mod",
            fix="convert it once, outside the mod: torch.from_numpy(array)",
        )
    if x is None:
        fix = "check for a function in the mod that does not return its result"
    elif isinstance(x, (list, tuple)):
        fix = "make it a tensor outside the mod: torch.tensor([...])"
    else:
        fix = "pass a tensor or a number"
    raise current().error(f"{_describe(x)} where a tensor or number is needed", "a tensor or a number", fix)


def _describe(x: Any) -> str:
    return "None" if x is None else f"a {type(x).__name__}"


def elements_of(tensor: Tensor) -> Value | None:
    """Elements of a tensor that the mod computed, as an expression of those of captured tensors, where they
    are one; else None."""
    derived = current().made.get(id(tensor))
    return None if derived is None else derived.elements


def from_tensor(tensor: Tensor) -> Value:
    """A captured tensor as a vector over all its dimensions; a 0-d one made inside the mod is a constant."""
    state = current()
    derived = state.made.get(id(tensor))
    recipe: Recipe | None = derived.recipe if derived else None
    if derived and tensor.ndim == 0:
        if recipe is None:
            return Value(const(tensor.item()), (), tensor.dtype)
        if derived.elements is not None:
            return derived.elements
    if tensor.layout is not torch.strided or tensor.is_nested:
        layout = "nested" if tensor.is_nested else f"of layout {tensor.layout}"
        name = state.found[id(tensor)][1] if id(tensor) in state.found else "tensor"
        raise state.error(
            f"captured tensor {name!r} is {layout}",
            "strided captured tensors",
            f"convert {name!r} before it is captured: .to_dense(), or to_padded_tensor() where nested",
        )
    state.meet(tensor)
    state.see(id(tensor), "element")
    if derived and recipe is None:  # made of nothing that was captured, it is a constant of the trace
        state.captures.paths[id(tensor)] = Path(None, "constant", tensor)
    if recipe is not None:  # whoever computes it again has no numbers but constants
        recipe = recipe.exchanged(Number, Number.look)
    kind = kind_of(tensor.dtype)
    slot = state.captures.slot(recipe or tensor, _name(tensor, recipe), tensor)
    dims = tuple(Dim(state.axis_of(tensor, d), extent) for d, extent in enumerate(tensor.shape))
    return Value(load(slot, [sym(dim.axis) for dim in dims if dim.axis], kind), dims, tensor.dtype)


def _name(tensor: Tensor, recipe: Recipe | None) -> str:
    state = current()
    if recipe is None:
        result = state.found.get(id(tensor))
        return f"tensor{len(state.captures.operands)}" if result is None else result[1]
    function = getattr(recipe.function, "__name__", "").strip("_")
    base = next((state.found[id(b)][1] for b in recipe.bases() if id(b) in state.found), "tensor")
    return f"{function}({base})" if function not in ("getitem", "get") else f"{base}[...]"


def normalised(x: Value) -> Value:
    """`x` with dimensions of extent 1 no longer running over an axis symbol: they broadcast."""
    zero = {sym(d.axis): const(0) for d in x.dims if d.axis and d.is_one}
    if not zero:
        return x
    dims = tuple(Dim(None, 1) if d.is_one else d for d in x.dims)
    return Value(substitute(x.expr, zero), dims, x.dtype_or_none)


def broadcast(values: Sequence[Value]) -> tuple[list[Expr], Dims]:
    """The values' expressions over common dimensions, aligned from the right as torch does."""
    rank = max(len(v.dims) for v in values)
    if rank == 0:
        return [v.expr for v in values], ()
    result: list[Dim] = []
    for position in range(-rank, 0):
        result.append(_common_dim([v.dims[position] for v in values if len(v.dims) >= -position], result))
    return [over(v, tuple(result)) for v in values], tuple(result)


def _common_dim(dims: list[Dim], before: list[Dim]) -> Dim:
    state = current()
    wide = [d for d in dims if d.extent != 1]
    if not wide:
        return Dim(None, 1)
    if len({d.extent for d in wide}) > 1:
        raise state.error(
            given=f"vectors of {' and '.join(str(d.extent) for d in wide)} elements combined",
            expected="equal extents, or extent 1, aligned from the right",
            fix="index or unsqueeze them to matching shapes",
        )
    taken = {d.axis for d in before}
    axis = next((d.axis for d in wide if d.axis and d.axis not in taken), None) or state.fresh_axis()
    if any(d.axis in state.cut_axes for d in wide):
        state.cut_axes.add(axis)
    return Dim(axis, wide[0].extent)


def over(x: Value, dims: Dims) -> Expr:
    """The expression of `x` with its axes renamed to those of `dims`, aligned from the right."""
    renamed: dict[Expr, Expr] = {}
    for mine, theirs in zip(reversed(x.dims), reversed(dims), strict=False):
        if mine.axis and mine.axis != theirs.axis:
            renamed[sym(mine.axis)] = sym(theirs.axis) if theirs.axis else const(0)
    return substitute(x.expr, renamed) if renamed else x.expr


def promoted(kind: Kind, values: Sequence[Value]) -> torch.dtype:
    """torch's result type: the widest dtype of that kind among the tensors, else the default."""
    dtypes = [v.dtype_or_none for v in values if v.dtype_or_none and kind_of(v.dtype_or_none) == kind]
    return reduce(torch.promote_types, dtypes) if dtypes else DEFAULT_DTYPE[kind]


def elementwise(op: str, *args: Any) -> Value:
    """The grammar's operation `op` on broadcast arguments."""
    values = [coerce(a) for a in args]
    wraps = any(v.wraps for v in values)
    held = _held(values, wraps)
    if held is not None:
        values = [_as_held(v, held, wraps) for v in values]
    exprs, dims = broadcast(values)
    refuse_zero_division(op, exprs)
    node = expr.apply(op, *exprs)
    dtype = promoted(node.kind, values)
    if held is not None and op in _MAY_WRAP and (wraps or dtype in NARROW) and node.kind == "int":
        node = narrowed(node, dtype)
    return made(node, dims, dtype, wraps and dtype is torch.int32)


def _held(values: Sequence[Value], wraps: bool) -> torch.dtype | None:
    """The narrow dtype that holds the integers of an operation; None where there is none."""
    tensors = [v for v in values if v.dtype_or_none is not None]
    if not (wraps or any(v.dtype_or_none in WRAPPING for v in tensors)):
        return None
    if any(v.expr.kind == "float" for v in values):
        return None
    dtype = promoted("int", tensors)
    return dtype if dtype in WRAPPING else None


def _as_held(x: Value, dtype: torch.dtype, wraps: bool) -> Value:
    """A Python int that meets integers of a narrow dtype is converted to it first, as in torch."""
    number = x.dtype_or_none is None and x.expr.kind == "int"
    if not number or not (x.expr.op == "const" or wraps or dtype in NARROW):
        return x
    return Value(narrowed(x.expr, dtype), x.dims)


def refuse_zero_division(op: str, exprs: Sequence[Expr]) -> None:
    """Floats divided by 0 are infinite; integers have no quotient."""
    if op not in DIVISIONS or any(e.kind == "float" for e in exprs):
        return
    if exprs[1].op == "const" and exprs[1].value == 0:
        raise current().error(
            "an integer divided by 0", "a divisor other than 0", "clamp the divisor, or divide floats"
        )


def static_int(x: Any, what: str) -> int:
    """A Python int the code gave as a dimension, a size or the like."""
    if isinstance(x, Value) and x.expr.op != "const":
        raise current().error(
            given=f"{what} that depends on `{x.expr}`",
            expected=f"{what} known before the kernel runs",
            fix="use a Python int",
        )
    return int(x.expr.value) if isinstance(x, Value) else int(x)
