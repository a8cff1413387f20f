"""Calls of the executor for CPUs: those of CPU tensors, and those of a GPU that no kernel is for, in PyTorch
operations.

The first such call imports this module and the executor; calls of kernels do not wait for either.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fa4flex.runtime import cpu
from fa4flex.runtime.cpu.few import fit as fit
from fa4flex.runtime.cuda.calls.call import NO_LENGTHS, Tensors
from fa4flex.runtime.programs import Forward, Numbers, Published

Gradients = tuple[Sequence[Tensor], Sequence[Tensor]]
"""([dout, dlse], what the forward pass returned); without dlse where nothing depends on the lse."""


def forward(
    program: Published, given: Tensors, numbers: Numbers, max_scores: bool, differentiable: bool
) -> Forward:
    """See ops.forward."""
    inputs = _inputs(program, given, numbers)
    sequences = _sequences(given)
    if sequences is None and not differentiable and not max_scores:
        found = cpu.single_queries(program.facts, inputs)
        if found is not None:
            none = found[1].new_empty(0)
            return *found, none, none
    result = _forward(program, inputs, sequences)
    return result.out, result.lse, result.max_scores, result.total


def single_queries(
    program: Published, qkv: tuple[Tensor, Tensor, Tensor], numbers: Numbers
) -> tuple[Tensor, Tensor] | None:
    """(out, lse) of single queries, which capture no tensors: see cpu.single_queries."""
    given = Tensors(*qkv, None, NO_LENGTHS, ())
    return cpu.single_queries(program.facts, _inputs(program, given, numbers))


def without_keys_on_gpu(program: Published, given: Tensors, numbers: Numbers, max_scores: bool) -> Forward:
    """No kernel has anything to do: rows, if there are any, have no keys."""
    with torch.device("cpu"):
        inputs = _inputs(program, given, numbers)
    with torch.device(given.q.device):
        result = _forward(program, inputs, _sequences(given))
    none = result.lse.new_empty(0)
    return result.out, result.lse, result.max_scores if max_scores else none, none


def backward(
    program: Published, given: Tensors, numbers: Numbers, gradients: Gradients, needs: Sequence[int]
) -> list[Tensor]:
    """See ops.backward."""
    return _backward(program, given, _inputs(program, given, numbers), gradients, needs)


def backward_on_gpu(
    program: Published, given: Tensors, numbers: Numbers, gradients: Gradients, needs: Sequence[int]
) -> list[Tensor]:
    """The same in PyTorch operations on the GPU: exact, deterministic and slow."""
    upstream, (out, lse, *_) = gradients
    saved = out, lse, lse, (lse > -torch.inf).to(lse.dtype)
    with torch.device("cpu"):
        inputs = _inputs(program, given, numbers)
    with torch.device(given.q.device):
        return _backward(program, given, inputs, (upstream, saved), needs)


def _forward(program: Published, inputs: cpu.Inputs, sequences: cpu.Sequences | None) -> cpu.Forward:
    if sequences is None:
        return cpu.forward(program.facts, inputs)
    return cpu.forward_sequences(program.facts, inputs, sequences)


def _backward(
    program: Published, given: Tensors, inputs: cpu.Inputs, gradients: Gradients, needs: Sequence[int]
) -> list[Tensor]:
    (dout, *of_lse), saved = gradients
    dlse = of_lse[0] if of_lse else None
    sequences, before = _sequences(given), cpu.Forward(*saved)
    if sequences is None:
        found = cpu.backward(program.facts, inputs, before, dout, dlse, needs)
    else:
        found = cpu.backward_sequences(program.facts, inputs, sequences, before, (dout, dlse), needs)
    results = [found.dq, found.dk, found.dv, found.sinks, *(found.operands[slot] for slot in needs)]
    return [x for x in results if x is not None]


def _inputs(program: Published, given: Tensors, numbers: Numbers) -> cpu.Inputs:
    q, k, v = given[:3]
    captured = program.captured(given.operands, numbers)
    return cpu.Inputs(
        q,
        k,
        v,
        captured,
        numbers.scale,
        given.sinks,
        compute=program.precision.compute_dtype(q.dtype),
        output=program.precision.output_dtype(q.dtype),
        tile=program.schedule.tile,
        contents=program.schedule.contents,
    )


def _sequences(given: Tensors) -> cpu.Sequences | None:
    cu_q, cu_k, used_q, used_k = given.lengths
    if cu_q is not None and cu_k is not None:
        return cpu.packed(cu_q, cu_k, used_q, used_k)
    return None if used_q is None and used_k is None else cpu.padded(given.q, given.k, used_q, used_k)
