"""A function under torch.compile, and its graphs, which repeated calls enter past Dynamo.

Dynamo compares some 250 conditions before a graph runs, most of them on torch's own modules and classes. Of a
call that looks just like an earlier one, whoever kept that has compared what may differ already.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fa4flex.errors import Fa4flexError
from fa4flex.runtime.flex.fitting import compile_to_fit
from fa4flex.torch_internals import (
    GlobalStateGuard,
    function_modes,
    inductor,
    past_dynamo,
    saving_by_graphs,
    stance,
)

Outputs = tuple[Tensor, Tensor | None, Tensor | None]
"""out, lse and max_scores, None where not asked for."""

Attend = Callable[..., Outputs]


class Run(NamedTuple):
    """One run of a graph that Inductor compiled: its inputs and results, as Dynamo handed them over."""

    graph: Callable[..., Sequence[Any]]
    inputs: tuple[Any, ...]
    results: Sequence[Any]


_importing = threading.Lock()
"""Held while torch imports its compiler, which fails where two threads begin at the same time."""


class Compiled:
    """`function` under torch.compile. Where it does not compile `fallback` takes its place, with a warning.

    On a CPU there may be no compiler; None on a GPU: the error is the caller's.
    """

    def __init__(
        self, function: Attend, options: dict[str, Any] | None, fallback: Callable[[], Attend] | None
    ) -> None:
        self._options = options
        self._watched = threading.local()
        """`runs`, a list that runs of the thread at hand enter; absent where nobody watches."""
        with _importing:
            compiled: Attend = torch.compile(function, fullgraph=True, backend=self._compile)
        self._chosen: tuple[Attend, Callable[[], Attend] | None] = compiled, fallback

    def __call__(self, *arguments: Any) -> Outputs:
        chosen, fallback = self._chosen
        try:
            return chosen(*arguments)
        except Exception as error:
            if fallback is None:
                ours = getattr(error, "inner_exception", None)  # Dynamo's error is around it
                if isinstance(ours, Fa4flexError):
                    raise ours from error
                raise
            _warn_of(error)
            other = fallback()
            self._chosen = other, None
            return other(*arguments)

    def watched(self, *arguments: Any) -> tuple[Outputs, Run | None]:
        """The same, and the run of the one graph that computed it; None where there was none, or several."""
        runs: list[Run] = []
        self._watched.runs = runs
        try:
            result = self(*arguments)
        finally:
            del self._watched.runs
        return result, runs[0] if len(runs) == 1 else None

    def _compile(self, module: Any, examples: Any) -> Callable[..., Any]:
        """Inductor, as a backend of Dynamo's."""
        graph = inductor()(module, examples, inner_compile=compile_to_fit, config_patches=self._options)
        inner = past_dynamo(graph)  # Dynamo keeps out of `run`, and so of all that it calls

        def run(*inputs: Any) -> Any:
            result, runs = inner(*inputs), getattr(self._watched, "runs", None)
            if runs is not None:
                runs.append(Run(graph, inputs, result))
            return result

        return run


def _warn_of(error: Exception) -> None:
    lines = str(error).strip().splitlines()
    warnings.warn(
        "torch could not compile flex_attention on this CPU; it runs uncompiled, as a dense reference: "
        f"{lines[0] if lines else type(error).__name__}",
        stacklevel=3,
    )


class Graph:
    """A graph that Inductor compiled, for tensors that look like those that it ran with. Where these need
    gradients it ends in AOTAutograd's function, which puts itself into autograd's graph at each call.

    Whoever calls it has compared these looks. What else Dynamo compares, `holds` does: autocast, grad mode,
    determinism, precision of products and the like, at once; that no function mode is there, and no hook of
    saved tensors that would be compiled; and the stance of torch.compile.
    """

    __slots__ = "_constants", "_graph", "_inputs", "_outputs", "_stance", "_state"

    def __init__(
        self, graph: Callable[..., Any], constants: tuple[Any, ...], inputs: list[int], outputs: list[int]
    ) -> None:
        self._graph, self._constants = graph, constants
        self._inputs, self._outputs = itemgetter(*inputs), itemgetter(*outputs)
        self._state = GlobalStateGuard()
        self._stance = stance()

    @staticmethod
    def of(run: Run, arguments: tuple[Tensor | None, ...], result: Outputs) -> Graph | None:
        """The graph of a run that was `given` these tensors and had these results.

        None where the graph has an input or a result that is none of these, or where a tensor is given twice:
        it could not be told which of the two an input is. Inputs that are sizes are those of the tensors.
        """
        present = [x for x in arguments if x is not None]
        places = {id(x): i for i, x in enumerate(arguments) if x is not None}
        sizes = tuple([x for x in run.inputs if type(x) is int])
        results = {id(x): i for i, x in enumerate(run.results)}
        known = all(type(x) is int or id(x) in places for x in run.inputs)
        if len(places) != len(present) or not known or not all(x is None or id(x) in results for x in result):
            return None
        if GlobalStateGuard is None or function_modes() or saving_by_graphs():
            return None
        of_sizes = iter(range(len(arguments), len(arguments) + len(sizes)))
        inputs = [next(of_sizes) if type(x) is int else places[id(x)] for x in run.inputs]
        outputs = [-1 if x is None else results[id(x)] for x in result]
        return Graph(run.graph, sizes, inputs, outputs)

    def holds(self) -> bool:
        """True if torch's global state is that in which the graph ran."""
        return (
            self._state.check()
            and not function_modes()
            and not saving_by_graphs()
            and stance() is self._stance
        )

    def __call__(self, arguments: tuple[Tensor | None, ...]) -> Outputs:
        result = self._graph(*self._inputs((*arguments, *self._constants)))
        outputs: Outputs = self._outputs((*result, None))
        return outputs
