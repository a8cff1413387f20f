"""Traced values answer what tensors answer under torch.vmap, as in torch's flex_attention; or they raise."""

from __future__ import annotations

import collections.abc
import functools
import numbers
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask

import fa4flex
from fa4flex.codegen.trace import Captures, trace
from fa4flex.errors import TraceError

QUESTIONS: dict[str, Callable[[Any], Any]] = {
    "isinstance": lambda x: isinstance(x, Tensor),
    "isinstance of several": lambda x: isinstance(x, (int, Tensor)) and not isinstance(x, (int, float)),
    "is_tensor": torch.is_tensor,
    "type is": lambda x: type(x) is Tensor,
    "type in": lambda x: type(x) in (int, float),
    "class": lambda x: x.__class__ is Tensor,
    "issubclass": lambda x: issubclass(type(x), Tensor),
    "name of the type": lambda x: type(x).__name__ == "Tensor",
    "a number": lambda x: isinstance(x, numbers.Number),
    "a parameter": lambda x: isinstance(x, torch.nn.Parameter),
    "hashable": lambda x: isinstance(x, collections.abc.Hashable),
    "iterable": lambda x: isinstance(x, collections.abc.Iterable),
    "callable": callable,
    "hasattr": lambda x: hasattr(x, "dtype") and hasattr(x, "unsqueeze") and not hasattr(x, "window"),
    "getattr": lambda x: getattr(x, "window", 7) == 7,
    "is_floating_point": torch.is_floating_point,
    "method": lambda x: x.is_floating_point(),
    "is_complex": torch.is_complex,
    "dtype": lambda x: x.dtype is torch.int64,
    "dtype of": lambda x: x.dtype.is_floating_point,
    "ndim": lambda x: x.ndim == 0 and x.dim() == 0 and x.ndimension() == 0,
    "shape": lambda x: x.shape == () and x.size() == torch.Size([]) and isinstance(x.shape, torch.Size),
    "numel": lambda x: x.numel() == 1 and torch.numel(x) == 1,
    "device": lambda x: x.device.type == "cpu" and not x.is_cuda and x.is_cpu,
    "requires_grad": lambda x: x.requires_grad,
    "layout": lambda x: x.layout is torch.strided and not x.is_sparse,
    "stride": lambda x: x.stride() == (),
    "element_size": lambda x: x.element_size() == x.itemsize and x.nbytes == x.itemsize,
    "signed": lambda x: x.is_signed(),
    "contiguous": lambda x: x.is_contiguous(),
    "the same": lambda x: x is x and id(x) == id(x),
    "match": lambda x: _matched(x),
    "dispatch": lambda x: _dispatched(x),
}


def _matched(x: Any) -> bool:
    match x:
        case Tensor():
            return True
    return False


@functools.singledispatch
def _dispatched(x: Any) -> bool:
    return False


@_dispatched.register
def _(x: Tensor) -> bool:
    return True


@pytest.mark.parametrize("name", QUESTIONS)
@pytest.mark.parametrize("of", ["q", "float", "bool"])
def test_answers_are_those_of_torch(name: str, of: str) -> None:
    ask = QUESTIONS[name]

    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        x = {"q": q, "float": q * 0.5, "bool": q > k}[of]
        return (q >= k) if ask(x) else (q < k)

    if (name, of) == ("requires_grad", "float"):  # it differs by caller
        with pytest.raises(TraceError, match="requires_grad"):
            fa4flex.compile(mask=mask)(*[torch.randn(1, 1, 9, 8) for _ in range(3)])
        return

    expected = create_mask(mask, None, None, 9, 9, device="cpu")[0, 0]
    found = fa4flex.compile(mask=mask).mask.tile_map(9, 9, (1, 1)).classes()[0, 0].ne(0)
    assert torch.equal(found, expected)


def _asked(name: str, x: Any) -> Any:
    """The answer to an attribute, or to a method without arguments."""
    found = getattr(x, name)
    return found() if callable(found) else found


def _in_vmap(name: str, x: Tensor) -> Any:
    answers = []

    def mod(x: Any) -> Any:
        answers.append(_asked(name, x))
        return x

    torch.vmap(mod)(x)
    return answers[0]


SKIPPED = frozenset((
    # What they do, rather than what they answer, matters; or they are of Python's objects.
    "share_memory_", "backward", "__init__", "__new__", "__init_subclass__", "__subclasshook__", "__class__",
    "__dict__", "__weakref__", "__doc__", "__module__", "__annotations__", "__hash__", "__repr__", "__str__",
    "__dir__", "__sizeof__", "__reduce__", "__getstate__", "__reduce_ex__", "__setstate__", "__delattr__",
    "__setattr__", "__getattribute__", "__format__", "retain_grad", "_cdata", "__torch_dispatch__",
    "__torch_function__", "detach_", "requires_grad_", "__array_priority__", "_make_subclass", "data_ptr",
    "_make_dtensor", "_make_wrapper_subclass", "__dlpack__", "storage", "_typed_storage", "untyped_storage",
    "_update_names", "names", "_view_func", "_view_func_unsafe", "_rev_view_func_unsafe",
))  # fmt: skip


ANSWERS: list[Any] = []


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("of", ["int", "float"])
def test_every_attribute_of_a_tensor_answers_as_torch_or_raises_in_words(of: str) -> None:
    x = torch.arange(3) if of == "int" else torch.rand(3)
    wrong, right = [], []
    for name in sorted(set(dir(Tensor)) - SKIPPED):
        try:
            expected = _in_vmap(name, x)
        except Exception:
            continue  # torch has no answer either
        if callable(expected) or any(isinstance(leaf, Tensor) for leaf in (expected, *_items(expected))):
            continue  # an operation, rather than a question

        def mod(score: Any, b: Any, h: Any, q: Any, k: Any, name: str = name) -> Any:
            _note(_asked(name, q if of == "int" else score))
            return score

        ANSWERS.clear()
        try:
            trace(mod, "score", Captures())
        except TraceError as error:
            assert "expected:" in str(error), name
            continue
        (right if ANSWERS[-1] == expected else wrong).append((name, expected, ANSWERS[-1]))
    assert not wrong
    assert {"dtype", "dim", "is_floating_point", "is_contiguous", "layout"} <= {name for name, *_ in right}


def _items(x: Any) -> Any:
    return x if isinstance(x, (tuple, list)) else ()


def _note(x: Any) -> None:
    getattr(sys.modules[__name__], "ANSWERS").append(x)  # noqa: B009 - the list itself, not a copy of it
