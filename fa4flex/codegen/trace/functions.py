"""torch.autograd.Function inside a mod: its forward is traced, and its own backward is honoured.

The result is `with_grad(y, x0, dy/dx0) + with_grad(0, x1, dy/dx1) + ...`: the value of y, whose derivative by
each input is what the function's backward returns for a unit gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import BuiltinFunctionType, MethodType
from typing import Any

import torch

from fa4flex.codegen import expr
from fa4flex.codegen.trace.build import coerce, made
from fa4flex.codegen.trace.dispatch import registered
from fa4flex.codegen.trace.state import current
from fa4flex.codegen.trace.value import Value, is_real
from fa4flex.torch_internals import apply_of, calls_of_functions, without_functions


class Context:
    """State that forward and backward of a torch.autograd.Function share; the part of torch's ctx that
    traces."""

    def __init__(self, needs_input_grad: Sequence[bool]) -> None:
        self.needs_input_grad = tuple(needs_input_grad)
        self.saved_tensors: tuple[Any, ...] = ()

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    save_for_forward = save_for_backward

    def mark_non_differentiable(self, *outputs: Any) -> None:
        self.non_differentiable = outputs

    def set_materialize_grads(self, value: bool) -> None:
        self.materialize_grads = value

    def mark_dirty(self, *tensors: Any) -> None:
        raise current().error(
            "an autograd.Function that changes its input (mark_dirty)",
            "a function without side effects",
            "return a new tensor",
        )


def is_apply(method: object) -> bool:
    """True if `method` is `SomeFunction.apply`, bound before tracing began."""
    if not isinstance(method, (MethodType, BuiltinFunctionType)):
        return False
    owner = method.__self__
    is_function = isinstance(owner, type) and issubclass(owner, torch.autograd.Function)
    return is_function and method == apply_of(owner)


def applying(cls: Any) -> Callable[..., Any]:
    """Stand-in for `cls.apply` while tracing."""
    return lambda *args, **kwargs: apply_function(cls, args, kwargs)


def intercepting() -> AbstractContextManager[None]:
    """While a mod is traced, `SomeFunction.apply(...)` on traced values comes to `apply_function`."""
    return calls_of_functions(lambda cls, *args, **kwargs: apply_function(cls, args, kwargs))


def apply_function(cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not any(isinstance(a, Value) for a in args):
        return apply_of(cls)(*args, **kwargs)
    lowering = registered(cls)
    if lowering is not None:
        return lowering(*args, **kwargs)
    args = tuple(_scalar_tensor(cls, a) for a in args)
    needs = [isinstance(a, Value) and a.expr.kind == "float" for a in args]
    context = Context(needs)
    if cls.setup_context is torch.autograd.Function.setup_context:
        output = cls.forward(context, *args, **kwargs)
    else:
        output = cls.forward(*args, **kwargs)
        cls.setup_context(context, args, output)
    several = isinstance(output, (tuple, list))
    outputs = tuple(output) if several else (output,)
    results = tuple(_with_slopes(cls, context, args, outputs, i) for i in range(len(outputs)))
    return results if several else results[0]


def apply_captured(
    forward: Callable[..., Any], backward: Callable[..., Any], args: tuple[Any, ...], changes_inputs: bool
) -> Any:
    """Result of a Function that Dynamo turned into two graphs: arguments to (outputs, saved), then
    gradients and saved to gradients."""

    class Captured(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            outputs, saved = forward(*args)
            if changes_inputs:
                ctx.mark_dirty(*args)
            ctx.save_for_backward(*saved)
            return outputs

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return backward(*grads, *ctx.saved_tensors)

    return apply_function(Captured, args, {})


def _scalar_tensor(cls: Any, arg: Any) -> Any:
    """0-d captured tensors take part as traced values; a larger one would lose its custom gradient."""
    if not is_real(arg):
        return arg
    with without_functions():
        if arg.ndim == 0:
            return coerce(arg)
        if arg.requires_grad:
            raise current().error(
                given=f"{cls.__name__}.apply with a tensor of shape {tuple(arg.shape)} that requires grad",
                expected="single values: the custom backward is honoured for those",
                fix="index the tensor first and pass the element",
            )
    return arg


def _with_slopes(
    cls: Any, context: Context, args: tuple[Any, ...], outputs: tuple[Any, ...], which: int
) -> Any:
    output = outputs[which]
    if not isinstance(output, Value) or output.expr.kind != "float":
        return output
    if output.dims or any(isinstance(a, Value) and a.dims for a in args):
        raise current().error(
            f"{cls.__name__}.apply on vectors", "single values", "index or reduce the vectors before apply"
        )
    units = [Value(expr.const(float(i == which)), (), torch.float32) for i in range(len(outputs))]
    slopes = cls.backward(context, *units)
    slopes = slopes if isinstance(slopes, (tuple, list)) else (slopes,)
    pairs = zip(args, slopes, context.needs_input_grad, strict=False)
    declared = [
        (arg.expr, coerce(slope).expr) for arg, slope, needed in pairs if needed and slope is not None
    ]
    if not declared:
        return made(expr.apply("detach", output.expr), (), output.dtype_or_none)
    node, *others = (
        expr.apply("with_grad", expr.const(0.0) if i else output.expr, *pair)
        for i, pair in enumerate(declared)
    )
    for other in others:
        node = expr.apply("add", node, other)
    return made(node, (), output.dtype_or_none)
