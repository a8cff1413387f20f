"""State of one attempt at a trace: slots, origins, fresh axis names, and the numbers the code looked at."""

from __future__ import annotations

import threading
from collections.abc import Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch
from torch import Tensor

from fa4flex.codegen.expr import Expr, apply, const, reduce, substitute, sym
from fa4flex.codegen.trace.captures import Captures, Recipe, Seen
from fa4flex.codegen.trace.origin import user_line
from fa4flex.codegen.trace.paths import Path
from fa4flex.errors import Origin, TraceError
from fa4flex.torch_internals import without_functions


@dataclass(frozen=True)
class Derived:
    """A tensor made while tracing: what makes it again (None when it is free of captured tensors), and its
    elements, a Value: an expression of those of captured tensors, where they are one."""

    tensor: Tensor
    recipe: Recipe | None
    elements: Any = None


@dataclass
class State:
    """One attempt at tracing one function; `boundary` is the code above which no line is the user's mod."""

    captures: Captures
    boundary: CodeType
    device: torch.device = torch.device("cpu")
    found: dict[int, tuple[Tensor, str, Path]] = field(default_factory=dict)
    """Captured tensors by id: with their names in the user's code, and where they were found."""
    numbers: dict[str, tuple[int | float, Path]] = field(default_factory=dict)
    """Captured numbers, and extents of captured tensors, by name."""
    constant: Container[str] = ()
    freeze: bool = False
    """Extents with names in `constant` are constants of the trace; all are, if `freeze`."""
    place: Origin | None = None
    """The user's line, where the running code is a graph that was made of it."""
    opaque: str | None = None
    """A captured tensor that was met and whose path is not known; None if there is none."""
    seen: dict[int, set[Seen]] = field(default_factory=dict)
    """Dependences of the trace on captured tensors, by the tensors' ids."""
    made: dict[int, Derived] = field(default_factory=dict)
    """Tensors made while tracing, by id."""
    origins: dict[Expr, Origin] = field(default_factory=dict)
    looked_at: dict[str, tuple[int | float, Origin | None]] = field(default_factory=dict)
    """Run-time numbers whose value the code needed, by name: their value, and where."""
    first_error: TraceError | None = None
    """Kept because libraries may swallow an exception raised inside a protocol method."""
    compute_dtype_read: bool = False
    cut_axes: set[str] = field(default_factory=set)
    """Axes that cover part of a dimension: a negative index into them is not one into the tensor."""
    _owner: dict[str, tuple[int, int]] = field(default_factory=dict)
    _bound: dict[tuple[Expr, str], str] = field(default_factory=dict)
    _axes: int = 0
    extents: dict[str, Any] = field(default_factory=dict)
    """Extents of captured tensors as run-time numbers, by name."""
    _named: dict[tuple[int, int], str] = field(default_factory=dict)

    def fresh_axis(self) -> str:
        self._axes += 1
        return f"r{self._axes - 1}"

    def axis_of(self, tensor: Tensor, dimension: int) -> str:
        """A fresh axis that runs over a dimension of `tensor`."""
        axis = self.fresh_axis()
        self._owner[axis] = id(tensor), dimension
        return axis

    def meet(self, tensor: Tensor) -> None:
        """Notice a tensor that was neither made by the mod nor found among its captures."""
        if id(tensor) not in self.found and id(tensor) not in self.made:
            self.opaque = self.opaque or f"a tensor of shape {tuple(tensor.shape)} from a place unknown"

    def see(self, tensor: int, what: Seen) -> None:
        """The trace depends on this of the tensor with that id."""
        self.seen.setdefault(tensor, set()).add(what)

    def owner(self, axis: str | None) -> tuple[int, int] | None:
        """The id of the tensor, and the dimension of it, that `axis` runs over."""
        return None if axis is None else self._owner.get(axis)

    def extent(self, tensor: int, dimension: int) -> str | None:
        """The name in `numbers` of an extent of the captured tensor with that id, which may vary; None for
        other tensors, and where it is a constant of the trace."""
        if tensor in self.made or tensor not in self.found:
            self._measure(tensor, dimension)
            return None
        captured, name, path = self.found[tensor]
        here = self._named.get((tensor, dimension))
        if here is None:
            here = f"{name}.shape[{dimension}]"
            here += "#" * sum(other.startswith(here) for other in self._named.values())
            self._named[tensor, dimension] = here
            with without_functions():
                self.numbers[here] = captured.shape[dimension], path.extent(dimension)
        if self.freeze or here in self.constant:
            self.see(tensor, dimension)
            return None
        return here

    def measure(self, axis: str | None) -> None:
        """The trace depends on the extent of the dimension that `axis` runs over."""
        if axis not in self._owner:
            return
        self._measure(*self._owner[axis])

    def _measure(self, owner: int, dimension: int) -> None:
        self.see(owner, dimension)
        derived = self.made.get(owner)
        for base in () if derived is None or derived.recipe is None else derived.recipe.bases():
            for other in range(base.dim()):
                self.see(id(base), other)

    def where(self) -> Origin | None:
        return self.place or user_line(self.boundary, depth=2)

    def error(self, given: str, expected: str, fix: str) -> TraceError:
        """A TraceError at the user's current line, remembered in case a library swallows it."""
        error = TraceError(given, expected, fix, self.where())
        self.first_error = self.first_error or error
        return error

    def record(self, root: Expr) -> None:
        """Give every node under `root` that is new the user's current line."""
        if root in self.origins:
            return
        line = self.where()
        stack = [root]
        while line is not None and stack:
            node = stack.pop()
            if node not in self.origins:
                self.origins[node] = line
                stack.extend(node.args)

    def fold(self, how: str, axis: str, extent: int, body: Expr) -> Expr:
        """`body` reduced over `axis`, under a name that no live value uses.

        Substituting an index for a free axis then never reaches into a reduction already made.
        """
        name = self._bound.get((body, axis))
        if name is None:
            name = self._bound[body, axis] = self.fresh_axis()
        if extent == 0:
            return _fold_nothing(self, how, body)
        return reduce(how, name, extent, substitute(body, {sym(axis): sym(name)}))

    def look(self, numbers: dict[str, int | float]) -> None:
        """The code needs these run-time numbers now: they become constants of the trace."""
        for name, value in numbers.items():
            argument = self.numbers[name][0]
            if isinstance(argument, (torch.SymInt, torch.SymFloat)):
                type(value)(argument)  # torch guards it
            self.looked_at.setdefault(name, (value, self.where()))


def _fold_nothing(state: State, how: str, body: Expr) -> Expr:
    if how in ("max", "min"):
        raise state.error(f"{how} of an empty vector", "at least one element", "check the tensor's shape")
    if how in ("any", "all"):
        return const(how == "all")
    return apply("to_float" if body.kind == "float" else "to_int", const(int(how == "prod")))


_running = threading.local()


def current() -> State:
    """The attempt that is running in this thread."""
    stack: list[State] = getattr(_running, "stack", [])
    if not stack:
        raise TraceError(
            given="a traced value was used after its mod returned",
            expected="values of b, h, q_idx, kv_idx and score used inside the mod only",
            fix="do not store them outside the mod",
            where=user_line(),
        )
    return stack[-1]


@contextmanager
def running(state: State) -> Iterator[State]:
    stack: list[State] = _running.__dict__.setdefault("stack", [])
    stack.append(state)
    try:
        yield state
    finally:
        stack.pop()
