"""The registered torch operators `fa4flex::attention` and its backward.

An operator's arguments are tensors and plain numbers, so a program enters by its key: `publish` puts its
expressions into a table, and the operator looks them up. Captured tensors travel as an argument, so that
autograd, torch.compile and functionalisation see them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fa4flex.codegen.analyze.facts import Facts
from fa4flex.codegen.evaluate import Captured
from fa4flex.codegen.expr import walk
from fa4flex.errors import UnsupportedError
from fa4flex.primitives.precision import Precision
from fa4flex.primitives.schedule import Schedule
from fa4flex.runtime import cpu
from fa4flex.runtime.cuda.backward import Saved, run_backward
from fa4flex.runtime.cuda.call import NO_LENGTHS, Call, Lengths
from fa4flex.runtime.cuda.engine import Engine, empty_output
from fa4flex.runtime.cuda.simulated import simulating

# torch.compile keeps graphs on disk, gradients of operators included, and knows them by their arguments
# alone. With this in the key, a graph compiled against another version of this file is not found again.
_CONTRACT = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:8]


@dataclass(frozen=True)
class Published:
    """A program without its tensors: what an operator's key stands for."""

    facts: Facts
    schedule: Schedule
    precision: Precision

    @property
    def key(self) -> str:
        return f"{_CONTRACT}/{self.facts.key}/{self.schedule!r}/{self.precision!r}"

    def captured(self, operands: Sequence[Tensor], scalars: Sequence[float]) -> Captured:
        """Operands and scalars as the expressions expect them: int scalars travel as floats."""
        kinds = self.kinds
        numbers = (int(x) if kinds[slot] == "int" else x for slot, x in enumerate(scalars))
        return Captured(tuple(operands), tuple(numbers))

    @property
    def kinds(self) -> dict[int, str]:
        """The kind of each captured number, by slot."""
        return {n.value: n.kind for n in walk(self.facts.score, self.facts.mask) if n.op == "scalar"}


_published: dict[str, Published] = {}
_engines: dict[str, Engine] = {}


def publish(facts: Facts, schedule: Schedule, precision: Precision) -> str:
    """Make a program known to the operators; returns its key. Equal programs share one."""
    program = Published(facts, schedule, precision)
    _published.setdefault(program.key, program)
    return program.key


def engine(key: str) -> Engine:
    """What launches a published program on NVIDIA GPUs; equal programs share what it remembers."""
    if key not in _engines:
        p = _published[key]
        _engines[key] = Engine(p.facts, p.schedule, p.precision, p.kinds)
    return _engines[key]


@torch.library.custom_op("fa4flex::attention", mutates_args=(), device_types="cpu")
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    operands: Sequence[Tensor],
    sinks: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    seqused_q: Tensor | None,
    seqused_k: Tensor | None,
    program: str,
    scalars: Sequence[float],
    scale: float,
    max_scores: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """cpu.Forward of dense [B, H, S, D] tensors, or of packed [T, H, D] ones with cu_seqlens.

    On a GPU `total` is empty, and so is `max_scores` where it is not asked for.
    """
    if simulating():
        lengths = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
        return _launch((q, k, v), operands, sinks, lengths, (program, scalars, scale), max_scores)
    published = _published[program]
    inputs = _inputs(published, (q, k, v), operands, scalars, (scale, sinks))
    sequences = _sequences(q, k, (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k))
    if sequences is None:
        result = cpu.forward(published.facts, inputs)
    else:
        result = cpu.forward_sequences(published.facts, inputs, sequences)
    return result.out, result.lse, result.max_scores, result.total


@attention.register_kernel("cuda")
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    operands: Sequence[Tensor],
    sinks: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    seqused_q: Tensor | None,
    seqused_k: Tensor | None,
    program: str,
    scalars: Sequence[float],
    scale: float,
    max_scores: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    lengths = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    return _launch((q, k, v), operands, sinks, lengths, (program, scalars, scale), max_scores)


def _launch(
    qkv: tuple[Tensor, Tensor, Tensor],
    operands: Sequence[Tensor],
    sinks: Tensor | None,
    lengths: Lengths,
    plain: tuple[str, Sequence[float], float],
    max_scores: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """By a GPU's kernel."""
    program, scalars, scale = plain
    lengths = NO_LENGTHS if all(x is None for x in lengths) else lengths
    statistics = ("lse", "max_scores") if max_scores else ("lse",)
    call = Call(*qkv, tuple(operands), sinks, lengths, tuple(scalars), scale, True, statistics)
    out, lse, largest = engine(program).run(call)
    assert lse is not None
    return out, lse, lse.new_empty(0) if largest is None else largest, lse.new_empty(0)


@torch.library.custom_op("fa4flex::attention_backward", mutates_args=(), device_types="cpu")
def attention_backward(
    upstream: Sequence[Tensor],
    saved: Sequence[Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    operands: Sequence[Tensor],
    sinks: Tensor | None,
    lengths: Sequence[Tensor | None],
    program: str,
    scalars: Sequence[float],
    scale: float,
    needs: Sequence[int],
) -> list[Tensor]:
    """[dq, dk, dv, dsinks if there are sinks, then a gradient per operand slot in `needs`].

    `upstream` is [dout, dlse], or [dout] where nothing depends on the lse; `saved` what the forward returned.
    """
    if simulating():
        return _on_gpu(
            (upstream, saved, lengths), (q, k, v), operands, sinks, (program, scalars, scale), needs
        )
    published = _published[program]
    inputs = _inputs(published, (q, k, v), operands, scalars, (scale, sinks))
    return _blockwise_backward(published, inputs, (upstream, saved, lengths), needs)


def _blockwise_backward(
    published: Published,
    inputs: cpu.Inputs,
    given: tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor | None]],
    needs: Sequence[int],
) -> list[Tensor]:
    (dout, *of_lse), saved, lengths = given
    dlse = of_lse[0] if of_lse else None
    sequences, forward = _sequences(inputs.q, inputs.k, lengths), cpu.Forward(*saved)
    if sequences is None:
        found = cpu.backward(published.facts, inputs, forward, dout, dlse, needs)
    else:
        found = cpu.backward_sequences(published.facts, inputs, sequences, forward, (dout, dlse), needs)
    gradients = [found.dq, found.dk, found.dv, found.sinks, *(found.operands[slot] for slot in needs)]
    return [x for x in gradients if x is not None]


@attention_backward.register_kernel("cuda")
def _(
    upstream: Sequence[Tensor],
    saved: Sequence[Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    operands: Sequence[Tensor],
    sinks: Tensor | None,
    lengths: Sequence[Tensor | None],
    program: str,
    scalars: Sequence[float],
    scale: float,
    needs: Sequence[int],
) -> list[Tensor]:
    return _on_gpu((upstream, saved, lengths), (q, k, v), operands, sinks, (program, scalars, scale), needs)


def _on_gpu(
    given: tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor | None]],
    qkv: tuple[Tensor, Tensor, Tensor],
    operands: Sequence[Tensor],
    sinks: Tensor | None,
    plain: tuple[str, Sequence[float], float],
    needs: Sequence[int],
) -> list[Tensor]:
    """By kernels where there are some. Else the blockwise backward of the CPU, in PyTorch operations on the
    GPU: exact, deterministic and slow.

    Probabilities are exp(score - lse): where scores are so large that the lse has no digits left for the
    number of keys (some 1e7), rows of equal scores get too large a gradient.
    """
    (dout, *of_lse), (out, lse, *_), lengths = given
    dlse = of_lse[0] if of_lse else None
    program, scalars, scale = plain
    if dout.dtype == out.dtype == qkv[0].dtype:
        some = NO_LENGTHS if all(x is None for x in lengths) else lengths
        call = Call(*qkv, tuple(operands), sinks, some, tuple(scalars), scale, True, ("lse",))  # type: ignore[arg-type]
        found = run_backward(engine(program), call, Saved(out, lse, dout, dlse), needs)
        if found is not None:
            return [x for x in (*found[:4], *found.captured) if x is not None]
    whole = out, lse, lse, (lse > -torch.inf).to(lse.dtype)
    published = _published[program]
    with torch.device("cpu"):
        inputs = _inputs(published, qkv, operands, scalars, (scale, sinks))
    with torch.device(qkv[0].device):
        return _blockwise_backward(published, inputs, (given[0], whole, lengths), needs)


def _inputs(
    published: Published,
    qkv: tuple[Tensor, Tensor, Tensor],
    operands: Sequence[Tensor],
    scalars: Sequence[float],
    numbers: tuple[float, Tensor | None],
) -> cpu.Inputs:
    scale, sinks = numbers
    q = qkv[0]
    captured = published.captured(operands, scalars)
    precision = published.precision
    return cpu.Inputs(
        *qkv,
        captured,
        scale,
        sinks,
        compute=precision.compute_dtype(q.dtype),
        output=precision.output_dtype(q.dtype),
        tile=published.schedule.tile,
    )


def _sequences(q: Tensor, k: Tensor, lengths: Sequence[Tensor | None]) -> cpu.Sequences | None:
    cu_q, cu_k, used_q, used_k = lengths
    if cu_q is not None and cu_k is not None:
        return cpu.packed(cu_q, cu_k, used_q, used_k)
    return None if used_q is None and used_k is None else cpu.padded(q, k, used_q, used_k)


# --- shapes without data, for torch.compile ---------------------------------------------------------


@attention.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    operands: Sequence[Tensor],
    sinks: Tensor | None,
    cu_seqlens_q: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    precision, max_scores = _published[rest[3]].precision, rest[-1]
    shape = q.shape[:-1] if cu_seqlens_q is None else (q.shape[1], q.shape[0])
    compute, output = precision.compute_dtype(q.dtype), precision.output_dtype(q.dtype)
    if q.device.type == "cuda":
        sizes: tuple[Any, ...] = (shape, shape if max_scores else (0,), (0,))
        out = empty_output(q, v.shape[-1], output)
    else:
        sizes = (shape, shape, shape)
        out = q.new_empty(*q.shape[:-1], v.shape[-1], dtype=output)
    lse, largest, total = (q.new_empty(size, dtype=compute) for size in sizes)
    return out, lse, largest, total


@attention_backward.register_fake
def _(
    upstream: Sequence[Tensor],
    saved: Sequence[Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    operands: Sequence[Tensor],
    sinks: Tensor | None,
    *rest: Any,
) -> list[Tensor]:
    needs = rest[-1]
    like = [q, k, v, *([] if sinks is None else [sinks]), *(operands[slot] for slot in needs)]
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in like]


# --- autograd -----------------------------------------------------------------------------------------


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, operands, sinks, *lengths, program, scalars, scale, _ = inputs
    ctx.save_for_backward(q, k, v, sinks, *lengths, *output, *operands)
    ctx.mark_non_differentiable(*output[2:])
    # Zeros for a log-sum-exp that nothing depends on would be a kernel of their own.
    ctx.set_materialize_grads(False)
    ctx.plain = program, scalars, scale


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: Any) -> tuple[Any, ...]:
    q, k, v, sinks, *rest = ctx.saved_tensors
    lengths, saved, operands = rest[:4], rest[4:8], rest[8:]
    wanted = ctx.needs_input_grad[3]
    needs = [slot for slot, want in enumerate(wanted) if want] if isinstance(wanted, (list, tuple)) else []
    upstream = [torch.zeros_like(saved[0]) if dout is None else dout, *([] if dlse is None else [dlse])]
    found = attention_backward(upstream, saved, q, k, v, operands, sinks, lengths, *ctx.plain, needs)
    dsinks, captured = (None, found[3:]) if sinks is None else (found[3], found[4:])
    by_slot: list[Tensor | None] = [None] * len(operands)
    for slot, gradient in zip(needs, captured, strict=True):
        by_slot[slot] = gradient
    _, scalars, _ = ctx.plain
    # torch compares this with the inputs' structure, where an empty list is a list and a full one a leaf.
    return (*found[:3], by_slot, dsinks, *[None] * 5, None if scalars else [], None, None)


def _save_nothing(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    pass


def _second_derivative(ctx: Any, *upstream: Any) -> Any:
    raise UnsupportedError(
        "a second derivative of attention",
        "first derivatives",
        "leave out create_graph=True, or take the second derivative of the dense formula in plain PyTorch",
    )


attention.register_autograd(_backward, setup_context=_save)
attention_backward.register_autograd(_second_derivative, setup_context=_save_nothing)
