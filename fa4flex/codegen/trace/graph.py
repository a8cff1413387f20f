"""Mods that arrive as graphs: what torch.compile captured of a user's function.

Dynamo turns a mod into an FX graph and lifts everything that it closes over into inputs: tensors, ints (which
may be symbolic), floats as 0-d float64 tensors. Tracing runs the graph on proxies, as it runs a function.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from fa4flex.codegen.expr import sym
from fa4flex.codegen.trace.functions import apply_captured
from fa4flex.codegen.trace.paths import Guard, Path
from fa4flex.codegen.trace.state import current
from fa4flex.codegen.trace.traced import SIGNATURES, ModKind
from fa4flex.codegen.trace.value import Number, Value
from fa4flex.errors import Origin, TraceError
from fa4flex.primitives.base import positional
from fa4flex.torch_internals import HigherOrderOperator

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')
_NAME = re.compile(r"^l_|_$")


@dataclass(frozen=True, eq=False)
class StandIn:
    """A lifted input of a graph.

    tensor   a fake tensor of its shape and dtype; of a float, the 0-d tensor that carries it
    number   its value now, if it is an int; that of its `.item()`, if it carries a float
    symbol   the name of a length that it stands for ("q_len", ...), if it does
    position   among all that was lifted
    """

    position: int
    tensor: Tensor | None = None
    number: int | float | None = None
    symbol: str | None = None


class GraphFunction:
    """A graph as a mod: callable with the indices of its kind, inputs that were lifted bound to stand-ins."""

    context: tuple[str, ...] = ()

    def __init__(self, graph: fx.GraphModule, kind: ModKind, lifted: Sequence[StandIn]) -> None:
        self.graph, self.lifted = graph, tuple(lifted)
        self.positions: dict[str, int] = {}
        """Positions of lifted numbers by name."""
        self.indices = SIGNATURES[kind]
        self.__signature__ = positional(*self.indices)
        self.__name__ = f"{kind}_mod"

    def __call__(self, *indices: Any) -> Any:
        raise TypeError("a graph runs on proxies only")

    def lift(self, constant: set[str], freeze: bool) -> GraphLifting:
        """Its inputs as proxies; numbers named in `constant` stay plain numbers, all of them if `freeze`."""
        return GraphLifting(self, constant, freeze)


class GraphLifting:
    """Inputs of a graph as proxies; the counterpart of a Lifter."""

    opaque: str | None = None
    asking: tuple[dict[str, Any], ...] = ()
    grad_mode = False

    def __init__(self, function: GraphFunction, constant: set[str], freeze: bool) -> None:
        self.function = function
        self.constant, self.freeze = constant, freeze
        self.guards: list[Guard] = []
        self.tensors: dict[int, tuple[Tensor, str, Path]] = {}
        self.numbers: dict[str, tuple[int | float, Path]] = {}
        self.device: torch.device | None = None
        placeholders = [node for node in function.graph.graph.nodes if node.op == "placeholder"]
        names = [_NAME.sub("", str(node.target)) for node in placeholders[len(function.indices) :]]
        self._inputs = [self._input(x, name) for x, name in zip(function.lifted, names, strict=True)]

    def _input(self, given: StandIn, name: str) -> Any:
        path = Path(None, "lifted", given.position)
        if given.symbol is not None:
            return Value(sym(given.symbol), (), torch.int64)
        if given.tensor is None:
            assert given.number is not None
            return self._number(given.number, name, path)
        if given.number is not None:
            return _Carried(self._number(given.number, name, path))
        self.tensors[id(given.tensor)] = given.tensor, name, path
        self.device = self.device or given.tensor.device
        return given.tensor

    def _number(self, value: int | float, name: str, path: Path) -> Any:
        self.numbers[name] = value, path
        self.function.positions[name] = path.key
        return value if self.freeze or name in self.constant else Number(value, {name: value})

    def check_unchanged(self) -> None:
        """A graph has no side effects: Dynamo refuses them."""

    def run(self, *indices: Any) -> Any:
        """The graph's result on proxies."""
        graph = self.function.graph
        values: dict[fx.Node, Any] = {}
        inputs = iter((*indices, *self._inputs))
        for node in graph.graph.nodes:
            if node.op == "placeholder":
                values[node] = next(inputs)
            elif node.op == "output":
                (result,) = fx.node.map_arg(node.args, values.__getitem__)
                return result[0] if isinstance(result, (tuple, list)) else result
            else:
                values[node] = _run(graph, node, values)
        raise AssertionError("a graph has an output")


@dataclass(frozen=True)
class _Carried:
    """A float that came as a tensor: `.item()` gives it back."""

    number: Any


def _run(graph: fx.GraphModule, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    current().place = _origin(node)
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
    if node.op == "get_attr":
        return operator.attrgetter(str(node.target))(graph)
    if node.op == "call_module":
        return graph.get_submodule(str(node.target))(*args, **kwargs)
    if node.op == "call_method":
        if isinstance(args[0], _Carried) and node.target == "item":
            return args[0].number
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    assert callable(node.target)
    if node.target is torch.ops.higher_order.autograd_function_apply:
        forward, backward, *inputs = map(_plain, args)
        return apply_captured(forward, backward, tuple(inputs), bool(kwargs.get("dirty_idx")))
    if isinstance(node.target, HigherOrderOperator):
        raise TraceError(
            f"the operator {node.target} in a compiled mod",
            "one expression for all pairs",
            "choose with torch.where instead of control flow, and use plain torch operations",
            current().place,
        )
    return node.target(*[_plain(x) for x in args], **kwargs)


def _plain(x: Any) -> Any:
    return x.number if isinstance(x, _Carried) else x


def _origin(node: fx.Node) -> Origin | None:
    """The user's line that a node came from."""
    frames = _FRAME.findall(node.stack_trace or "")
    return Origin(frames[-1][0], int(frames[-1][1])) if frames else None
