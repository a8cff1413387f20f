"""Questions that code asks of captured tensors, whose answers are no tensors: sizes, dtype, device, ...

Sizes are run-time numbers, as captured numbers are. Other answers are constants of the trace, with guards on
what decides them; an answer that nothing decides that a guard could watch makes the trace serve one call.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from fa4flex.codegen.trace.captures import Seen
from fa4flex.codegen.trace.state import current
from fa4flex.codegen.trace.value import Number, Shape, extent_of, scalar_of

_DECIDED: dict[str, Seen] = {
    **dict.fromkeys(
        ("dtype", "dim", "ndim", "ndimension", "is_floating_point", "is_complex", "is_signed", "itemsize",
         "element_size", "is_conj", "is_neg", "is_inference"),
        "element",
    ),
    **dict.fromkeys(
        ("device", "get_device", "is_cuda", "is_cpu", "is_xpu", "is_mps", "is_meta", "is_xla", "is_mtia"),
        "device",
    ),
    "requires_grad": "grad",
    **dict.fromkeys(
        ("layout", "is_sparse", "is_nested", "is_quantized", "is_sparse_csr", "is_mkldnn"), "all"
    ),
}  # fmt: skip
"""Questions by what decides the answer: dtype and rank ("element"), device, requires_grad, or layout."""


def answer(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The answer of the captured tensor args[0]; None where it is no question about sizes."""
    ask = _SIZES.get(name)
    return None if ask is None else ask(*args, **kwargs)


def noted(name: str, tensor: Tensor) -> None:
    """Note what the answer to a question depends on."""
    state = current()
    what = _DECIDED.get(name)
    if what is None:
        state.see(id(tensor), "all")
        state.opaque = state.opaque or f"Tensor.{name} of a captured tensor"
    else:
        state.see(id(tensor), what)


def _shape(input: Tensor) -> Shape:
    current().see(id(input), "element")  # the rank
    return Shape(extent_of(id(input), d, size) for d, size in enumerate(input.shape))


def _size(input: Tensor, dim: Any = None) -> Any:
    return _shape(input) if dim is None else _shape(input)[scalar_of(dim)]


def _numel(input: Tensor) -> Any:
    return math.prod(_shape(input))


def _length(input: Tensor) -> int:
    """Python takes an int alone from __len__; `len` in the user's code comes to `length`."""
    return int(_shape(input)[0])


_SIZES: dict[str, Callable[..., Any]] = {
    "shape": _shape, "size": _size, "numel": _numel, "nelement": _numel, "__len__": _length,
    "nbytes": lambda input: _numel(input) * input.element_size(),
}  # fmt: skip


def length(x: Any) -> Any:
    """Stand-in for `len` while tracing: the length of a tensor is a run-time number."""
    return x.shape[0] if isinstance(x, Tensor) and x.ndim else len(x)


class _Asking(type):
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        alone = len(args) == 1 and not kwargs
        return args[0].__class__ if alone and _stands_in(args[0]) else type(*args, **kwargs)

    def __instancecheck__(cls, x: Any) -> bool:
        return isinstance(x, type)

    def __subclasscheck__(cls, x: Any) -> bool:
        return issubclass(x, type)


class kind(type, metaclass=_Asking):
    """Stand-in for `type` while tracing: traced values are torch.Tensors, run-time numbers ints or floats."""


def _stands_in(x: Any) -> bool:
    return type(x).__module__ == Number.__module__


_patching = threading.RLock()


@contextmanager
def asking_types(spaces: Sequence[dict[str, Any]]) -> Iterator[None]:
    """Within, code with these globals asks `kind` for types; nothing else can tell it from `type`."""
    if not spaces:
        yield
        return
    with _patching:
        ours = {id(space): space for space in spaces if "type" not in space}
        for space in ours.values():
            space["type"] = kind
        try:
            yield
        finally:
            for space in ours.values():
                del space["type"]
