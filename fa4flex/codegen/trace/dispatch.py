"""Every operation of a mod comes here: on traced values it builds expressions, on real tensors it runs.

The operation table is one dictionary from torch's name to a builder; `canonical` maps the many spellings
(operators, methods, torch.special, ATen overloads) to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fa4flex.codegen.trace.captures import Recipe, leaves, map_leaves
from fa4flex.codegen.trace.commuting import alike, commuted
from fa4flex.codegen.trace.dtypes import ATTRIBUTES, DTYPES, makes_value
from fa4flex.codegen.trace.elementwise import ELEMENTWISE, Builder, where
from fa4flex.codegen.trace.paths import Guard, Path
from fa4flex.codegen.trace.questions import answer, noted
from fa4flex.codegen.trace.state import Derived, current
from fa4flex.codegen.trace.value import UnknownAttribute, Value, call, is_number, on_call, scalar_of
from fa4flex.codegen.trace.vectors import VECTORS
from fa4flex.errors import TraceError
from fa4flex.torch_internals import custom_op_name, is_wrapped, without_functions

OPERATIONS: dict[str, Builder] = {**ELEMENTWISE, **VECTORS, **DTYPES}
METHODS: dict[str, Builder] = {"where": lambda self, condition, other: where(condition, self, other)}
"""Methods whose arguments come in another order than those of the function of that name."""

_SPELLINGS = {
    "swapaxes": "transpose", "swapdims": "transpose", "_unsafe_view": "view",
    "mm": "matmul", "linalg_vecdot": "vecdot", "linalg_vector_norm": "norm",
    "linalg_norm": "norm", "_softmax": "softmax",
}  # fmt: skip
"""Names of one function; those of elementwise functions stand beside them."""

_OPERATORS = {
    "truediv": "div", "rtruediv": "rdiv", "floordiv": "floor_divide", "mod": "remainder", "rmul": "mul",
    "radd": "add",
    "rsub": "rsub", "and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor", "rand": "bitwise_and",
    "ror": "bitwise_or", "rxor": "bitwise_xor", "invert": "bitwise_not", "lshift": "bitwise_left_shift",
    "rshift": "bitwise_right_shift",
}  # fmt: skip
_RANDOM = frozenset((
    "rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "bernoulli",
    "multinomial",
    "normal", "poisson", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_dropout", "rrelu",
    "gumbel_softmax", "native_dropout",
))  # fmt: skip
_READS = frozenset((
    "item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__complex__", "__contains__",
    "__array__", "equal", "allclose", "is_nonzero", "nonzero", "unique", "masked_select",
))  # fmt: skip
_REGISTERED: dict[Any, Callable[..., Any]] = {}
_count = [0]


def register_op(function: Any, lowering: Callable[..., Any]) -> None:
    """Teach the tracer an operation: `lowering(*args)` says it in torch operations that it knows.

    `function` is a torch function or one of yours, an operator (torch.ops.ns.name, a torch.library.custom_op,
    or its qualified name "ns::name"), or a torch.autograd.Function class. `lowering` is called with the
    traced values.
    """
    if not callable(lowering):
        raise TraceError(
            f"register_op(..., {lowering!r})", "a callable lowering", "pass a function of the arguments"
        )
    _REGISTERED[_registry_key(function)] = lowering
    _count[0] += 1


def registrations() -> int:
    """Number of operations registered so far: a trace made before one may not hold after it."""
    return _count[0]


def no_more_registered() -> Guard:
    """Guard that no operation was registered since now."""
    return Guard("equal", Path(None, "constant", _count).item(0), registrations())


def registered(function: Any) -> Callable[..., Any] | None:
    try:
        return _REGISTERED.get(_registry_key(function))
    except TypeError:  # unhashable callables are never registered
        return None


_Packet, _Overload = type(torch.ops.aten.add), type(torch.ops.aten.add.Tensor)
"""An operator, and one of its forms."""


def _registry_key(function: Any) -> Any:
    return _qualified_name(function) or function


def _qualified_name(function: Any) -> str | None:
    """ "namespace::name" of a torch operator in any of its forms."""
    if isinstance(function, str):
        return function
    if isinstance(function, _Packet):
        function = getattr(function, function.overloads()[0])
    if isinstance(function, _Overload):
        namespace, _, name = function.name().partition("::")
        return f"{namespace}::{name.partition('.')[0]}"
    if isinstance(function, torch.library.CustomOpDef):
        return custom_op_name(function)
    return None


# attn_gym's softcapping ships this operator with a CUDA instruction; its meaning is tanh.
register_op("approx::tanh", torch.tanh)


def canonical(name: str) -> str:
    """The table's name for one of torch's: operators lose their underscores, `special_erf` is `erf`."""
    if name.startswith("__") and name.endswith("__"):
        return _OPERATORS.get(name[2:-2], name[2:-2])
    name = name.removeprefix("special_")
    return _SPELLINGS.get(name, name)


def attribute(x: Value, name: str) -> Any:
    """`x.name`: an attribute, or the operation of that name as a method."""
    if name in ATTRIBUTES:
        return ATTRIBUTES[name](x)
    if callable(getattr(Tensor, name, None)):
        return lambda *args, **kwargs: call(f".{name}", x, *args, **kwargs)
    if name not in _NOWHERE and hasattr(Tensor, name):
        raise current().error(
            given=f"the mod reads .{name} of `{x.expr}`, which stands for one tensor a (query, key) pair",
            expected="attributes that are the same for every pair",
            fix="read it of a captured tensor, or outside the mod",
        )
    raise UnknownAttribute(
        given=f"a traced value has no attribute {name!r}",
        expected="what a torch.Tensor has",
        fix="check the spelling",
        where=current().where(),
    )


_NOWHERE = frozenset(("__cuda_array_interface__", "__dlpack_c_exchange_api__"))
"""Attributes that not every tensor has: protocols ask for them, and go on without."""
OPERATIONS["getattr"] = attribute


def name_of(function: Any) -> str:
    qualified = _qualified_name(function)
    if qualified is not None:
        return qualified.removeprefix("aten::")
    if getattr(function, "__name__", None) == "__get__":  # of a property, or of one written in C
        attribute = function.__self__
        return str(getattr(getattr(attribute, "fget", attribute), "__name__", "__get__"))
    return str(getattr(function, "__name__", function))


class Tracing(TorchFunctionMode):
    """Sends every torch call of the running mod to `run`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


def run(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One call, by torch callable or by table name (".name" for a method)."""
    flat = leaves((args, kwargs))
    lowering = None if isinstance(function, str) else registered(function)
    traced = any(isinstance(x, Value) for x in flat)
    if lowering is not None and traced:
        with Tracing():
            return lowering(*args, **kwargs)
    if traced or _numbers_stay(function, args, kwargs, flat):
        with without_functions():
            return _build(function, args, kwargs)
    return _run_real(getattr(torch, function) if isinstance(function, str) else function, args, kwargs)


def _numbers_stay(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], flat: list[Any]) -> bool:
    """Numbers stay symbolic with 0-d tensors and as indices of tensors; other real calls need values."""
    if not any(is_number(x) for x in flat):
        return False
    name = canonical(name_of(function))
    if name == "getitem":
        return all(isinstance(x, (Tensor, int, slice, type(None))) or is_number(x) for x in leaves(args[1:]))
    tensors = [x for x in flat if isinstance(x, Tensor)]
    with without_functions():
        scalars_only = bool(tensors) and all(t.ndim == 0 for t in tensors) and name in ELEMENTWISE
    return scalars_only or makes_value(name, args, kwargs)


def _build(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if function is Tensor.where:
        function = ".where"
    name = name_of(function)
    method, name = name.startswith("."), name.removeprefix(".")
    if _is_mutation(name, kwargs):
        raise _mutation(name)
    if canonical(name) in _RANDOM:
        raise _random(name)
    builder = METHODS.get(name) if method else None
    builder = builder or OPERATIONS.get(canonical(name))
    if builder is None:
        raise current().error(
            given=f"{_display(function, name)} on traced values",
            expected="an operation that fa4flex knows",
            fix="write it with basic torch operations, or teach it: register_op(function, lowering)",
        )
    return _apply(builder, name, args, kwargs)


def _apply(builder: Builder, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    renamed = {{"axis": "dim", "self": "input"}.get(key, key): value for key, value in kwargs.items()}
    renamed.pop("out", None)  # an out= other than None was refused as a mutation
    try:
        return builder(*args, **renamed)
    except TypeError as error:
        if (
            isinstance(error, TraceError)
            or error.__traceback__ is None
            or error.__traceback__.tb_next is not None
        ):
            raise
        raise current().error(
            given=f"{name} called with {len(args)} positional arguments and {sorted(kwargs)}: {error}",
            expected="arguments as in the torch documentation, without out=",
            fix="use the plain form of the operation",
        ) from error


def _display(function: Any, name: str) -> str:
    module = getattr(function, "__module__", None)
    qualified = _qualified_name(function)
    if qualified:
        return f"the operator {qualified}"
    return (
        f"{module}.{name}"
        if isinstance(module, str) and not isinstance(function, str)
        else f"the operation {name}"
    )


def _is_mutation(name: str, kwargs: Mapping[str, Any]) -> bool:
    if kwargs.get("out") is not None:
        return True
    if name.startswith("__"):
        return name in ("__setitem__", "__delitem__", "__set__") or (
            name.startswith("__i") and name[3:-2] in _IN_PLACE
        )
    return name == "setitem" or (name.endswith("_") and not name.startswith("_") and name != "requires_grad_")


_IN_PLACE = frozenset(
    ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
)


def _mutation(name: str) -> TraceError:
    return current().error(
        given=f"the mod changes a tensor in place ({name})",
        expected="a mod without side effects: it runs once per (query, key) pair, in any order",
        fix="write x = x + 1 instead of x.add_(1) or out=; keep state outside the mod",
    )


def _random(name: str) -> TraceError:
    return current().error(
        given=f"the random operation {name} inside a mod",
        expected="a mod that gives the same result every time it runs (backward runs it again)",
        fix="draw the numbers outside the mod, into a tensor that the mod indexes",
    )


def _run_real(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An operation among real tensors: it runs, and what depends on captured tensors remembers how."""
    state, name = current(), name_of(function)
    if canonical(name).removesuffix("_") in _RANDOM:
        raise _random(name)
    tensors = [x for x in leaves((args, kwargs)) if isinstance(x, Tensor)]
    captured = [t for t in tensors if id(t) not in state.made or state.made[id(t)].recipe is not None]
    asked = captured and captured[0] is (args[0] if args else None)
    if asked and (outcome := answer(name, args, kwargs)) is not None:
        state.meet(captured[0])
        return outcome
    if captured and _is_mutation(name, kwargs):
        raise _mutation(name)
    if captured and name in _READS:
        raise _reading(name)
    elements = commuted(canonical(name), function, args, kwargs) if captured else None
    numbers = scalar_of if elements is None else (lambda x: x.value if is_number(x) else x)
    plain_args, plain_kwargs = map_leaves((args, kwargs), numbers)
    result = function(*plain_args, **plain_kwargs)
    question = asked and len(captured) == 1 and not any(isinstance(x, Tensor) for x in leaves(result))
    for tensor in captured:
        state.meet(tensor)
        noted(name, tensor) if question else state.see(id(tensor), "all")
    if not captured:
        result = map_leaves(result, _to_keep)
    arguments = {id(t) for t in tensors}
    for position, leaf in enumerate(leaves(result)):
        if isinstance(leaf, Tensor) and id(leaf) not in arguments:
            recipe = _recipe(function, args, kwargs, position) if captured else None
            fits = elements is not None and leaf is result and alike(elements, leaf)
            state.made[id(leaf)] = Derived(leaf, recipe, elements if fits else None)
            if not captured and _is_of_now(leaf):
                state.opaque = state.opaque or "a tensor made where something intercepts operators"
    return result


def _to_keep(leaf: Any) -> Any:
    """A constant is kept with the trace: calls outside of inference mode, which may find that, could not use
    tensors of that mode."""
    if not isinstance(leaf, Tensor) or not leaf.is_inference():
        return leaf
    with torch.inference_mode(False):
        return leaf.clone()


def _is_of_now(made: Tensor) -> bool:
    """True for tensors that mean something within a mode or a transform alone, such as fake ones."""
    return type(made) is not Tensor or is_wrapped(made)


def _recipe(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], output: int
) -> Recipe:
    made = current().made

    def source(leaf: Any) -> Any:
        derived = made.get(id(leaf)) if isinstance(leaf, Tensor) else None
        return derived.recipe if derived and derived.recipe else leaf

    args, kwargs = map_leaves((args, kwargs), source)
    return Recipe(function, args, kwargs, output, torch.is_grad_enabled())


def _reading(name: str) -> TraceError:
    return current().error(
        given=f"the mod reads the value of a captured tensor while it is traced ({name.strip('_')})",
        expected="captured tensors used as tensors, so that a later change of their values is seen",
        fix="use the 0-d tensor itself, or convert it to a Python number outside the mod",
    )


on_call(run)
