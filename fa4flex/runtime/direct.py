"""Eager calls on a GPU with gradients: autograd goes straight to the launches of both passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fa4flex.runtime.cuda.backward import Saved, run_backward
from fa4flex.runtime.cuda.call import NO_LENGTHS, Call, SequenceLengths
from fa4flex.runtime.cuda.ready import Results
from fa4flex.runtime.ops import Attend, Plain
from fa4flex.runtime.programs import Published


@dataclass(frozen=True, eq=False, slots=True)
class Direct:
    """One call without its tensors, which autograd keeps. It takes the place of an operators' `Plain`.

    launch    makes the results of a call
    ragged    whether the call has lengths
    operands  number of captured tensors
    """

    program: Published
    launch: Callable[[Call], Results]
    ragged: bool
    operands: int
    scalars: tuple[int | float, ...]
    scale: float
    heads_first: bool
    statistics: tuple[str, ...]

    @staticmethod
    def of(program: Published, launch: Callable[[Call], Results], call: Call) -> Direct:
        ragged, operands = call.lengths is not NO_LENGTHS, len(call.operands)
        rest = call.scalars, call.scale, call.heads_first, call.statistics
        return Direct(program, launch, ragged, operands, *rest)

    def call(self, tensors: Sequence[Any]) -> Call:
        """`tensors` are q, k, v, sinks, four of lengths, operands."""
        q, k, v, sinks, *lengths = tensors[:8]
        given = SequenceLengths(*lengths) if self.ragged else NO_LENGTHS
        operands = tuple(tensors[8:])
        rest = self.scalars, self.scale, self.heads_first, self.statistics
        return Call(q, k, v, operands, sinks, given, *rest)

    def forward(self, *tensors: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None, None]:
        return *self.launch(self.call(tensors)), None

    def backward(
        self,
        tensors: Sequence[Tensor | None],
        upstream: list[Tensor],
        saved: Sequence[Tensor],
        needs: list[int],
    ) -> list[Tensor]:
        """Gradients as an operator returns them. Where there is no kernel for them, or something intercepts
        operators, one is called."""
        call, (dout, *of_lse), (out, lse, *_) = self.call(tensors), upstream, saved
        if dout.dtype == out.dtype == call.q.dtype and not torch._C._len_torch_dispatch_stack():
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
        plain = Plain(self.program, self.operands, numbers.ints, numbers.floats, self.scale, max_scores=False)
        (dout, *of_lse), (out, lse) = upstream, saved
        none = lse.new_empty(0)
        tensors = *map(turned, (call.q, call.k, call.v)), call.sinks, *call.lengths, *call.operands
        found = plain.backward(tensors, [turned(dout), *of_lse], [turned(out), lse, none, none], needs)
        return [*map(turned, found[:3]), *found[3:]]


def attend(direct: Direct, call: Call) -> Results:
    """out, lse and max_scores, with gradients."""
    q, k, v, operands, sinks, lengths, *_ = call
    out, lse, largest, _ = Attend.apply(direct, q, k, v, sinks, *lengths, *operands)
    return out, lse, largest
