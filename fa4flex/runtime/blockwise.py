"""Calls of the executor for CPUs: those of CPU tensors, and those of a GPU that no kernel is for, in PyTorch
operations.

The first such call imports this module and the executor; calls of kernels do not wait for either.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fa4flex.primitives.varlen import Varlen
from fa4flex.runtime import cpu
from fa4flex.runtime.call import Call, largest_of_heads, more_than_rows
from fa4flex.runtime.cpu.few import fit as fit
from fa4flex.runtime.kv_heads import of_kv_heads, summed
from fa4flex.runtime.programs import Forward, Published

Gradients = tuple[Sequence[Tensor], Sequence[Tensor]]
"""([dout, dlse, dentropy], what the forward pass returned); without the last, or both, where nothing depends
on the entropy, or the lse."""


def forward(program: Published, call: Call, differentiable: bool) -> Forward:
    """See ops.forward."""
    inputs, sequences = inputs_of_call(program, call), sequences_of_call(call)
    alone = not differentiable and call.statistics in ((), ("lse",))
    if alone and sequences is None:
        outcome = cpu.outputs(program.facts, inputs)
        if outcome is not None:
            none = outcome[1].new_empty(0)
            return *outcome, none, none
    result = _forward(program, inputs, sequences, alone)
    if alone:
        none = result.lse.new_empty(0)
        return result.out, result.lse, none, none
    return _with_more(call, result, (result.out, result.lse, result.max_scores, result.total))


def skipped(program: Published, call: Call) -> Tensor:
    """Share of the keys of each query's tiles that the forward pass leaves out, laid out as the lse."""
    inputs, sequences = inputs_of_call(program, call), sequences_of_call(call)
    if sequences is None:
        return cpu.skipped(program.facts, inputs)
    return cpu.skipped_sequences(program.facts, inputs, sequences)


def single_queries(program: Published, call: Call) -> tuple[Tensor, Tensor] | None:
    """(out, lse) of single queries, which capture no tensors: see cpu.single_queries."""
    if not program.facts.softmax:
        return None
    return cpu.single_queries(program.facts, inputs_of_call(program, call))


def key_mass(program: Published, call: Call, lse: Tensor) -> Tensor:
    """Sums of probabilities per key: see cpu.key_mass."""
    return cpu.key_mass(program.facts, inputs_of_call(program, call), sequences_of_call(call), lse)


def forward_on_gpu(program: Published, call: Call) -> Forward:
    """The same in PyTorch operations on the GPU: where no kernel is for a call, or none has anything to do as
    rows, if there are any, have no keys."""
    with torch.device("cpu"):
        inputs = inputs_of_call(program, call)
    with torch.device(call.q.device):
        result = _forward(program, inputs, sequences_of_call(call))
        none = result.lse.new_empty(0)
        largest = result.max_scores if "max_scores" in call.statistics else none
        return _with_more(call, result, (result.out, result.lse, largest, none))


def _with_more(call: Call, result: cpu.Forward, made: Forward) -> Forward:
    """Results of a call, with max_logit and entropy where one of them is wanted."""
    if not more_than_rows(call.statistics):
        return made
    none = result.lse.new_empty(0)
    of_heads = largest_of_heads(result.max_scores) if "max_logit" in call.statistics else none
    return *made, of_heads, none if result.entropy is None else result.entropy


def backward(program: Published, call: Call, gradients: Gradients, needs: Sequence[int]) -> list[Tensor]:
    """See ops.backward."""
    return _backward(program, call, inputs_of_call(program, call), gradients, needs)


def backward_on_gpu(
    program: Published, call: Call, gradients: Gradients, needs: Sequence[int]
) -> list[Tensor]:
    """The same in PyTorch operations on the GPU: exact, deterministic and slow."""
    upstream, (out, lse, *more) = gradients
    saved = out, lse, lse, (lse > -torch.inf).to(lse.dtype), *more[-1:]
    with torch.device("cpu"):
        inputs = inputs_of_call(program, call)
    with torch.device(call.q.device):
        return _backward(program, call, inputs, (upstream, saved), needs)


def _forward(
    program: Published, inputs: cpu.Inputs, sequences: cpu.Sequences | None, alone: bool = False
) -> cpu.Forward:
    """`alone`: nothing but out and lse will be read."""
    if sequences is None:
        return cpu.forward(program.facts, inputs)
    return cpu.forward_sequences(program.facts, inputs, sequences, alone)


def _backward(
    program: Published, call: Call, inputs: cpu.Inputs, gradients: Gradients, needs: Sequence[int]
) -> list[Tensor]:
    (dout, *of_rows), saved = gradients
    dlse, dentropy = (*of_rows, None, None)[:2]
    out, lse, largest, total, *more = saved
    before = cpu.Forward(out, lse, largest, total, None if dentropy is None else more[-1])
    sequences = sequences_of_call(call)
    if sequences is None:
        result = cpu.backward(program.facts, inputs, before, dout, dlse, needs, dentropy)
    else:
        upstream = dout, dlse, dentropy
        result = cpu.backward_sequences(program.facts, inputs, sequences, before, upstream, needs)
    dk, dv = (summed(x, share) for x, share in zip((result.dk, result.dv), call.shares, strict=True))
    results = [result.dq, dk, dv, result.sinks, *(result.operands[slot] for slot in needs)]
    return [x for x in results if x is not None]


def inputs_of_call(program: Published, call: Call) -> cpu.Inputs:
    """Inputs of a call, whose k and v have as many heads: where they differ in heads, of copies."""
    q, precision = call.q, program.precision
    k, v = of_kv_heads(call.kv.k, call.kv.v)
    return cpu.Inputs(
        q,
        k,
        v,
        program.captured(call),
        call.scale,
        call.sinks,
        compute=precision.compute_dtype(q.dtype),
        output=precision.output_dtype(q.dtype),
        tile=program.schedule.tile,
        contents=program.schedule.contents,
        skip=precision.skip,
        entropy="entropy" in call.statistics,
    )


def sequences_of_call(call: Call) -> cpu.Sequences | None:
    if not any(x is not None for x in call.lengths):
        return None
    return cpu.Sequences.of(Varlen(*call.lengths), call.q, call.kv.k)
