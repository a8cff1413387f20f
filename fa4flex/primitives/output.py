"""Output functions: functions of one element of the normalised output and its indices. They chain with `>>`.

    out[b, h, q, d] = f(sum_k p[q, k] v[k, d], b, h, q, d)

The function is applied once, to the output that all keys have contributed to. A query without allowed keys
has output 0 before it, and f(0, ...) after it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fa4flex.errors import InputError, UnsupportedError
from fa4flex.primitives.base import CONTEXT, Family, FunctionMod, Mod, call_with, kind_of, positional, settle

OutputFunction = Callable[..., Any]


class OutputMod(Mod):
    """Base of all output functions: callable as `output_mod(out, b, h, q_idx, d_idx)`."""

    role, noun = "output_mod", "output function"
    combined_with = ">> (then)"
    __signature__ = positional("out", "b", "h", "q_idx", "d_idx")

    def __call__(self, out: Any, b: Any, h: Any, q_idx: Any, d_idx: Any, **context: Any) -> Any:
        raise NotImplementedError

    def __rshift__(self, other: Any) -> OutputMod:
        return OutputChain(self, as_output(other))

    def __rrshift__(self, other: Any) -> OutputMod:
        return OutputChain(as_output(other), self)


@dataclass(frozen=True, eq=False, repr=False)
class ModOutput(FunctionMod, OutputMod):
    """A function of the output as an output function."""

    def __call__(self, out: Any, b: Any, h: Any, q_idx: Any, d_idx: Any, **context: Any) -> Any:
        return call_with(self.mod, (out, b, h, q_idx, d_idx), self.context, context, self)


@dataclass(frozen=True, eq=False, repr=False)
class OutputChain(OutputMod):
    """`then(first(out))` at the same indices."""

    first: OutputMod
    then: OutputMod
    context: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        names = (*self.first.context, *self.then.context)
        object.__setattr__(self, "context", tuple(name for name in CONTEXT if name in names))

    @property
    def parts(self) -> tuple[Mod, ...]:
        return self.first, self.then

    def __call__(self, out: Any, b: Any, h: Any, q_idx: Any, d_idx: Any, **context: Any) -> Any:
        out = call_with(self.first, (out, b, h, q_idx, d_idx), self.first.context, context)
        return call_with(self.then, (out, b, h, q_idx, d_idx), self.then.context, context)

    def __repr__(self) -> str:
        return f"({self.first!r} >> {self.then!r})"


def as_output(value: Any) -> OutputMod:
    """`value` as an OutputMod: one, a family of them (its defaults), or any function of the output.

    Raises InputError for anything else, masks and score mods included, and UnsupportedError for a function of
    kv_len: an output function knows no keys.
    """
    value = settle(value)
    if isinstance(value, Mod) and not isinstance(value, OutputMod):
        raise InputError(
            f"{value!r} was given as an output function",
            "a function output_mod(out, b, h, q_idx, d_idx), or one of fa4flex",
            f"pass it as {value.role}=: it is a function of pairs of a query and a key",
        )
    if not callable(value) or hasattr(value, "kv_num_blocks") or getattr(value, "role", "") == "blocks":
        raise InputError(
            f"{kind_of(value)} was given as an output function",
            "a function output_mod(out, b, h, q_idx, d_idx), or one of fa4flex",
            "capture a gate in a function: lambda out, b, h, q, d: out * torch.sigmoid(gate[b, h, q, d])",
        )
    mod = value if isinstance(value, OutputMod) else ModOutput(value)
    if "kv_len" in mod.context:
        raise UnsupportedError(
            f"{mod!r}, an output function of kv_len",
            "functions of out, b, h, q_idx, d_idx, q_len and num_heads",
            "capture the number of keys as a number or a tensor",
        )
    return mod


def output_family(make: Callable[..., OutputFunction]) -> Family[OutputMod]:
    """Decorator: a function from parameters to an output function becomes a variant: a family of them."""
    return Family(make, ModOutput)
