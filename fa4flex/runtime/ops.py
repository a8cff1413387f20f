"""The torch operators `fa4flex::attention` and its backward (operators.py has their schemas), and the same
calls without them.

An operator's arguments are tensors and plain numbers, so a program enters as its text. Captured tensors are
an argument, so that autograd, torch.compile and functionalisation see them. Where nothing traces or
intercepts operators, `attend` goes past them, straight to what computes: that is what eager calls do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fa4flex.default_device import on_the_host
from fa4flex.operators import library
from fa4flex.runtime import autocast, flops, sharding
from fa4flex.runtime.cuda.backward import run_backward
from fa4flex.runtime.cuda.calls.call import NO_LENGTHS, Call, SequenceLengths, Tensors
from fa4flex.runtime.cuda.launches.ready_backward import Saved
from fa4flex.runtime.flex.choice import by_flex
from fa4flex.runtime.gradients import gradients
from fa4flex.runtime.layouts import empty_output
from fa4flex.runtime.programs import Forward, Numbers, Published, read
from fa4flex.torch_internals import below_autograd, dispatch_modes, outside_operators
from ptxsim.active import simulating

# --- what computes ----------------------------------------------------------------------------------------


def forward(
    program: Published, given: Tensors, numbers: Numbers, max_scores: bool, differentiable: bool = True
) -> Forward:
    """Compute attention by a GPU's kernel, or blockwise on a CPU. What only a backward pass reads may be
    empty where the result is not `differentiable`."""
    on_gpu = given.q.is_cuda or simulating()
    if by_flex(program.backend, given.q) and not empty(given.q, given.k):
        return _by_flex(program, given, numbers, max_scores)
    if on_gpu and not empty(given.q, given.k):
        statistics = ("lse", "max_scores") if max_scores else ("lse",)
        out, lse, largest = program.engine.run(call_of(program, given, numbers, statistics))
        assert lse is not None
        return out, lse, lse.new_empty(0) if largest is None else largest, lse.new_empty(0)
    from fa4flex.runtime import blockwise

    if on_gpu:
        return blockwise.without_keys_on_gpu(program, given, numbers, max_scores)
    return blockwise.forward(program, given, numbers, max_scores, differentiable)


def empty(q: Tensor, k: Tensor) -> bool:
    """True without entries, queries or keys: there is nothing to launch."""
    return not (q.numel() and k.numel())


def backward(
    program: Published,
    given: Tensors,
    numbers: Numbers,
    gradients: tuple[Sequence[Tensor], Sequence[Tensor]],
    needs: Sequence[int],
) -> list[Tensor]:
    """[dq, dk, dv, dsinks if there are sinks, then a gradient per operand slot in `needs`].

    `gradients` is ([dout, dlse], what the forward returned); without dlse where nothing depends on the lse.
    """
    if by_flex(program.backend, given.q) and not empty(given.q, given.k):
        return _backward_by_flex(program, given, numbers, gradients[0], needs)
    if given.q.is_cuda or simulating():
        return _backward_on_gpu(program, given, numbers, gradients, needs)
    from fa4flex.runtime import blockwise

    return blockwise.backward(program, given, numbers, gradients, needs)


# --- by torch's flex_attention ----------------------------------------------------------------------------


def _by_flex(program: Published, given: Tensors, numbers: Numbers, max_scores: bool) -> Forward:
    """The results as an operator returns them."""
    statistics = ("lse", "max_scores") if max_scores else ("lse",)
    with _outside(grad=False):
        found, lse, largest = program.flex.attend(given, program.scalars(numbers), numbers.scale, statistics)
    assert lse is not None
    output = program.precision.output_dtype(given.q.dtype)
    out = empty_output(given.q, given.v.shape[-1], output).copy_(found)
    lse = lse.contiguous()
    if given.q.device.type != "cpu":
        return out, lse, lse.new_empty(0) if largest is None else largest, lse.new_empty(0)
    return (
        out,
        lse,
        lse.clone() if largest is None else largest.contiguous(),
        (lse > -torch.inf).to(lse.dtype),
    )


def _backward_by_flex(
    program: Published, given: Tensors, numbers: Numbers, upstream: Sequence[Tensor], needs: Sequence[int]
) -> list[Tensor]:
    """Gradients by torch's autograd, of a forward pass that is run again: an operator keeps no graph."""
    with _outside(grad=True):
        q, k, v = (x.detach().requires_grad_() for x in given[:3])
        sinks = None if given.sinks is None else given.sinks.detach().requires_grad_()
        operands = [x.detach().requires_grad_(slot in needs) for slot, x in enumerate(given.operands)]
        again = Tensors(q, k, v, sinks, given.lengths, tuple(operands))
        statistics = ("lse",) if len(upstream) > 1 else ()
        out, lse, _ = program.flex.attend(again, program.scalars(numbers), numbers.scale, statistics)
        wanted = [x for x in (q, k, v, sinks) if x is not None] + [operands[slot] for slot in needs]
        outputs = [out.to(upstream[0].dtype)] if lse is None else [out.to(upstream[0].dtype), lse]
        return list(torch.autograd.grad(outputs, wanted, list(upstream), materialize_grads=True))


@contextlib.contextmanager
def _outside(grad: bool) -> Iterator[None]:
    """Within, torch dispatches as outside of the operator at hand: vmap, which traces mods, and autograd, if
    `grad`, work there alone."""
    with (
        torch.inference_mode(False),
        outside_operators(),
        torch.set_grad_enabled(grad),
    ):
        yield


def call_of(program: Published, given: Tensors, numbers: Numbers, statistics: tuple[str, ...]) -> Call:
    q, k, v, sinks, lengths, operands = given
    lengths = NO_LENGTHS if all(x is None for x in lengths) else lengths
    scalars = program.scalars(numbers)
    return Call(q, k, v, operands, sinks, lengths, scalars, numbers.scale, True, statistics)


def _backward_on_gpu(
    program: Published,
    given: Tensors,
    numbers: Numbers,
    gradients: tuple[Sequence[Tensor], Sequence[Tensor]],
    needs: Sequence[int],
) -> list[Tensor]:
    """Compute gradients by kernels where there are some, else blockwise.

    Probabilities are exp(score - lse): where scores are so large that the lse has no digits left for the
    number of keys (some 1e7), rows of equal scores get too large a gradient.
    """
    (dout, *of_lse), (out, lse, *_) = gradients
    dlse = of_lse[0] if of_lse else None
    if dout.dtype == out.dtype == given.q.dtype and not empty(given.q, given.k):
        call = call_of(program, given, numbers, ("lse",))
        found = run_backward(program.engine, call, Saved(out, lse, dout, dlse), needs)
        if found is not None:
            return [x for x in (*found[:4], *found.captured) if x is not None]
    from fa4flex.runtime import blockwise

    return blockwise.backward_on_gpu(program, given, numbers, gradients, needs)


# --- autograd ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Plain:
    """Arguments of one call that are no tensors, a `Derivable`.

    floats   None: they come as tensors, through the operator
    scale    None: the last of the float tensors
    """

    program: Published
    operands: int
    ints: tuple[int, ...]
    floats: tuple[float, ...] | None
    scale: float | None
    max_scores: bool
    fixed: ClassVar[int] = 8
    """Number of tensors before the operands: q, k, v, sinks and four of lengths."""

    def has_sinks(self, tensors: Sequence[Any]) -> bool:
        return tensors[3] is not None

    def forward(self, *tensors: Tensor | None) -> Forward:
        """`tensors` are q, k, v, sinks, four of lengths, operands, floats."""
        given, floats = self._given(tensors)
        if self.floats is not None:
            return forward(self.program, given, self._numbers(self.floats), self.max_scores)
        plain = self.program.text, self.ints, floats, self.scale, self.max_scores
        q, k, v, sinks, lengths, operands = given
        with below_autograd():
            found: Forward = torch.ops.fa4flex.attention(q, k, v, operands, sinks, *lengths, *plain)
        return found

    def backward(
        self,
        tensors: Sequence[Any],
        upstream: list[Tensor],
        saved: Sequence[Any],
        needs: list[int],
    ) -> list[Tensor]:
        given, floats = self._given(tensors)
        if self.floats is not None:
            if not dispatch_modes():
                return backward(self.program, given, self._numbers(self.floats), (upstream, saved), needs)
            floats = _as_tensors(self.floats)  # modes see operators, also where the forward pass had none
        plain = self.program.text, self.ints, floats, self.scale, needs
        q, k, v, sinks, lengths, operands = given
        found: list[Tensor] = torch.ops.fa4flex.attention_backward(
            upstream, saved, q, k, v, operands, sinks, list(lengths), *plain
        )
        return found

    def _given(self, tensors: Sequence[Any]) -> tuple[Tensors, tuple[Tensor, ...]]:
        q, k, v, sinks, cu_q, cu_k, used_q, used_k, *rest = tensors
        operands, floats = tuple(rest[: self.operands]), tuple(rest[self.operands :])
        return Tensors(q, k, v, sinks, SequenceLengths(cu_q, cu_k, used_q, used_k), operands), floats

    def _numbers(self, floats: tuple[float, ...]) -> Numbers:
        assert self.scale is not None
        return Numbers(self.ints, floats, self.scale)


class Attend(torch.autograd.Function):
    """Attention by an operator or by what it computes, with gradients."""

    @staticmethod
    def forward(ctx: Any, plain: Plain, *tensors: Tensor | None) -> Forward:
        results: Forward = plain.forward(*tensors)
        ctx.plain = plain
        ctx.save_for_backward(*tensors, *results)
        ctx.mark_non_differentiable(*[x for x in results[2:] if x is not None])
        # Zeros for a log-sum-exp that nothing depends on would be a kernel of their own.
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: Any) -> tuple[Any, ...]:
        *tensors, out, lse, largest, total = ctx.saved_tensors
        found = gradients(
            ctx.plain, tensors, (out, lse, largest, total), (dout, dlse), ctx.needs_input_grad[1:]
        )
        return None, *found


def attend(program: Published, given: Tensors, numbers: Numbers, max_scores: bool, observed: bool) -> Forward:
    """One call, with gradients where autograd wants some. `observed`: something traces or intercepts
    operators, which then see one."""
    q, k, v, sinks, lengths, operands = given
    if observed:
        _follow()
        floats = _as_tensors(numbers.floats)
        found: Forward = torch.ops.fa4flex.attention(
            q, k, v, operands, sinks, *lengths, program.text, numbers.ints, floats, numbers.scale, max_scores
        )
        return found
    if not torch.is_grad_enabled() or not _wants_gradient(q, k, v, sinks, *operands):
        return forward(program, given, numbers, max_scores, differentiable=False)
    plain = Plain(program, len(operands), numbers.ints, numbers.floats, numbers.scale, max_scores)
    return Attend.apply(plain, q, k, v, sinks, *lengths, *operands)


def _as_tensors(floats: Sequence[float]) -> tuple[Tensor, ...]:
    """Captured floats as operators take them."""
    return tuple([_as_tensor(x) for x in floats])


def _as_tensor(x: Any) -> Tensor:
    """A float as operators take it; one that is symbolic stays so."""
    if isinstance(x, Tensor):
        return x
    if isinstance(x, torch.SymFloat):
        one = torch.ones((), dtype=torch.float64, device="cpu")
        return one * x  # type: ignore[operator]
    return torch.tensor(x, dtype=torch.float64, device="cpu")


def _wants_gradient(*tensors: Tensor | None) -> bool:
    return any(x is not None and x.requires_grad for x in tensors)


# --- the operators ----------------------------------------------------------------------------------------


def numbers_of(ints: Sequence[int], floats: Sequence[Tensor], scale: float | None) -> Numbers:
    """From an operator's arguments. The floats lie on the host: reading them waits for nothing."""
    values = tuple([float(x) for x in floats])
    return (
        Numbers(tuple(ints), values, scale)
        if scale is not None
        else Numbers(tuple(ints), values[:-1], values[-1])
    )


@on_the_host
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    operands: Sequence[Tensor],
    sinks: Tensor | None,
    *rest: Any,
) -> Forward:
    *lengths, program, ints, floats, scale, max_scores = rest
    given = Tensors(q, k, v, sinks, SequenceLengths(*lengths), tuple(operands))
    with autocast.off(q):
        return forward(read(program), given, numbers_of(ints, floats, scale), max_scores)


@on_the_host
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
    *rest: Any,
) -> list[Tensor]:
    ints, floats, scale, needs = rest
    given = Tensors(q, k, v, sinks, SequenceLengths(*lengths), tuple(operands))
    numbers = numbers_of(ints, floats, scale)
    with autocast.off(q):
        found = backward(read(program), given, numbers, (upstream, saved), needs)
    return [x.contiguous() for x in found]


def attention_with_gradients(
    q: Tensor, k: Tensor, v: Tensor, operands: Sequence[Tensor], sinks: Tensor | None, *rest: Any
) -> Forward:
    _follow()
    *lengths, text, ints, floats, scale, max_scores = rest
    plain = Plain(read(text), len(operands), tuple(ints), None, scale, max_scores)
    tensors = (q, k, v, sinks, *lengths, *operands, *floats)
    if not torch.is_grad_enabled() or not _wants_gradient(q, k, v, sinks, *operands):
        return plain.forward(*tensors)
    return Attend.apply(plain, *tensors)


def backward_below(*args: Any) -> list[Tensor]:
    with below_autograd():
        found: list[Tensor] = torch.ops.fa4flex.attention_backward(*args)
    return found


def _follow() -> None:
    """Register with parts of torch that were loaded since the last call; loading them is not ours."""
    sharding.follow(library)
    flops.follow()


_follow()


# --- shapes without data, for torch.compile ---------------------------------------------------------


def attention_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    operands: Sequence[Tensor],
    sinks: Tensor | None,
    cu_seqlens_q: Tensor | None,
    *rest: Any,
) -> Forward:
    precision, max_scores = read(rest[3]).precision, rest[-1]
    shape = q.shape[:-1] if cu_seqlens_q is None else (q.shape[1], q.shape[0])
    compute, output = precision.compute_dtype(q.dtype), precision.output_dtype(q.dtype)
    if q.device.type != "cpu":
        sizes: tuple[Any, ...] = (shape, shape if max_scores else (0,), (0,))
    else:
        sizes = (shape, shape, shape)
    out = empty_output(q, v.shape[-1], output)
    lse, largest, total = (q.new_empty(size, dtype=compute) for size in sizes)
    return out, lse, largest, total


def attention_backward_fake(
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
