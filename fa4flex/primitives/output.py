"""Output functions: functions of one element of the normalised output and its indices. They chain with `>>`.

    out[b, h, q, d] = f(sum_k p[q, k] v[k, d], b, h, q, d)

The function is applied once, to the output that all keys have contributed to. A query without allowed keys
has output 0 before it, and f(0, ...) after it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fa4flex.errors import InputError, UnsupportedError
from fa4flex.primitives.base import Family, Mod, kind_of, positional, settle
from fa4flex.primitives.chains import Chainable, Chained, FunctionOfNumber

OutputFunction = Callable[..., Any]


class OutputMod(Chainable["OutputMod"]):
    """Base of all output functions: callable as `output_mod(out, b, h, q_idx, d_idx)`."""

    role, noun = "output_mod", "output function"
    __signature__ = positional("out", "b", "h", "q_idx", "d_idx")

    def __call__(self, out: Any, b: Any, h: Any, q_idx: Any, d_idx: Any, **context: Any) -> Any:
        raise NotImplementedError

    @staticmethod
    def _accepted(value: Any) -> OutputMod:
        return as_output(value)

    @staticmethod
    def _chained(first: Any, then: Any) -> OutputMod:
        return OutputChain(first, then)


@dataclass(frozen=True, eq=False, repr=False)
class ModOutput(FunctionOfNumber, OutputMod):
    """A function of the output as an output function."""


@dataclass(frozen=True, eq=False, repr=False)
class OutputChain(Chained, OutputMod):
    """`then(first(out))` at the same indices."""


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
