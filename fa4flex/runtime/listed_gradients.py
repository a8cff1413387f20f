"""Calls over listed keys with gradients, by kernels of both passes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fa4flex.errors import UnsupportedError
from fa4flex.runtime.call import NO_LENGTHS, Call, Results, SequenceLengths
from fa4flex.runtime.cuda import listed_backward
from fa4flex.runtime.cuda.engine import Engine
from fa4flex.runtime.cuda.launches.ready import Ready
from fa4flex.runtime.cuda.launches.ready_backward import Saved
from fa4flex.torch_internals import MappedDimension


class Outline(NamedTuple):
    """A call without its tensors, which autograd keeps. operands: number of captured tensors."""

    engine: Engine
    ready: Ready
    call: Call
    operands: int

    @staticmethod
    def of(engine: Engine, ready: Ready, call: Call) -> tuple[Outline, tuple[Tensor | None, ...]]:
        """And the tensors, q, k, v and the sinks first."""
        kv, lengths = call.kv, call.lengths
        tensors = call.q, kv.k, kv.v, call.sinks, kv.ids, kv.counts, *lengths, *call.operands  # type: ignore[attr-defined]
        bare = kv._replace(k=None, v=None, ids=None, counts=None)  # type: ignore[attr-defined]
        kept = call._replace(q=None, kv=bare, sinks=None, lengths=NO_LENGTHS, operands=())  # type: ignore[arg-type]
        return Outline(engine, ready, kept, len(call.operands)), tensors

    def whole(self, tensors: tuple[Any, ...]) -> Call:
        q, k, v, sinks, ids, counts, *others = tensors
        lengths = SequenceLengths(*others[:4])
        return self.call._replace(
            q=q,
            kv=self.call.kv._replace(k=k, v=v, ids=ids, counts=counts),  # type: ignore[attr-defined]
            sinks=sinks,
            lengths=NO_LENGTHS if lengths == NO_LENGTHS else lengths,
            operands=tuple(others[4:]),
        )


class AttendListed(torch.autograd.Function):
    """A call over listed keys, with gradients of q, k, v and sinks."""

    @staticmethod
    def forward(ctx: Any, outline: Outline, *tensors: Any) -> Any:
        out, lse, *rest = outline.ready(outline.whole(tensors))
        ctx.outline = outline
        ctx.save_for_backward(*tensors, out, lse)
        ctx.mark_non_differentiable(*[x for x in rest if x is not None])
        # Zeros for a log-sum-exp that nothing depends on would be a kernel of their own.
        ctx.set_materialize_grads(False)
        return out, lse, *rest

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *rest: Any) -> tuple[Any, ...]:
        *tensors, out, lse = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout
        saved = Saved(out, lse, dout, dlse)
        if torch.is_grad_enabled():  # create_graph=True: results depend on all tensors
            found = _Backward.apply(ctx.outline, len(tensors), *tensors, *saved[:4])
        else:
            found = _gradients(ctx.outline, tensors, saved)
        return None, *found, *[None] * (len(tensors) - len(found))


class _Backward(torch.autograd.Function):
    """The backward pass, which has no derivative."""

    @staticmethod
    def forward(ctx: Any, outline: Outline, count: int, *given: Any) -> Any:
        return _gradients(outline, given[:count], Saved(*given[count:]))

    @staticmethod
    def backward(ctx: Any, *given: Any) -> Any:
        raise UnsupportedError(
            "a second derivative of attention over listed keys",
            "first derivatives; or lists as a map, of which there are derivatives of any order",
            "leave out create_graph=True, or pass blocks=lists.map()",
        )


def _gradients(outline: Outline, tensors: tuple[Any, ...], saved: Saved) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v and sinks; of a batch of upstream gradients (is_grads_batched=True), one after
    another."""
    if listed_backward.deterministic(outline.engine):
        raise UnsupportedError(
            "gradients over listed keys of a call that was not deterministic, in one order of sums",
            "torch.use_deterministic_algorithms(True) before the forward pass, which is then that of a map",
            "set it earlier, or fa4flex.Schedule(deterministic=True)",
        )
    arriving = [x for x in (saved.dout, saved.dlse) if x is not None]
    batch = next((made for x in arriving if (made := MappedDimension.of(x)) is not None), None)
    if batch is None:
        found = listed_backward.run_listed_backward(outline.engine, outline.whole(tensors), saved)
        return found.dq, found.dk, found.dv, found.dsinks
    rows = zip(*[batch.rows(x) for x in arriving], strict=True)
    each = [_gradients(outline, tensors, Saved(*saved[:2], *row, *[None] * (2 - len(row)))) for row in rows]
    return tuple(None if one[0] is None else batch.stacked(one) for one in zip(*each, strict=True))


def attend(engine: Engine, ready: Ready, call: Call) -> Results:
    """Results of a call of `ready`, whose gradients have a kernel as well."""
    outline, tensors = Outline.of(engine, ready, call)
    results: Results = AttendListed.apply(outline, *tensors)
    return results
