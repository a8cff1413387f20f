"""The entry point that is compiled: a host function of flat arguments that launches the kernels of a pass.

Its parameters are the rows of a schema (kernels/plan/arguments.py) and a stream; each kernel gets the rows
that it reads.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cutlass import cute
from cutlass.cute.runtime import make_fake_stream

from fa4flex.compiler.fakes import Fakes
from fa4flex.kernels.append.kernel import AppendArguments
from fa4flex.kernels.around.postprocess import Postprocess, PostprocessArguments
from fa4flex.kernels.around.preprocess import Preprocess, PreprocessArguments, SectionArguments
from fa4flex.kernels.around.sum_parts import SumParts, SumPartsArguments
from fa4flex.kernels.block_lists.kernel import BlockListArguments
from fa4flex.kernels.block_lists.listed import ListedUnitArguments
from fa4flex.kernels.block_tables.kernel import BlockTableArguments
from fa4flex.kernels.common.arguments import BackwardArguments, TangentArguments, arguments_of
from fa4flex.kernels.mass_sm90.arguments import MassArguments
from fa4flex.kernels.output_function.kernel import OutputArguments, OutputBackwardArguments
from fa4flex.kernels.plan.arguments import Pass, schema_of
from fa4flex.kernels.plan.looks import Captured, Heads
from fa4flex.kernels.pool.kernel import PoolArguments
from fa4flex.kernels.scores.kernel import ScoreArguments
from fa4flex.kernels.sequences.kernel import SequencesArguments
from fa4flex.kernels.topk.rows import TopkArguments

if TYPE_CHECKING:
    from fa4flex.compiler.signature import Signature
    from fa4flex.kernels.plan.problem import Problem

Launch = tuple[Callable[..., None], Any]
"""A kernel, and the named tuple that it is called with."""


def _forward(kernel: Any, problem: Problem) -> list[Launch]:
    arguments = arguments_of(problem.keys)
    launches: list[Launch] = [(kernel, arguments)]
    if kernel.config.splits:
        launches.append(kernel.merging(problem.head_dim_v, arguments))
    return launches


def _backward(kernel: Any, problem: Problem) -> list[Launch]:
    config, hooks = kernel.config, kernel.hooks
    first_heads = kernel.first_heads if config.clears else None
    threshold = None if hooks.dropout is None else hooks.dropout.threshold
    plain = first_heads is None and threshold is None
    before: Launch = (
        Preprocess(problem.head_dim_v, config, first_heads, threshold, summed=not hooks.elementwise),
        PreprocessArguments if plain else SectionArguments,
    )
    sums: list[Launch] = [(SumParts(problem.shares), SumPartsArguments)] if problem.adds_up else []
    after: list[Launch] = [] if config.stores_dq else [(Postprocess(config), PostprocessArguments)]
    return [before, (kernel, BackwardArguments), *sums, *after]


def _listed_backward(kernel: Any, problem: Problem) -> list[Launch]:
    before: Launch = Preprocess(problem.head_dim_v, kernel.config), PreprocessArguments
    return [before, (kernel, kernel.arguments), kernel.after]


LAUNCHES: dict[str, Callable[[Any, Problem], list[Launch]]] = {
    "forward": _forward,
    "backward": _backward,
    "listed_backward": _listed_backward,
    "tangents": lambda kernel, problem: [(kernel, TangentArguments)],
    "tables": lambda kernel, problem: [(kernel, BlockTableArguments)],
    "sequences": lambda kernel, problem: [(kernel, SequencesArguments)],
    "append": lambda kernel, problem: [(kernel, AppendArguments)],
    "listed_units": lambda kernel, problem: [(kernel, ListedUnitArguments)],
    "lists": lambda kernel, problem: [(kernel, BlockListArguments)],
    "mass": lambda kernel, problem: [(kernel, MassArguments)],
    "output": lambda kernel, problem: [(kernel, OutputArguments)],
    "output_backward": lambda kernel, problem: [(kernel, OutputBackwardArguments)],
    "pool": lambda kernel, problem: [(kernel, PoolArguments)],
    "scores": lambda kernel, problem: [(kernel, ScoreArguments)],
    "topk": lambda kernel, problem: [(kernel, TopkArguments)],
    "quantize": lambda kernel, problem: kernel.launches,
}
"""Kernels of a pass, in the order in which they are launched, around the one that is generated."""


def entry_point(kernel: Any, problem: Problem, signature: Signature) -> Any:
    """The host function around a kernel object: the arguments of its pass and a stream in, all of its kernels
    launched with tensors in logical order."""
    schema = schema_of(kernel.direction, problem.keys)
    launches = LAUNCHES[kernel.direction](kernel, problem)
    swap = signature.heads_first and problem.lengths != "packed"

    def launch(arguments: tuple[Any, ...]) -> None:
        *values, stream = arguments
        results: dict[str, Any] = {}
        taken = iter(values)
        for row in schema.rows:
            value = next(taken) if row.computed is None else row.computed(results)
            if isinstance(row.look, Heads) and swap and value is not None:
                value = _transposed(value)
            elif isinstance(row.look, Captured) and value is None:
                value = ()  # an empty tuple cannot be an argument: it travels as None
            results[row.name] = value
        for name, share in problem.shares._asdict().items():
            if share > 1:
                results[name] = _repeated(results[name], share)
        for one, fields in launches:
            one(fields(*(results[name] for name in fields._fields)), stream)

    def attention(*arguments: Any) -> None:
        launch(arguments)

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    names = (*schema.names, "stream")
    # The compiler names arguments in its checks as the signature does, which `*arguments` has no names for.
    attention.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])  # type: ignore[attr-defined]
    return cute.jit(attention)


def _transposed(x: cute.Tensor) -> cute.Tensor:
    """[batch, heads, length, width] as [batch, length, heads, width]."""
    return cute.make_tensor(x.iterator, cute.select(x.layout, mode=[0, 2, 1, 3]))


def _repeated(x: cute.Tensor, share: int) -> cute.Tensor:
    """[.., heads, width] as [.., (share, heads), width]: head j is head j // share of the tensor. Nothing is
    copied: the stride along `share` is 0."""
    *shape, heads, width = x.shape
    *strides, stride, unit = x.stride
    layout = cute.make_layout((*shape, (share, heads), width), stride=(*strides, (0, stride), unit))
    return cute.make_tensor(x.iterator, layout)


def fake_arguments(kernel: Any, problem: Problem, signature: Signature) -> list[Any]:
    """Stand-ins for the arguments of the entry point, its stream included."""
    fakes = Fakes(problem, signature, kernel.config)
    one = Pass(problem, signature.given, kernel.config)
    rows = schema_of(kernel.direction, problem.keys).entry
    arguments = [fakes.of(row.look) if row.present(one) else None for row in rows]
    return [*arguments, make_fake_stream(use_tvm_ffi_env_stream=True)]
