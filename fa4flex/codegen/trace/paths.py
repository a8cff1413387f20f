"""Paths: where a captured value was found, and the generated function that reads it there again.

A trace holds for another call when everything that it depends on is as it was. What may vary without a new
trace (contents of tensors, run-time numbers) is read anew along its path at each call; everything else that
the traced code could see stands in a guard. The function that does both is generated once per trace, as
straight-line Python: it runs at every call, in well under a microsecond per captured value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fa4flex.codegen.trace.snapshot import Opaque, snapshot

INT64 = 1 << 63


@dataclass(frozen=True, eq=False)
class Path:
    """A step from another path, or a root: an argument of the reader, or a constant object.

    kind is "root" (key: the argument's name), "constant" (key: the object), "attribute", "item", "cell" (key:
    the position in a function's closure), "result" (key: a method without arguments) or "extent" (key: a
    dimension of a tensor).
    """

    parent: Path | None
    kind: str
    key: Any

    def attribute(self, name: str) -> Path:
        return Path(self, "attribute", name)

    def item(self, key: Any) -> Path:
        return Path(self, "item", key)

    def cell(self, position: int) -> Path:
        return Path(self, "cell", position)

    def extent(self, dimension: int) -> Path:
        return Path(self, "extent", dimension)

    def result(self, method: str) -> Path:
        """Path of the result of a method without arguments."""
        return Path(self, "result", method)


def root(name: str) -> Path:
    """The path of an argument of the reader: "score" or "mask"."""
    return Path(None, "root", name)


class Guard(NamedTuple):
    """A condition on the value at `path` under which a trace holds. `kind` names a row of FAILS."""

    kind: str
    path: Path
    constant: Any = None


FAILS = {
    "is": "{x} is not {c}",
    "type": "type({x}) is not {c}",
    "code": "{x}.__code__ is not {c}",
    "length": "len({x}) != {c}",
    "keys": "tuple({x}) != {c}",
    "environment": "{x} != {c}",
    "absent": "{c} in {x}",
    "unset": "hasattr({x}, {c})",
    "value": "snapshot({x}) != {c}",
    "equal": "{x} is not {c} and (type({x}) is not type({c}) or {x} != {c})",
    "finite": "not -inf < {x} < inf",
    "int64": "not -int64 <= {x} < int64",
    "tensor": "type({x}) is not {c}",
    "dtype": "{x}.dtype is not {c}",
    "rank": "{x}.dim() != {c}",
    "extent": "{x}.shape[{c}[0]] != {c}[1]",
    "layout": "tuple({x}.shape) != {c} or {x}.layout is not strided",
    "device": "{x}.device != {c}",
    "grad": "{x}.requires_grad is not {c}",
    "same": "{x} is not {y}",
}
"""Python text that is true where a guard fails. {x} is the value, {c} the constant, {y} the value at a
second path, which the guard has for its constant."""

Reading = tuple[tuple[Tensor, ...], tuple[int | float, ...]]


class Reader(NamedTuple):
    """Three generated functions of a variant's functions, None for those that it does not have: `mods`.

    read(*mods) -> captured tensors and numbers as they are now; None if a guard fails.
    matching(tensors, numbers) -> a function of `mods`, true if the guards hold and these very tensors are
    captured now, and numbers of the same text (0.0 == -0.0 is true); false or None if not.
    tensors_with(numbers) -> a function of `mods` -> the tensors captured now, if the guards hold and the
    numbers have the same text; None if not.
    """

    read: Callable[..., Reading | None]
    matching: Callable[..., Callable[..., bool | None]]
    tensors_with: Callable[..., Callable[..., tuple[Tensor, ...] | None]]


_MISSES = (AttributeError, KeyError, IndexError, TypeError, ValueError, RuntimeError, Opaque)
"""Errors of a path that leads nowhere any more."""


def reader_of(
    roots: Sequence[str], guards: Sequence[Guard], tensors: Sequence[Path], numbers: Sequence[Path]
) -> Reader:
    """Functions of `roots` that check the guards in their order, and then read tensors and numbers, or
    compare them."""
    writer = _Writer()
    for guard in guards:
        writer.check(guard)
    held, told = ([writer.variable(path) for path in paths] for paths in (tensors, numbers))
    the_tensors = [f"{x} is t{i}" for i, x in enumerate(held)]
    the_numbers = [f"({x} is n{i} or repr({x}) == repr(n{i}))" for i, x in enumerate(told)]
    of_tensors = [f"{_tuple([f't{i}' for i in range(len(held))])} = tensors"] * bool(held)
    of_numbers = [f"{_tuple([f'n{i}' for i in range(len(told))])} = numbers"] * bool(told)
    both = " and ".join((*the_tensors, *the_numbers)) or "True"
    read = _function("read", roots, [*writer.lines, f"return {_tuple(held)}, {_tuple(told)}"])
    matches = _function("matches", roots, [*writer.lines, f"return {both}"])
    tensors_now = f"return {_tuple(held)} if {' and '.join(the_numbers) or 'True'} else None"
    result = _function("found", roots, [*writer.lines, tensors_now])
    lines = [
        *read,
        "def matching(tensors, numbers):",
        *_indented([*of_tensors, *of_numbers, *matches, "return matches"]),
        "def tensors_with(numbers):",
        *_indented([*of_numbers, *result, "return found"]),
    ]
    space = {**_NAMES, **writer.constants}
    exec(compile("\n".join(lines), "<fa4flex reader>", "exec"), space)
    return Reader(space["read"], space["matching"], space["tensors_with"])


def _function(name: str, roots: Sequence[str], body: list[str]) -> list[str]:
    """Lines of a function of `roots` that returns None where a path leads nowhere."""
    return [
        f"def {name}({', '.join(roots)}):",
        *_indented(["try:", *_indented(body), "except MISSES:", "    return None"]),
    ]


def _indented(lines: list[str]) -> list[str]:
    return [f"    {line}" for line in lines]


_NAMES: dict[str, Any] = {
    "MISSES": _MISSES, "Tensor": Tensor, "snapshot": snapshot, "strided": torch.strided,
    "inf": float("inf"), "int64": INT64,
}  # fmt: skip


def _tuple(names: list[str]) -> str:
    return f"({', '.join(names)}{',' * bool(names)})"


class _Writer:
    """Lines of a reader; each path that is needed gets a variable once, after that of its parent."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.constants: dict[str, Any] = {}
        self._variables: dict[Path, str] = {}
        self._by_step: dict[tuple[str, str], str] = {}

    def check(self, guard: Guard) -> None:
        x = self.variable(guard.path)
        second, constant = "", guard.constant
        if guard.kind == "same":
            second, constant = self.variable(constant), None
        constant = self._named(constant) if guard.kind == "equal" else self._constant(constant)
        line = f"if {FAILS[guard.kind].format(x=x, y=second, c=constant)}: return None"
        if line not in self.lines:
            self.lines.append(line)

    def variable(self, path: Path) -> str:
        """The variable that holds the value at `path`."""
        if path.kind == "root":
            return str(path.key)
        if path not in self._variables:
            self._variables[path] = self._constant(path.key) if path.parent is None else self._step(path)
        return self._variables[path]

    def _step(self, path: Path) -> str:
        assert path.parent is not None
        parent = self.variable(path.parent)
        text = parent + self._access(path)
        # Two Path objects may say the same.
        known = self._by_step.get((parent, text))
        if known is not None:
            return known
        name = self._by_step[parent, text] = f"v{len(self._by_step)}"
        self.lines.append(f"{name} = {text}")
        return name

    def _access(self, path: Path) -> str:
        if path.kind == "attribute":
            plain = path.key.isidentifier()
            return f".{path.key}" if plain else f".__dict__[{self._constant(path.key)}]"
        if path.kind == "result":
            return f".{path.key}()"
        if path.kind == "extent":
            return f".shape[{path.key}]"
        if path.kind == "cell":
            return f".__closure__[{path.key}].cell_contents"
        return f"[{self._constant(path.key)}]"

    def _constant(self, value: Any) -> str:
        if value is None or type(value) in (bool, int, str):
            return repr(value)
        return self._named(value)

    def _named(self, value: Any) -> str:
        name = f"c{len(self.constants)}"
        self.constants[name] = value
        return name
