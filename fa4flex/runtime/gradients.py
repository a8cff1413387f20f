"""Calls with gradients: one function of autograd, whatever computes both passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from fa4flex.default_device import on_the_host
from fa4flex.errors import UnsupportedError
from fa4flex.runtime.call import NO_LENGTHS, Call, SequenceLengths
from fa4flex.runtime.compute import backward, backward_by_kernels
from fa4flex.runtime.cuda.launches.ready import Ready
from fa4flex.runtime.key_sources import Contiguous
from fa4flex.runtime.packing import gradients_by_operator
from fa4flex.runtime.programs import Published
from fa4flex.torch_internals import MappedDimension, dispatch_modes, function_modes


class Outline(NamedTuple):
    """A call without its tensors, which autograd keeps.

    compute      makes the results of a call: out, lse, then such as have no gradients, or None; and last the
                 entropy, where it is asked for
    operands     number of captured tensors
    sinks, ragged   whether the call has sinks, and lengths
    registered   whether `compute` is an operator, as the backward pass is then, too
    kernels      whether it is the launch of a kernel
    """

    program: Published
    compute: Callable[[Call], Any]
    operands: int
    sinks: bool
    ragged: bool
    registered: bool
    kernels: bool
    scalars: tuple[Any, ...]
    scale: float
    heads_first: bool
    statistics: tuple[str, ...]

    @staticmethod
    def of(
        program: Published, compute: Callable[[Call], Any], call: Call, registered: bool = False
    ) -> Outline:
        sinks, ragged = call.sinks is not None, call.lengths is not NO_LENGTHS
        kernels = isinstance(compute, Ready)
        return Outline(program, compute, len(call.operands), sinks, ragged, registered, kernels, *call[5:])

    @property
    def entropy(self) -> int | None:
        """Place of the entropy, which is differentiable, among results; None where it is not asked for."""
        return -1 if "entropy" in self.statistics else None

    @property
    def fixed(self) -> int:
        """Number of tensors before the operands."""
        return 3 + self.sinks + 4 * self.ragged

    def call(self, tensors: Sequence[Any]) -> Call:
        """`tensors` are q, k, v, sinks and four of lengths where the call has them, operands."""
        q, k, v, *rest = tensors
        sinks = rest.pop(0) if self.sinks else None
        lengths = NO_LENGTHS
        if self.ragged:
            lengths, rest = SequenceLengths(*rest[:4]), rest[4:]
        return Call(q, Contiguous(k, v), tuple(rest), sinks, lengths, *self[7:])

    def backward(
        self, tensors: Sequence[Any], upstream: list[Tensor], saved: Sequence[Any], needs: list[int]
    ) -> list[Tensor]:
        """Gradients of q, k, v, of sinks where there are some, and of the captured tensors in slots `needs`.
        Where something intercepts operators, one is called.

        upstream   gradients of out, of lse where it or the entropy has one, and of that where it has one
        saved      results of the forward pass
        """
        call = self.call(tensors)
        if self.registered or dispatch_modes():
            return gradients_by_operator(self.program, call, upstream, saved, needs)
        by = backward_by_kernels if self.kernels else backward
        return by(self.program, call, (upstream, saved), needs)


class Attend(torch.autograd.Function):
    """A call, with gradients. Autograd takes time for each argument, and is handed no more than there are."""

    @staticmethod
    def forward(ctx: Any, outline: Outline, known: Any, *tensors: Any) -> Any:
        results = outline.compute(outline.call(tensors)) if known is None else outline.compute(*known)
        ctx.outline = outline
        ctx.save_for_backward(*tensors, *results)
        if len(results) > 4:
            ctx.mark_non_differentiable(*[x for x in results[2 : outline.entropy] if x is not None])
        elif len(results) > 3 or results[2] is not None:
            ctx.mark_non_differentiable(*results[2:])
        # Zeros for a log-sum-exp that nothing depends on would be a kernel of their own.
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *rest: Any) -> tuple[Any, ...]:
        outline, saved = ctx.outline, ctx.saved_tensors
        count = outline.fixed + outline.operands
        arriving: tuple[Tensor | None, ...] = (dout, dlse)
        wanted = ctx.needs_input_grad[2:]
        if outline.entropy is not None:
            arriving = dout, dlse, rest[-1]
        made = _beside_modes if function_modes() else gradients
        return None, None, *made(outline, saved[:count], saved[count:], arriving, wanted)

    @classmethod
    def of(cls, outline: Outline, call: Call) -> Any:
        """Results of a call, with gradients."""
        return cls.apply(outline, None, *_tensors(call))

    @staticmethod
    def known(outline: Outline, call: Call, *known: Any) -> Any:
        """The same of a call whose tensors torch's guard has found to be like those of an earlier one: no
        transform has to do with them. known: further arguments of `outline.compute`."""
        if call.scale != outline.scale or not call.scale:
            outline = outline._replace(scale=call.scale)
        return _apply_compared(outline, (call, *known), *_tensors(call))


def _tensors(call: Call) -> tuple[Any, ...]:
    """Tensors of a call as `Outline.call` takes them."""
    q, kv, operands, sinks, lengths, *_ = call
    if sinks is None and lengths is NO_LENGTHS:
        return q, kv.k, kv.v, *operands
    arguments = (*(() if sinks is None else (sinks,)), *(() if lengths is NO_LENGTHS else lengths))
    return q, kv.k, kv.v, *arguments, *operands


_apply_compared: Callable[..., Any] = super(torch.autograd.Function, Attend).apply
"""`Attend.apply` without what torch does before it, in Python: it looks for transforms, and unwraps tensors
of those that have ended."""


def gradients(
    call: Outline,
    tensors: Sequence[Any],
    saved: Sequence[Any],
    arriving: Sequence[Tensor | None],
    wanted: Sequence[bool],
) -> list[Tensor | None]:
    """Gradients of the tensors, None for those that have none.

    arriving   those of out, lse, and the entropy where there is one
    wanted     whether autograd asks for one, by tensor
    """
    given, fixed = list(arriving), call.fixed
    while len(given) > 1 and given[-1] is None:
        given.pop()
    upstream = [torch.zeros_like(x) if dx is None else dx for x, dx in zip([*saved[:2], saved[1]], given)]
    needs = [slot for slot, want in enumerate(wanted[fixed : fixed + call.operands]) if want]
    if torch.is_grad_enabled():  # create_graph=True
        # Second derivatives follow from the tensors: through what was saved, zeros would run this pass again.
        saved = [x if x is None else x.detach() for x in saved]
        results = list(
            TwiceDerived.apply(call, needs, (len(upstream), len(saved)), *upstream, *saved, *tensors)
        )
    else:
        results = _backward(call, tensors, upstream, saved, needs)
    first = 3 + call.sinks
    placed: list[Tensor | None] = [*results[:first], *[None] * (len(tensors) - first)]
    for slot, gradient in zip(needs, results[first:], strict=True):
        placed[fixed + slot] = gradient
    return placed


_beside_modes = on_the_host(gradients)


def _backward(
    call: Outline, tensors: Sequence[Any], upstream: list[Tensor], saved: Sequence[Any], needs: list[int]
) -> list[Tensor]:
    """Gradients by `call`, of a batch of upstream gradients (is_grads_batched=True, jacobian(vectorize=True),
    vmap over torch.autograd.grad) one after another."""
    batch = next((made for x in upstream if (made := MappedDimension.of(x)) is not None), None)
    if batch is None:
        return call.backward(tensors, upstream, saved, needs)
    rows = zip(*[batch.rows(x) for x in upstream], strict=True)
    each = [_backward(call, tensors, list(row), saved, needs) for row in rows]
    return [batch.stacked(result) for result in zip(*each, strict=True)]


class TwiceDerived(torch.autograd.Function):
    """The backward pass where a second derivative might be wanted: from the tensors alone, as what the
    forward pass saved follows from these."""

    @staticmethod
    def forward(
        ctx: Any, call: Outline, needs: list[int], counts: tuple[int, int], *arguments: Any
    ) -> tuple[Tensor, ...]:
        first, second = counts
        upstream, saved = arguments[:first], arguments[first : first + second]
        tensors = arguments[first + second :]
        ctx.call, ctx.needs, ctx.first, ctx.second = call, needs, first, second
        ctx.save_for_backward(*upstream, *tensors)
        return tuple(_backward(call, tensors, list(upstream), saved, needs))

    @staticmethod
    def backward(ctx: Any, *tangents: Any) -> Any:
        if dispatch_modes():
            raise UnsupportedError(
                "a second derivative of attention where something intercepts operators",
                "second derivatives of eager calls, and first derivatives",
                "leave out create_graph=True, or torch.compile, make_fx or whatever else intercepts",
            )
        from fa4flex.runtime import derived  # calls of kernels do not wait for it

        upstream, tensors = ctx.saved_tensors[: ctx.first], ctx.saved_tensors[ctx.first :]
        outline: Outline = ctx.call
        call = outline.call(tensors)
        found, above = derived.second_derivatives(outline.program, call, ctx.needs, upstream, tangents)
        fixed = 3 + outline.sinks
        lengths = [None] * (4 * outline.ragged)
        return None, None, None, *above, *[None] * ctx.second, *found[:fixed], *lengths, *found[fixed:]


def refuse_second() -> NoReturn:
    """Raise UnsupportedError for a second derivative of an output function."""
    raise UnsupportedError(
        "a second derivative of an output function",
        "its first derivatives, and derivatives of any order of attention without it",
        "leave out create_graph=True, or apply the function to the output in PyTorch",
    )
