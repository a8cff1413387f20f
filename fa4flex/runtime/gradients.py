"""The backward passes of autograd functions, for whatever computes gradients of a call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from fa4flex.default_device import on_the_host
from fa4flex.errors import UnsupportedError
from fa4flex.torch_internals import MappedDimension


class Derivable(Protocol):
    """One call without its tensors, which autograd keeps. They begin with q, k and v.

    fixed      number of tensors before the operands
    operands   number of captured tensors
    """

    @property
    def fixed(self) -> int: ...

    @property
    def operands(self) -> int: ...

    def has_sinks(self, tensors: Sequence[Any]) -> bool:
        """True if the fourth of the tensors are sinks."""

    def backward(
        self, tensors: Sequence[Any], upstream: list[Tensor], saved: Sequence[Any], needs: list[int]
    ) -> list[Tensor]:
        """Gradients of q, k, v, of sinks where there are some, and of the captured tensors in slots `needs`.

        upstream   gradients of out, and of lse where it has one
        saved      out, lse, max_scores and the sum of exponentials, None where there are none
        """


@on_the_host
def gradients(
    call: Derivable,
    tensors: Sequence[Any],
    saved: Sequence[Any],
    arriving: tuple[Tensor | None, Tensor | None],
    wanted: Sequence[bool],
) -> list[Tensor | None]:
    """Gradients of the tensors, None for those that have none.

    arriving   those of out and lse
    wanted     whether autograd asks for one, by tensor
    """
    (dout, dlse), fixed = arriving, call.fixed
    upstream = [torch.zeros_like(saved[0]) if dout is None else dout, *([] if dlse is None else [dlse])]
    needs = [slot for slot, want in enumerate(wanted[fixed : fixed + call.operands]) if want]
    if torch.is_grad_enabled():  # create_graph=True
        found = list(TwiceDerived.apply(call, needs, len(upstream), *upstream, *saved, *tensors))
    else:
        found = _backward(call, tensors, upstream, saved, needs)
    first = 3 + call.has_sinks(tensors)
    placed: list[Tensor | None] = [*found[:first], *[None] * (len(tensors) - first)]
    for slot, gradient in zip(needs, found[first:], strict=True):
        placed[fixed + slot] = gradient
    return placed


def _backward(
    call: Derivable, tensors: Sequence[Any], upstream: list[Tensor], saved: Sequence[Any], needs: list[int]
) -> list[Tensor]:
    """Gradients by `call`, of a batch of upstream gradients (is_grads_batched=True, jacobian(vectorize=True),
    vmap over torch.autograd.grad) one after another."""
    batch = next((made for x in upstream if (made := MappedDimension.of(x)) is not None), None)
    if batch is None:
        return call.backward(tensors, upstream, saved, needs)
    rows = zip(*[batch.rows(x) for x in upstream], strict=True)
    each = [_backward(call, tensors, list(row), saved, needs) for row in rows]
    return [batch.stacked(found) for found in zip(*each, strict=True)]


class TwiceDerived(torch.autograd.Function):
    """The backward pass where a second derivative might be wanted, which is refused in words."""

    @staticmethod
    def forward(ctx: Any, call: Derivable, needs: list[int], count: int, *given: Any) -> tuple[Tensor, ...]:
        upstream, saved, tensors = given[:count], given[count : count + 4], given[count + 4 :]
        return tuple(_backward(call, tensors, list(upstream), saved, needs))

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        raise UnsupportedError(
            "a second derivative of attention",
            "first derivatives",
            "leave out create_graph=True, or differentiate the dense formula twice, in plain PyTorch",
        )
