"""Calls whose derivatives are of other kinds than a backward pass, and second derivatives of such as are
not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fa4flex.errors import UnsupportedError
from fa4flex.primitives.precision import refuse_skip
from fa4flex.runtime.call import Call, Results
from fa4flex.runtime.derived import together
from fa4flex.runtime.derived.parts import Attention, Pull, Recipe, applied, laid, laid_rows
from fa4flex.runtime.key_sources import Contiguous
from fa4flex.runtime.kv_heads import of_kv_heads, repeated, summed
from fa4flex.runtime.programs import Published
from fa4flex.torch_internals import is_functional

_EXACT = (
    "forward mode, second derivatives or transforms of torch.func",
    "they are derivatives of the exact function, whose values the forward pass does not have",
)


def attend(program: Published, call: Call) -> Results:
    """(out, lse, None) of a call with heads first, or packed."""
    beyond = [name for name in call.statistics if name != "lse"]
    if beyond:
        raise UnsupportedError(
            f"{' and '.join(beyond)} inside torch.func.grad, vmap or jvp, or of tensors with tangents",
            "out and lse",
            "leave it out, or ask for it in a call of its own, outside",
        )
    refuse_skip(program.precision.skip, *_EXACT)
    results = together.attend(program, call)
    if results is not None:
        return results
    recipe, tensors = _split(program, _of_kv_heads(call))
    if any(map(is_functional, tensors)):
        raise UnsupportedError(
            "a tensor inside torch.func.functionalize",
            "torch.func.grad, vjp, jvp, vmap and what is made of these",
            "leave functionalize out: attention changes none of its inputs",
        )
    out, lse = applied(Attention(recipe.kinds(len(tensors))), recipe, *tensors)
    return (out.squeeze(0).transpose(0, 1), lse.squeeze(0), None) if recipe.packed else (out, lse, None)


def second_derivatives(
    program: Published,
    call: Call,
    needs: Sequence[int],
    upstream: Sequence[Tensor],
    tangents: Sequence[Tensor],
) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients of <gradients of a call, tangents>: by q, k, v, sinks if there are any and all operands that
    float; and by `upstream`, the gradients of out, and of lse where it has one.

    tangents   one for each gradient: of q, k, v, sinks, and the operands in slots `needs`
    """
    refuse_skip(program.precision.skip, *_EXACT)
    if len(upstream) > 2:
        raise UnsupportedError(
            "a second derivative through the entropy",
            "second derivatives through out and lse, and first ones through the entropy",
            "leave out create_graph=True, or the entropy",
        )
    turned, shares = call.turned(), (1, *call.shares)
    recipe, tensors = _split(program, _of_kv_heads(turned))
    fixed = 3 + recipe.sinks
    by = (*range(fixed), *[fixed + slot for slot in needs])
    dout, *rest = upstream
    dout = call.turn(dout)
    dlse = rest[0] if rest else dout.new_zeros(_rows(call), dtype=_dtype(program, call))
    above = [laid(dout, recipe.packed), laid_rows(dlse, recipe.packed)]
    given = [
        repeated(laid(call.turn(x), recipe.packed), shares[n]) if n < 3 else x for n, x in enumerate(tangents)
    ]
    level = Pull(Attention(recipe.kinds(len(tensors))), by)
    floating = tuple([n for n, x in enumerate((*tensors, *above)) if x.is_floating_point()])
    found = applied(Pull(level, floating), recipe, *tensors, *above, *given)
    placed = dict(zip(floating, found, strict=True))
    of_tensors = [
        call.turn(_unlaid(summed(placed[n], shares[n]), recipe.packed)) if n < 3 else placed.get(n)
        for n in range(len(tensors))
    ]
    of_out = call.turn(_unlaid(placed[len(tensors)], recipe.packed))
    of_lse = placed[len(tensors) + 1]
    of_lse = of_lse.squeeze(0) if recipe.packed else of_lse
    return of_tensors, [of_out, of_lse][: len(upstream)]  # type: ignore[return-value]


def _split(program: Published, call: Call) -> tuple[Recipe, list[Tensor]]:
    """A call as a recipe and its tensors. Raises UnsupportedError for other weights than the softmax's."""
    if not program.facts.softmax:
        raise UnsupportedError(
            f"forward-mode and second derivatives of attention with {program.facts.weights.kind} weights",
            "backward passes, and derivatives of any order of the softmax",
            "leave out create_graph=True, torch.func and dual tensors, or compute it densely in PyTorch",
        )
    sinks = [] if call.sinks is None else [call.sinks]
    recipe = Recipe(program, tuple(call.scalars), call.scale, bool(sinks), call.lengths)
    qkv = [laid(x, recipe.packed) for x in (call.q, call.kv.k, call.kv.v)]
    return recipe, [*qkv, *sinks, *call.operands]


def _of_kv_heads(call: Call) -> Call:
    """The same call with as many heads of k as of v; these are copied where they differ. Differentiable."""
    return call._replace(kv=Contiguous(*of_kv_heads(call.kv.k, call.kv.v)))


def _unlaid(x: Tensor, packed: bool) -> Tensor:
    return x.squeeze(0).transpose(0, 1) if packed else x


def _rows(call: Call) -> Any:
    turned = call.turned().q.shape
    return (turned[1], turned[0]) if call.packed else turned[:3]


def _dtype(program: Published, call: Call) -> torch.dtype:
    return program.precision.compute_dtype(call.q.dtype)
