"""Eager calls on a GPU with gradients: autograd goes straight to the launches of both passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fa4flex.runtime.cuda.backward import run_backward
from fa4flex.runtime.cuda.calls.call import NO_LENGTHS, Call, SequenceLengths
from fa4flex.runtime.cuda.launches.ready import Results
from fa4flex.runtime.cuda.launches.ready_backward import Saved
from fa4flex.runtime.gradients import gradients
from fa4flex.runtime.ops import Plain
from fa4flex.runtime.programs import Published
from fa4flex.torch_internals import dispatch_modes


class Direct(NamedTuple):
    """One call that is launched, a `Derivable`.

    launch    makes the results of a call
    operands  number of captured tensors
    sinks, ragged   whether the call has sinks, and lengths
    """

    program: Published
    launch: Callable[[Call], Results]
    operands: int
    sinks: bool
    ragged: bool
    scalars: tuple[int | float, ...]
    scale: float
    heads_first: bool
    statistics: tuple[str, ...]

    @staticmethod
    def of(program: Published, launch: Callable[[Call], Results], call: Call) -> Direct:
        sinks, ragged = call.sinks is not None, call.lengths is not NO_LENGTHS
        return Direct(program, launch, len(call.operands), sinks, ragged, *call[6:10])

    @property
    def fixed(self) -> int:
        """Number of tensors before the operands."""
        return 3 + self.sinks + 4 * self.ragged

    def has_sinks(self, tensors: Sequence[Any]) -> bool:
        return self.sinks

    def call(self, tensors: Sequence[Any]) -> Call:
        """`tensors` are q, k, v, sinks and four of lengths where the call has them, operands."""
        q, k, v, *rest = tensors
        sinks = rest.pop(0) if self.sinks else None
        lengths = NO_LENGTHS
        if self.ragged:
            lengths, rest = SequenceLengths(*rest[:4]), rest[4:]
        return Call(q, k, v, tuple(rest), sinks, lengths, *self[5:])

    def backward(
        self,
        tensors: Sequence[Any],
        upstream: list[Tensor],
        saved: Sequence[Any],
        needs: list[int],
    ) -> list[Tensor]:
        """Gradients as an operator returns them. Where there is no kernel for them, or something intercepts
        operators, one is called."""
        call, (dout, *of_lse), (out, lse, *_) = self.call(tensors), upstream, saved
        if dout.dtype == out.dtype == call.q.dtype and not dispatch_modes():
            given = Saved(out, lse, dout, of_lse[0] if of_lse else None)
            found = run_backward(self.program.engine, call, given, needs)
            if found is not None:
                return [x for x in (*found[:4], *found.captured) if x is not None]
        return self._by_operator(call, upstream, (out, lse), needs)

    def _by_operator(
        self, call: Call, upstream: list[Tensor], saved: tuple[Tensor, Tensor], needs: list[int]
    ) -> list[Tensor]:
        swap = not self.heads_first and not call.packed

        def turned(x: Tensor) -> Tensor:
            return x.transpose(1, 2) if swap else x

        numbers = self.program.numbers(self.scalars, self.scale)
        plain = Plain(
            self.program, len(call.operands), numbers.ints, numbers.floats, self.scale, max_scores=False
        )
        (dout, *of_lse), (out, lse) = upstream, saved
        none = lse.new_empty(0)
        tensors = *map(turned, (call.q, call.k, call.v)), call.sinks, *call.lengths, *call.operands
        found = plain.backward(tensors, [turned(dout), *of_lse], [turned(out), lse, none, none], needs)
        return [*map(turned, found[:3]), *found[3:]]


class Launched(torch.autograd.Function):
    """A call that is launched, with gradients. Autograd takes time for each argument, and is handed no more
    than there are."""

    @staticmethod
    def forward(ctx: Any, direct: Direct, *tensors: Any) -> Results:
        results = direct.launch(direct.call(tensors))
        out, lse, largest = results
        ctx.direct = direct
        ctx.save_for_backward(*tensors, out, lse)
        if largest is not None:
            ctx.mark_non_differentiable(largest)
        # Zeros for a log-sum-exp that nothing depends on would be a kernel of their own.
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: Any) -> tuple[Any, ...]:
        *tensors, out, lse = ctx.saved_tensors
        saved = out, lse, None, None
        return None, *gradients(ctx.direct, tensors, saved, (dout, dlse), ctx.needs_input_grad[1:])


_apply_compared: Callable[..., Results] = super(torch.autograd.Function, Launched).apply
"""`Launched.apply` without what torch does before it, in Python: it looks for transforms, and unwraps tensors
of those that have ended."""


def attend(direct: Direct, call: Call, compared: bool = False) -> Results:
    """out, lse and max_scores, with gradients. compared: torch's guard has found the tensors to be like those
    of an earlier call, so that no transform has to do with them."""
    apply: Callable[..., Results] = _apply_compared if compared else Launched.apply
    q, k, v, operands, sinks, lengths, *_ = call
    if sinks is None and lengths is NO_LENGTHS:
        return apply(direct, q, k, v, *operands)
    given = (*(() if sinks is None else (sinks,)), *(() if lengths is NO_LENGTHS else lengths))
    return apply(direct, q, k, v, *given, *operands)
