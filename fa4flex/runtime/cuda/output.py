"""Output functions and their gradients on a GPU: a launch each, for which the host reads no contents.

What no kernel takes, PyTorch operations compute (runtime/output_values.py): `accepts` of the plan says what
that is, and explain() which of both it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fa4flex.codegen.analyze.domain import Ragged
from fa4flex.codegen.analyze.facts import Facts
from fa4flex.codegen.analyze.prove import prove, proving, watched
from fa4flex.codegen.emit import emit_output
from fa4flex.codegen.evaluate import Captured
from fa4flex.compiler.compile import Kernel, compile_kernel
from fa4flex.compiler.signature import Signature
from fa4flex.errors import UnsupportedError
from fa4flex.kernels.output_function.config import BYTES
from fa4flex.kernels.output_function.plan import Finish, Inputs, OutputPlan, Table, plan_output
from fa4flex.kernels.plan.looks import Captured as CapturedLook
from fa4flex.kernels.plan.target import Target
from fa4flex.runtime.call import name_of
from fa4flex.runtime.cuda.calls.conversions import compact, conversion, tma_able
from fa4flex.runtime.cuda.device.device import require_not_capturing, target_of
from ptxsim.active import target

if TYPE_CHECKING:
    from fa4flex.runtime.output_call import OutputCall
    from fa4flex.runtime.programs import Published

MOST = 256
"""Looks of calls whose launches are kept, the youngest: two for each shape that is trained with."""


def forward(program: Published, call: OutputCall) -> Tensor | None:
    """The function of the output; None where no kernel computes it."""
    ready = _ready(program, call, None)
    if ready is None:
        return None
    result = torch.empty_like(call.out)
    ready.launch(_readable(call.out), result, *_arguments(ready, program, call))
    return result


def backward(program: Published, call: OutputCall, dout: Tensor, needs: Sequence[int]) -> list[Tensor] | None:
    """[d out before the function, then a gradient per operand slot in `needs`]; None where no kernel does."""
    ready = _ready(program, call, tuple(needs)) if dout.dtype == call.out.dtype else None
    if ready is None:
        return None
    dx = torch.empty_like(call.out)
    sums = [_memory(call, slot, finish) for slot, finish in zip(needs, ready.plan.finishes, strict=True)]
    tensors = _readable(call.out), _readable(dout), dx
    ready.launch(*tensors, *_arguments(ready, program, call), tuple(sums) or None)
    done = zip(needs, sums, ready.plan.finishes, strict=True)
    return [dx, *(_finished(call.operands[slot], x, finish) for slot, x, finish in done)]


# --- launches -------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Ready:
    """A launch for calls that look alike. readable: makes captured tensors what it reads, None where they
    are."""

    plan: OutputPlan
    launch: Callable[..., None]
    readable: Callable[[Any], Any] | None


_known: dict[tuple[object, ...], Ready | None] = {}
"""Launches by what calls look like, the program's numbers that proofs read included; None where there is no
kernel. No contents of tensors are in it, and no tensors."""


def _ready(program: Published, call: OutputCall, needs: tuple[int, ...] | None) -> Ready | None:
    key = _look(program, call, needs)
    try:
        result = _known.pop(key)
    except KeyError:
        try:
            result = _made(program, call, needs)
        except UnsupportedError:
            result = None
    _known[key] = result
    while len(_known) > MOST:
        _known.pop(next(iter(_known)), None)
    return result


def _look(program: Published, call: OutputCall, needs: tuple[int, ...] | None) -> tuple[object, ...]:
    out, lengths = call.out, call.lengths
    tensors = tuple([(x.dtype, x.shape, x.stride(), x.data_ptr() % BYTES) for x in (out, *call.operands)])
    small = (lengths.cu_seqlens_q, lengths.seqused_q, call.positions)
    given = tuple([None if x is None else (x.dtype, x.shape) for x in small])
    numbers = watched(program.facts).numbers_of(call.scalars) if call.scalars else ""
    return (
        program, needs, tensors, given, call.whole, call.heads_first, numbers, out.get_device(), target(),
    )  # fmt: skip


def _made(program: Published, call: OutputCall, needs: tuple[int, ...] | None) -> Ready:
    """Raises UnsupportedError for what no kernel takes, PastTheEnd for short captured tensors."""
    captured = program.captured_of(call.operands, call.scalars)
    plan = planned(
        program.facts, inputs_of(program, call), captured, target_of(call.out.device), needs, call.whole[2]
    )
    require_not_capturing()
    kernel = _compiled(program.facts, plan, program.kinds, call)
    return Ready(plan, kernel.launch, conversion(CapturedLook("tensors"), call.operands))


def planned(
    facts: Facts,
    inputs: Inputs,
    captured: Captured,
    chip: Target,
    needs: Sequence[int] | None,
    num_heads: int,
) -> OutputPlan:
    """The plan of a pass; errors as above."""
    batch, heads, rows = inputs.sizes
    extents = Ragged(batch, max(heads, num_heads), max(rows, inputs.q_len), inputs.width)
    with proving():
        proved = prove(facts, extents, captured.unread(), of_scores=("b", "h", "kv"))
    return plan_output(facts, inputs, proved, chip, needs)


def _compiled(facts: Facts, plan: OutputPlan, kinds: tuple[str, ...], call: OutputCall) -> Kernel:
    lengths = call.lengths
    integers = {
        "cu_seqlens_q": lengths.cu_seqlens_q, "seqused_q": lengths.seqused_q, "positions": call.positions,
    }  # fmt: skip
    given = tuple([name for name, x in integers.items() if x is not None and name != "cu_seqlens_q"])
    wide = tuple([name for name, x in integers.items() if x is not None and x.dtype == torch.int64])
    signature = Signature(call.heads_first, kinds, given=given, wide=wide)
    return compile_kernel(emit_output(facts, plan), plan.problem, signature, plan.target.name)


def inputs_of(program: Published, call: OutputCall) -> Inputs:
    """Facts of a call that decide its plan."""
    out, (q_len, first_head, _) = call.out, call.whole
    rows, heads = (0, 1) if call.packed else (2, 1) if call.heads_first else (1, 2)
    starts, used = call.lengths.cu_seqlens_q, call.lengths.seqused_q
    batch = out.shape[0] if starts is None else max(starts.shape[0] - 1, 0)
    return Inputs(
        name_of(out.dtype),
        name_of(program.precision.compute_dtype(out.dtype)),
        out.shape[-1],
        (batch, out.shape[heads], out.shape[rows]),
        "packed" if call.packed else "dense" if used is None else "used",
        out.stride(heads) < out.stride(rows),
        call.positions is not None or first_head != 0,
        q_len,
        tables_of(call.operands),
    )


def tables_of(operands: Sequence[Tensor]) -> tuple[Table, ...]:
    return tuple([Table(name_of(x.dtype), tuple(x.shape), _even(x)) for x in operands])


def _even(x: Tensor) -> bool:
    """True if rows of x may be read in pieces."""
    return x.ndim > 0 and x.dtype != torch.bool and x.element_size() in (2, 4) and tma_able(x)


def _readable(x: Tensor) -> Tensor:
    """Rows of an output in pieces of 16 bytes."""
    return x if tma_able(x) else compact(x)


def _arguments(ready: Ready, program: Published, call: OutputCall) -> tuple[object, ...]:
    """Arguments of a launch from cu_seqlens_q to num_heads (kernels/plan/arguments.py)."""
    operands = call.operands if ready.readable is None else ready.readable(call.operands)
    lengths, scalars = call.lengths, program.captured_of((), call.scalars).scalars
    return (
        lengths.cu_seqlens_q, lengths.seqused_q, call.positions, tuple(operands) or None,
        scalars or None, *call.whole,
    )  # fmt: skip


# --- gradients ------------------------------------------------------------------------------------------


def _memory(call: OutputCall, slot: int, finish: Finish) -> Tensor:
    """Memory that a launch writes a gradient to: of parts, [B, S, H], packed [T, H]."""
    operand, out = call.operands[slot], call.out
    if finish.summed:
        rows = out.transpose(1, 2) if call.heads_first and not call.packed else out
        return out.new_empty(rows.shape[:-1], dtype=torch.float32)
    make = operand.new_empty if finish.whole else operand.new_zeros
    return make(operand.shape)


def _finished(operand: Tensor, written: Tensor, finish: Finish) -> Tensor:
    """The gradient of a captured tensor from what a launch wrote."""
    if not finish.summed:
        return written
    names = ("b", "q", "h") if written.ndim == 3 else ("q", "h")
    total = written.sum([at for at, name in enumerate(names) if name not in finish.index])
    kept = [name for name in names if name in finish.index]
    total = total.permute([kept.index(name) for name in finish.index]).to(operand.dtype)
    if finish.whole:
        return total
    result = torch.zeros_like(operand, memory_format=torch.contiguous_format)
    result[tuple([slice(n) for n in total.shape])] = total
    return result
