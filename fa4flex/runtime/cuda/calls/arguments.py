"""Functions that follow from the rows of a schema (kernels/plan/arguments.py): a call's key, and its launch.

Both are printed as one expression and run at every call, where microseconds count: a loop over rows takes
several.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Any

from fa4flex.kernels.plan.arguments import Argument, Schema, Source
from fa4flex.kernels.plan.looks import Array, Captured, Heads, Number
from fa4flex.runtime.cuda.calls.conversions import Conversion, conversion
from fa4flex.runtime.cuda.calls.looks import array_look, heads_look, layout_key
from fa4flex.runtime.key_sources import KeySource


def key_function(schema: Schema, source: Source) -> Callable[[Any], tuple[Any, ...]]:
    """The function of a call, or of what a forward pass saved, that tells what its launch depends on: how
    tensors look, numbers by their text (0.0 equals -0.0), and the sign of the scale. Extents are left out,
    and so are q, k and v, which are looked at together (launch_cache.py)."""
    rows = [row for row in schema.found_in(source) if source == "saved" or not isinstance(row.look, Heads)]
    space = {"layout_key": layout_key, "heads_look": heads_look, "array_look": array_look}
    return _printed((_owner(rows[0]),), f"({', '.join(map(_key, rows))},)", space)


@lru_cache
def key_function_of(kind: type[KeySource]) -> Callable[[Any], tuple[Any, ...]]:
    """The same of a call whose keys are of such a source, besides k and v."""
    left_out = "k", "v", *kind.numbers
    fields = {name: f"call.kv.{name}" for name in kind._fields if name not in left_out}
    keys = "".join(f"{x if name in kind.values else _any_strides(x)}, " for name, x in fields.items())
    return _printed(("call",), f"({keys})", {})


def conversions_of(schema: Schema, **owners: Any) -> dict[str, Conversion]:
    """Conversions that arguments go through at every launch that looks like this one, by name; most arguments
    need none. owners: `call`, and in backward passes `saved`."""
    results = {}
    for row, owner, read in _readers(schema):
        if owner in owners:
            convert = conversion(row.look, read(owners[owner]))
            if convert is not None:
                results[row.name] = convert
    return results


@lru_cache
def _readers(schema: Schema) -> list[tuple[Argument, str, Callable[[Any], Any]]]:
    """Arguments with the owners that bring them, and what reads them there."""
    return [(row, _owner(row), attrgetter(row.path.partition(".")[2])) for row in schema.entry]


def launch_function(
    schema: Schema,
    launch: Callable[..., None],
    parameters: tuple[str, ...],
    constants: Mapping[str, Any],
    conversions: Mapping[str, Conversion],
) -> Callable[..., None]:
    """`launch` as a function of `parameters`. These are names of arguments, and of owners ("call", "saved"):
    arguments that are neither parameters nor constants are read from their fields, and converted."""
    space: dict[str, Any] = {"launch": launch}
    space |= {f"the_{name}": value for name, value in constants.items()}
    space |= {f"convert_{name}": convert for name, convert in conversions.items()}
    text = _launch(schema, parameters, tuple(constants), tuple(conversions))
    return _printed(parameters, text, space)


@lru_cache(maxsize=256)
def _launch(
    schema: Schema,
    parameters: tuple[str, ...],
    constants: tuple[str, ...],
    converted: tuple[str, ...],
) -> str:
    """The call of `launch` with all of its arguments."""

    def text(row: Argument) -> str:
        if row.name in parameters:
            return row.name
        if row.name in constants:
            return f"the_{row.name}"
        result = f"convert_{row.name}({row.path})" if row.name in converted else row.path
        if row.look == Captured("tensors"):  # an empty tuple cannot be an argument
            return f"{result} or None"
        return result

    return f"launch({', '.join(map(text, schema.entry))})"


def _owner(row: Argument) -> str:
    return row.source.partition(".")[0]


def _key(row: Argument) -> str:
    x = row.path
    match row.look:
        case Heads():
            return f"heads_look({x})"
        case Array(_, dims) if dims != ("q_heads",):
            return f"None if {x} is None else array_look({x})"
        case Captured("tensors"):
            return f"*[layout_key(x) for x in {x}]"
        case Captured("numbers"):
            return f"repr({x})"
        case Number():
            return f"{x} > 0"
    return f"None if {x} is None else layout_key({x})"


def _any_strides(x: str) -> str:
    return f"None if {x} is None else ({x}.dtype, {x}.get_device())"


def _printed(parameters: Sequence[str], expression: str, space: Mapping[str, Any]) -> Any:
    """The function of these parameters that computes `expression`, whose other names are those of `space`."""
    inner = f"lambda {', '.join(parameters)}: {expression}"
    return _evaluated(f"lambda {', '.join(space)}: {inner}")(*space.values())


@lru_cache(maxsize=256)
def _evaluated(text: str) -> Any:
    """The value of a text: compiling one takes longer than all else about a call of new lengths."""
    return eval(compile(text, "<fa4flex arguments>", "eval"), {})
