"""Functions of captured tensors that are the same function of their elements: f(t)[i] = f(t[i]).

What a mod computes of captured tensors by such functions is read as an expression of their elements, computed
where it is read: no tensor of it is made at a call, and its gradient is that of the expression. As with any
arithmetic on elements that were read, tensors of 16 bits are computed with at the computation's precision,
where torch rounds after each operation; casts round as torch's do. What would not be the same is left to
torch, which computes the tensor again at each call: arithmetic of integers, which may wrap around, float64,
other devices, and views that cut or repeat, whose extents bound indices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fa4flex.codegen.expr import walk
from fa4flex.codegen.trace.build import elements_of, from_tensor, kind_of, normalised
from fa4flex.codegen.trace.captures import leaves, map_leaves
from fa4flex.codegen.trace.elementwise import ELEMENTWISE
from fa4flex.codegen.trace.state import current
from fa4flex.codegen.trace.value import Value, call, is_real
from fa4flex.errors import TraceError

_CASTS = frozenset(("to", "type", "type_as", "float", "half", "bfloat16", "long", "bool", "_to_copy"))
_MAY_WRAP = frozenset(("add", "sub", "mul", "neg", "abs", "shl", "sum", "prod", "bitnot"))
"""Operations whose result may need more bits than torch's dtype has."""
_VIEWS = frozenset(("transpose", "permute", "t", "T", "mT", "unsqueeze", "contiguous", "clone", "alias"))


def commuted(name: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Value | None:
    """The elements of an operation's result as an expression of those of captured tensors, over axes that run
    along its dimensions; None where they are none. `name` is that of the table of operations."""
    tensors = [x for x in leaves((args, kwargs)) if is_real(x)]
    if not (name in ELEMENTWISE or name in _CASTS or name in _VIEWS or _adds_dimensions(name, args)):
        return None
    if any(x.dtype is torch.float64 or x.device != tensors[0].device for x in tensors):
        return None
    state = current()
    error, seen = state.first_error, {key: set(what) for key, what in state.seen.items()}
    try:
        value, named = map_leaves((args, kwargs), _element)
        if name in ("T", "mT"):
            result = call("getattr", value[0], name)
        else:
            result = call(function, *value, **named)  # type: ignore[arg-type]
    except TraceError:  # the table has no such operation, or not on such arguments
        state.first_error = error
        return None
    finally:  # torch compares extents when it makes the tensor; the expression is the same for others
        state.seen = seen
    if type(result) is not Value:
        return None
    narrowed = result.expr.kind == "int" and result.dtype_or_none not in (torch.int64, tensors[0].dtype)
    return None if name in _CASTS and narrowed else result


def alike(elements: Value, tensor: Tensor) -> bool:
    """True if these are the elements of what torch made, in its dtype."""
    extents = tuple([dim._extent for dim in elements.dims])
    if extents != tuple(tensor.shape) or elements.dtype_or_none is not tensor.dtype:
        return False
    if tensor.dtype is torch.float64 or kind_of(tensor.dtype) != elements.expr.kind:
        return False
    return not any(node.kind == "int" and node.op in _MAY_WRAP for node in walk(elements.expr))


def _element(leaf: Any) -> Any:
    if not is_real(leaf):
        return leaf
    elements = elements_of(leaf)
    return normalised(from_tensor(leaf) if elements is None else elements)


def _adds_dimensions(name: str, args: Any) -> bool:
    """True for an index of `None`, `:` and `...` alone."""
    if name != "getitem" or len(args) != 2:
        return False
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    return all(x is None or x is Ellipsis or (isinstance(x, slice) and x == slice(None)) for x in index)
