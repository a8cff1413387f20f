"""Casts, new constants and attributes of traced values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fa4flex.codegen import expr
from fa4flex.codegen.trace.build import DEFAULT_DTYPE, coerce, elementwise, kind_of, made, static_int
from fa4flex.codegen.trace.elementwise import Builder
from fa4flex.codegen.trace.narrow import WRAPPING, narrowed
from fa4flex.codegen.trace.paths import Guard, Path
from fa4flex.codegen.trace.state import current
from fa4flex.codegen.trace.value import Dim, Shape, Value, is_number, is_real
from fa4flex.codegen.trace.vectors import reverse_dims

_ROUNDING = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}


def same_default_dtype() -> Guard:
    """Guard that torch's default dtype is what it is now: tensors that mods make have it; mods may ask."""
    return Guard("is", Path(None, "constant", torch).result("get_default_dtype"), torch.get_default_dtype())


# --- casts ------------------------------------------------------------------------------------------


def cast(input: Any, dtype: torch.dtype, literal: bool = True) -> Value:
    """`input` as torch would convert it; `_to_float` says what that means at the computation's precision."""
    x = coerce(input)
    kind = kind_of(dtype)
    if kind == "float":
        return Value(*_to_float(x, dtype, literal))
    node = expr.apply(f"to_{kind}", x.expr)
    if dtype not in WRAPPING or x.dtype_or_none is dtype:
        return made(node, x.dims, dtype, x.wraps and dtype is torch.int32)
    return made(narrowed(node, dtype), x.dims, dtype, dtype is torch.int32)


def _to_float(x: Value, dtype: torch.dtype, literal: bool) -> tuple[Any, ...]:
    """Narrowing rounds; widening does not.

    float32 is the computation's precision for most inputs and narrower than it for float64 ones, where the
    mod's own `.to(score.dtype)` must not round: once the mod has read that dtype, float32 means it.
    """
    state = current()
    exact = x.expr.kind != "float" or x.expr.op == "load"
    stored = x.dtype_or_none if x.expr.op == "load" else None
    if stored is not None and kind_of(stored) == "float":
        exact = torch.promote_types(stored, dtype) == dtype
    node = expr.to_float(x.expr)
    if dtype in (torch.float16, torch.bfloat16) and (not exact or x.expr.kind != "float"):
        node = expr.round_to(_ROUNDING[dtype], node)
    elif dtype is torch.float32 and not exact and literal and not state.compute_dtype_read:
        node = expr.round_to("float32", node)
    elif dtype not in (*_ROUNDING, torch.float64):
        raise state.error(
            f"a conversion to {dtype}", "float16, bfloat16, float32 or float64", "convert outside the mod"
        )
    state.record(node)
    return node, x.dims, dtype


def to(input: Any, *args: Any, **kwargs: Any) -> Value:
    """Tensor.to in all its forms; devices and memory formats mean nothing to a traced value."""
    for arg in (*args, kwargs.get("dtype"), kwargs.get("other")):
        if isinstance(arg, torch.dtype):
            return cast(input, arg)
        if isinstance(arg, (Value, Tensor)):
            return type_as(input, arg)
    return coerce(input)


def type_as(input: Any, other: Any) -> Value:
    like = coerce(other)
    return cast(input, like.dtype_or_none or torch.float32, literal=is_real(other))


def type_(input: Any, dtype: Any = None) -> Any:
    if dtype is None:
        name = _representative(coerce(input), "type").type()
        device = current().device.type
        return name if device == "cpu" else name.replace("torch.", f"torch.{device}.")
    if isinstance(dtype, str):
        dtype = {"torch.FloatTensor": torch.float32, "torch.LongTensor": torch.int64}.get(dtype, dtype)
    if not isinstance(dtype, torch.dtype):
        raise current().error(f".type({dtype!r})", "a torch.dtype", "use .to(torch.float32) or similar")
    return cast(input, dtype)


def _cast_to(dtype: torch.dtype) -> Builder:
    return lambda input, *memory_format: cast(input, dtype)


# --- new constants ----------------------------------------------------------------------------------


def _filled(value: Any, size: Any, dtype: torch.dtype | None) -> Value:
    sizes = [size] if not isinstance(size, (tuple, list)) else size
    extents = [static_int(s, "a shape") for s in sizes]
    dims = tuple(Dim(None, 1) if n == 1 else Dim(current().fresh_axis(), n) for n in extents)
    x = coerce(value)
    result = x if dtype is None else cast(x, dtype)
    return Value(result.expr, dims, dtype or _dtype(result))


def _dtype(x: Value) -> torch.dtype:
    return x.dtype_or_none or DEFAULT_DTYPE[x.expr.kind]


def _new_filled(value: int) -> Builder:
    def build(input: Any, *size: Any, dtype: torch.dtype | None = None, **layout: Any) -> Value:
        shape = layout.get("size", size[0] if len(size) == 1 else size)
        return _filled(value, shape, dtype or _dtype(coerce(input)))

    return build


def new_full(
    input: Any, size: Any, fill_value: Any, *, dtype: torch.dtype | None = None, **layout: Any
) -> Value:
    return _filled(fill_value, size, dtype or _dtype(coerce(input)))


def new_tensor(input: Any, data: Any, *, dtype: torch.dtype | None = None, **layout: Any) -> Value:
    if isinstance(data, (list, tuple)):
        raise current().error("new_tensor of a list", "a single number", "build the tensor outside the mod")
    return _filled(data, (), dtype or _dtype(coerce(input)))


def full_like(input: Any, fill_value: Any, *, dtype: torch.dtype | None = None, **layout: Any) -> Value:
    x = coerce(input)
    return _filled(fill_value, [d.extent for d in x.dims], dtype or _dtype(x))


def tensor(data: Any, *, dtype: torch.dtype | None = None, **layout: Any) -> Value:
    """torch.tensor(number): a 0-d tensor that is still a run-time number."""
    if isinstance(data, (list, tuple)):
        raise current().error("torch.tensor of traced values", "numbers", "use torch.stack([...])")
    return _filled(data, (), dtype)


# --- attributes -------------------------------------------------------------------------------------


def _dtype_attribute(x: Value) -> torch.dtype:
    if x.expr.kind == "float" and x.expr.op != "load":
        current().compute_dtype_read = True
    return _dtype(x)


def _representative(x: Value, name: str) -> Tensor:
    """A 0-d tensor of the dtype of `x`, which answers alike where neither contents nor gradients matter."""
    if x.dims or (name in _OF_GRADIENTS and x.expr.kind == "float"):
        raise current().error(
            given=f".{name} of `{x.expr}`, which stands for one tensor a (query, key) pair",
            expected="questions whose answer is the same for every pair and every caller",
            fix="ask a captured tensor, or outside the mod",
        )
    return torch.zeros((), dtype=_dtype_attribute(x), device="cpu")


_OF_GRADIENTS = ("requires_grad", "grad")


def _property(name: str) -> Builder:
    return lambda x: getattr(_representative(x, name), name)


def _method(name: str) -> Builder:
    return lambda input, *args, **kwargs: getattr(_representative(coerce(input), name), name)(*args, **kwargs)


def _on(*types: str) -> Builder:
    return lambda x: current().device.type in types


_DEVICES = ("cpu", "cuda", "xpu", "mps", "ipu", "xla", "mtia", "maia", "vulkan", "meta")
_PROPERTIES = (
    "requires_grad", "grad", "itemsize", "nbytes", "is_sparse", "is_sparse_csr", "is_quantized", "is_mkldnn",
    "is_nested",
)  # fmt: skip
_METHODS = (
    "element_size", "is_signed", "is_contiguous", "stride", "storage_offset", "is_conj", "is_neg",
    "is_inference", "is_distributed",
)  # fmt: skip

ATTRIBUTES: dict[str, Builder] = {
    "dtype": _dtype_attribute,
    "device": lambda x: current().device,
    "shape": lambda x: Shape(d.size for d in x.dims),
    "ndim": lambda x: len(x.dims),
    "T": reverse_dims, "mT": reverse_dims,
    "layout": lambda x: torch.strided, **{f"is_{device}": _on(device) for device in _DEVICES},
    **{name: _property(name) for name in _PROPERTIES},
    "data": lambda x: elementwise("detach", x) if x.expr.kind == "float" else x,
    "real": lambda x: x,
}  # fmt: skip


def size(input: Any, dim: Any = None) -> Any:
    shape = Shape(d.size for d in coerce(input).dims)
    return shape if dim is None else shape[static_int(dim, "a dimension")]


def numel(input: Any) -> Any:
    return Shape(d.size for d in coerce(input).dims).numel()


def _reads(name: str) -> Builder:
    def build(input: Any, *args: Any, **kwargs: Any) -> Any:
        raise current().error(
            given=f".{name}() of `{coerce(input).expr}`, whose value differs for every (query, key) pair",
            expected="tensor operations on traced values",
            fix="keep it a tensor; choose with torch.where",
        )

    return build


def _shape_of_data(*args: Any, **kwargs: Any) -> Any:
    raise current().error(
        given="a tensor whose shape depends on a traced value",
        expected="shapes known before the kernel runs",
        fix="use Python ints for shapes; build tables outside the mod",
    )


DTYPES: dict[str, Builder] = {
    **dict.fromkeys(("zeros", "ones", "empty", "arange", "linspace", "eye", "tril", "triu"), _shape_of_data),
    "to": to, "type": type_, "type_as": type_as, "cpu": to,
    "cuda": lambda input, *args, **kwargs: coerce(input),
    "float": _cast_to(torch.float32), "double": _cast_to(torch.float64), "half": _cast_to(torch.float16),
    "bfloat16": _cast_to(torch.bfloat16), "int": _cast_to(torch.int32), "long": _cast_to(torch.int64),
    "bool": _cast_to(torch.bool), "short": _cast_to(torch.int16), "char": _cast_to(torch.int8),
    "byte": _cast_to(torch.uint8), "_to_copy": to,
    "new_zeros": _new_filled(0), "new_ones": _new_filled(1), "new_full": new_full, "new_tensor": new_tensor,
    "zeros_like": lambda input, *, dtype=None, **layout: full_like(input, 0, dtype=dtype),
    "ones_like": lambda input, *, dtype=None, **layout: full_like(input, 1, dtype=dtype),
    "full_like": full_like,
    "tensor": tensor, "as_tensor": tensor, "asarray": tensor,
    "scalar_tensor": lambda s, **k: tensor(s, dtype=k.get("dtype")),
    "full": lambda size, fill_value, *, dtype=None, **layout: _filled(fill_value, size, dtype),
    "size": size, "dim": lambda input: len(coerce(input).dims),
    "ndimension": lambda input: len(coerce(input).dims),
    "numel": numel, "nelement": numel,
    "is_floating_point": lambda input: coerce(input).expr.kind == "float", "is_complex": lambda input: False,
    **{name: _method(name) for name in _METHODS},
    **{name: _reads(name) for name in ("item", "tolist", "numpy", "data_ptr", "nonzero", "is_nonzero")},
}  # fmt: skip
_FACTORIES = frozenset(("tensor", "as_tensor", "asarray", "scalar_tensor", "full"))


def makes_value(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if torch.tensor, torch.full, ... is given one captured number, which then stays symbolic."""
    if name not in _FACTORIES:
        return False
    filling = (
        args[1] if name == "full" and len(args) > 1 else kwargs.get("fill_value", args[0] if args else None)
    )
    whole = name != "full" or tuple(args[0] if args else kwargs.get("size", (0,))) == ()
    return whole and is_number(filling)
