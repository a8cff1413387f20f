"""Output functions of calls: checks, gradients, and the operator that stands for one under tracing.

The attention is computed without its output function, which is applied to the result. For the backward pass
the output before the function is kept, in the output's dtype: attention's own gradients need it (delta is the
sum of its products with the gradient that reaches it), and so do the function's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fa4flex.codegen.build import Bound
from fa4flex.default_device import on_the_host
from fa4flex.errors import UnsupportedError
from fa4flex.operators import OPERATORS, below
from fa4flex.primitives.output import OutputMod
from fa4flex.primitives.precision import Precision
from fa4flex.primitives.schedule import Schedule
from fa4flex.primitives.varlen import Varlen
from fa4flex.runtime import autocast
from fa4flex.runtime.call import NO_LENGTHS, SequenceLengths
from fa4flex.runtime.checks import check_operand_devices, check_tables, check_transforms
from fa4flex.runtime.gradients import refuse_second
from fa4flex.runtime.launch import observed
from fa4flex.runtime.output_call import OutputCall
from fa4flex.runtime.output_values import backward, forward
from fa4flex.runtime.packing import as_tensor
from fa4flex.runtime.programs import Published, publish, read
from fa4flex.runtime.sharding import is_dtensor
from fa4flex.torch_internals import MappedDimension, below_autograd
from fa4flex.variant import Variant

_FORWARD, _BACKWARD = OPERATORS["output_function"], OPERATORS["output_function_backward"]


class Rows(NamedTuple):
    """Rows of an output: lengths of a ragged batch; or each row's q_idx, and q_len, the h of the first head
    and num_heads of the whole."""

    lengths: SequenceLengths = NO_LENGTHS
    positions: Tensor | None = None
    whole: tuple[int, int, int] | None = None

    @staticmethod
    def of(varlen: Varlen | None) -> Rows:
        if varlen is None:
            return Rows()
        return Rows(SequenceLengths(varlen.cu_seqlens_q, None, varlen.seqused_q))


def program_of(bound: Bound, precision: Precision) -> Published:
    """The program of an output function."""
    return publish(bound.trace.facts, Schedule(), precision)


@on_the_host
def applied(variant: Variant, bound: Bound, out: Tensor, rows: Rows) -> Tensor:
    """The variant's output function, as it was bound, of an output; with gradients.

    out    as attention without the function returns it, in the variant's layout
    """
    assert variant.output_mod is not None
    operands = bound.trace.tensors(bound.bases)
    check_local((out, *operands), variant.output_mod)
    heads_first = variant.layout == "bhsd" and out.ndim == 4
    whole = rows.whole or whole_of(out, heads_first)
    check_tables((variant.output_mod,), whole[2])
    check_operand_devices(operands, tuple(o.name for o in bound.trace.operands), out)
    check_transforms(out, *operands)
    call = OutputCall(out, operands, rows.lengths, rows.positions, whole, bound.scalars, heads_first)
    program = program_of(bound, variant.precision)
    if observed(out, *operands):  # what traces or intercepts operators sees one
        return by_operator(program, call)
    with autocast.off(out):
        if not torch.is_grad_enabled() or not call.wants_gradients:
            return forward(program, call)
        return _of_tensors(program, call, registered=False)


def whole_of(out: Tensor, heads_first: bool) -> tuple[int, int, int]:
    """q_len, first head and number of heads of an output that is the whole."""
    rows, heads = (2, 1) if heads_first else (out.ndim - 3, out.ndim - 2)
    return out.shape[rows], 0, out.shape[heads]


def check_local(tensors: Sequence[Tensor], mod: OutputMod) -> None:
    """Raise UnsupportedError for DTensors."""
    if any(map(is_dtensor, tensors)):
        raise UnsupportedError(
            f"the output function {mod!r} of DTensors",
            "local tensors, or the call of Attention.parallel(mesh)",
            "apply it to the output in PyTorch, or call with local tensors (x.to_local())",
        )


# --- gradients --------------------------------------------------------------------------------------------


class _Outline(NamedTuple):
    """A call without its tensors, which autograd keeps. registered: whether operators compute it."""

    program: Published
    fields: tuple[Any, ...]
    """The call, with None in place of tensors that are handed over beside it."""
    operands: int
    registered: bool

    def call(self, tensors: Sequence[Any]) -> OutputCall:
        out, starts, used, positions, *operands = tensors
        lengths = SequenceLengths(starts, None, used)
        return OutputCall(out, tuple(operands), lengths, positions, *self.fields)


class Applied(torch.autograd.Function):
    """An output function, with gradients of the output before it and of what it captured."""

    @staticmethod
    def forward(ctx: Any, outline: _Outline, *tensors: Any) -> Tensor:
        ctx.outline = outline
        ctx.save_for_backward(*tensors)
        call = outline.call(tensors)
        if not outline.registered:
            return forward(outline.program, call)
        with below_autograd():
            return by_operator(outline.program, call)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        outline, tensors, wanted = ctx.outline, ctx.saved_tensors, ctx.needs_input_grad[1:]
        needs = [slot for slot, want in enumerate(wanted[4:]) if want]
        if torch.is_grad_enabled():  # create_graph=True
            made = list(_Once.apply(outline, needs, dout, *tensors))
        else:
            made = _gradients(outline, tensors, dout, needs)
        placed: list[Tensor | None] = [made[0], None, None, None, *[None] * outline.operands]
        for slot, gradient in zip(needs, made[1:], strict=True):
            placed[4 + slot] = gradient
        return None, *placed


class _Once(torch.autograd.Function):
    """The gradients where a second derivative might be wanted, which is refused in words."""

    @staticmethod
    def forward(ctx: Any, outline: _Outline, needs: list[int], dout: Tensor, *tensors: Any) -> Any:
        return tuple(_gradients(outline, tensors, dout, needs))

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        refuse_second()


def _gradients(outline: _Outline, tensors: Sequence[Any], dout: Tensor, needs: list[int]) -> list[Tensor]:
    batch = MappedDimension.of(dout)
    if batch is not None:
        rows = batch.rows(dout)
        each = [_gradients(outline, tensors, row, needs) for row in rows]
        return [batch.stacked(list(result)) for result in zip(*each, strict=True)]
    return _made(outline, tensors, dout, needs)


@on_the_host
def _made(outline: _Outline, tensors: Sequence[Any], dout: Tensor, needs: list[int]) -> list[Tensor]:
    call = outline.call(tensors)
    if not outline.registered:
        with autocast.off(dout):
            return backward(outline.program, call, dout, needs)
    value = {**_named(outline.program, call), "dout": dout, "needs": needs}
    results: list[Tensor] = torch.ops.fa4flex.output_function_backward(*_BACKWARD.packed(value))
    return results


def _of_tensors(program: Published, call: OutputCall, registered: bool) -> Tensor:
    lengths = call.lengths
    outline = _Outline(program, tuple(call[4:]), len(call.operands), registered)
    tensors = call.out, lengths.cu_seqlens_q, lengths.seqused_q, call.positions, *call.operands
    result: Tensor = Applied.apply(outline, *tensors)
    return result


# --- operators --------------------------------------------------------------------------------------------


def by_operator(program: Published, call: OutputCall) -> Tensor:
    """The same by an operator of torch's."""
    arguments = _FORWARD.packed(_named(program, call))
    result: Tensor = torch.ops.fa4flex.output_function(*arguments)
    return result


def _named(program: Published, call: OutputCall) -> dict[str, Any]:
    ints, floats = program.numbers(call.scalars)
    return {
        "out": call.out,
        "operands": call.operands,
        "cu_seqlens_q": call.lengths.cu_seqlens_q,
        "seqused_q": call.lengths.seqused_q,
        "positions": call.positions,
        "program": program.text,
        "ints": ints,
        "floats": [as_tensor(x) for x in floats],
        "whole": call.whole,
        "heads_first": call.heads_first,
    }


def _read(value: dict[str, Any], data: bool = True) -> tuple[Published, OutputCall]:
    program, floats = read(value["program"]), list(value["floats"])
    scalars = program.scalars(value["ints"], [float(x) for x in floats] if data else floats)
    lengths = SequenceLengths(value["cu_seqlens_q"], None, value["seqused_q"])
    fields = value["positions"], tuple(value["whole"]), scalars, value["heads_first"]
    return program, OutputCall(value["out"], tuple(value["operands"]), lengths, *fields)


@on_the_host
def output_function(*arguments: Any) -> Tensor:
    program, call = _read(_FORWARD.named(arguments))
    with autocast.off(call.out):
        return forward(program, call)


@on_the_host
def output_function_backward(*arguments: Any) -> list[Tensor]:
    value = _BACKWARD.named(arguments)
    program, call = _read(value)
    with autocast.off(call.out):
        results = backward(program, call, value["dout"], value["needs"])
    return [x.contiguous() for x in results]


def output_function_with_gradients(*arguments: Any) -> Tensor:
    value = _FORWARD.named(arguments)
    program, call = _read(value, data=False)
    if not torch.is_grad_enabled() or not call.wants_gradients:
        with below_autograd():
            return by_operator(program, call)
    return _of_tensors(program, call, registered=True)


backward_below = below("output_function_backward")


def output_function_fake(*arguments: Any) -> Tensor:
    return torch.empty_like(_FORWARD.named(arguments)["out"])


def output_function_backward_fake(*arguments: Any) -> list[Tensor]:
    value = _BACKWARD.named(arguments)
    like = [value["out"], *(value["operands"][slot] for slot in value["needs"])]
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in like]
