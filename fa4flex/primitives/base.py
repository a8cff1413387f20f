"""What every primitive shares: calling a mod with the context it asks for, and families of mods.

A mod is an ordinary function of FlexAttention: `score_mod(score, b, h, q_idx, kv_idx)` or
`mask_mod(b, h, q_idx, kv_idx)`. It may also take parameters named `q_len`, `kv_len` (lengths of the
sequence at hand) and `num_heads` (query heads); they are passed by keyword to whoever asks.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

from fa4flex.errors import InputError

CONTEXT = ("q_len", "kv_len", "num_heads")


def accepted_context(mod: Callable[..., Any]) -> tuple[str, ...]:
    """Which of CONTEXT `mod` takes: what it declares as `.context`, else what its parameters are named."""
    declared = getattr(mod, "context", None)
    if isinstance(declared, tuple):
        return declared
    try:
        parameters = inspect.signature(mod).parameters
    except (TypeError, ValueError):
        return ()
    return tuple(name for name in CONTEXT if name in parameters)


def call_mod(mod: Callable[..., Any], indices: tuple[Any, ...], context: dict[str, Any]) -> Any:
    """`mod(*indices)` with the part of `context` that it asks for.

    Raises InputError when the mod needs a length that the caller did not give.
    """
    wanted = accepted_context(mod)
    missing = [name for name in wanted if name not in context]
    if missing:
        name = getattr(mod, "__name__", repr(mod))
        raise InputError(
            f"{name} was called without {', '.join(missing)}",
            f"{name}(b, h, q_idx, kv_idx, {', '.join(f'{n}=...' for n in wanted)})",
            f"pass the lengths, or fix them once: {name}.bind({', '.join(f'{n}=...' for n in wanted)})",
        )
    return mod(*indices, **{name: context[name] for name in wanted})


def positional(*names: str) -> inspect.Signature:
    """The signature of a function of these positional parameters."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Signature([inspect.Parameter(name, kind) for name in names])


def show(value: Any) -> str:
    """A parameter as it stands in a repr: tensors by dtype and shape, functions by name."""
    if isinstance(value, torch.Tensor):
        if value.numel() <= 8:
            return f"torch.tensor({value.tolist()}, dtype={value.dtype})"
        return f"<{str(value.dtype).removeprefix('torch.')}{list(value.shape)}>"
    if callable(value) and hasattr(value, "__name__"):
        return str(value.__name__)
    return repr(value)


P = TypeVar("P")


class Family(Generic[P]):
    """A named family of primitives: call it with parameters to get one; bare, it stands for its defaults.

    `sliding_window(1024)` is a mask, and `causal & sliding_window` means `causal() & sliding_window()`.
    """

    def __init__(
        self, make: Callable[..., Callable[..., Any]], wrap: Callable[[Callable[..., Any], str], P]
    ) -> None:
        functools.update_wrapper(self, make)
        self._make, self._wrap = make, wrap

    def __call__(self, *args: Any, **params: Any) -> P:
        try:
            inspect.signature(self._make).bind(*args, **params)
        except TypeError as error:
            signature = f"{self.__name__}{inspect.signature(self._make)}"
            raise InputError(
                f"{self.__name__} without the parameters that it needs: {error}",
                signature.split(" -> ")[0],
                f"call it before composing: {self.__name__}(...)",
            ) from None
        given = [show(a) for a in args] + [f"{k}={show(v)}" for k, v in params.items()]
        return self._wrap(self._make(*args, **params), f"{self.__name__}({', '.join(given)})")

    def __repr__(self) -> str:
        return str(self.__name__)

    __name__: str

    def __and__(self, other: Any) -> Any:
        return self() & other

    def __rand__(self, other: Any) -> Any:
        return other & self()

    def __or__(self, other: Any) -> Any:
        return self() | other

    def __ror__(self, other: Any) -> Any:
        return other | self()

    def __invert__(self) -> Any:
        return ~self()  # type: ignore[operator]

    def __rshift__(self, other: Any) -> Any:
        return self() >> other

    def __rrshift__(self, other: Any) -> Any:
        return other >> self()


def settle(value: Any) -> Any:
    """A bare family as the primitive of its defaults; anything else unchanged."""
    return value() if isinstance(value, Family) else value
